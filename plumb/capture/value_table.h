// Values by identity: the number that a tensor object, or the memory it shows, has in a recording.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "plumb/capture/records.h"

namespace plumb {

class ValueTable {
 public:
  // Adds a value with dtype, sizes and gradient state of this tensor, which may be undefined. Returns its number.
  int add(const at::Tensor& tensor, RecordedValue::Origin origin);
  // Binds this tensor object, and every tensor that shows the same memory in the same way, to this value.
  void bind(const at::Tensor& tensor, int value);

  struct Found {
    int value = -1;  // -1: unknown
    bool by_memory = false;
  };
  // Finds the value that this tensor is: by its object, else by storage, offset, sizes, strides and dtype.
  Found find(const at::Tensor& tensor) const;
  // Finds the value of this tensor object, or -1.
  int find_object(const at::Tensor& tensor) const;

  // Marks the values bound to this tensor's storage as written: writing through a view can make its base require grad.
  void mark_written(const at::Tensor& tensor);
  // Forgets the results added since `first` values were known: their tensors are again what they were before.
  void drop_results(size_t first);

  RecordedValue& operator[](int value) { return values_[static_cast<size_t>(value)]; }
  const RecordedValue& operator[](int value) const { return values_[static_cast<size_t>(value)]; }
  size_t size() const { return values_.size(); }

 private:
  struct Memory {
    const void* storage;
    int64_t offset;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    auto operator<=>(const Memory&) const = default;
  };
  // Weak references keep an address from being used again and leave use_count alone, on which factories depend.
  template <class Weak>
  struct Entry {
    int value;
    Weak keep;
  };
  using ObjectEntry = Entry<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>;
  using MemoryEntry = Entry<c10::weak_intrusive_ptr<c10::StorageImpl>>;

  // Returns the value, or the first living one in the chain of those before it; -1 if there is none.
  int living(int value, int RecordedValue::*before) const;
  static std::optional<Memory> memory_of(const at::Tensor& tensor);

  std::vector<RecordedValue> values_;
  std::unordered_map<const c10::TensorImpl*, ObjectEntry> by_object_;
  std::map<Memory, MemoryEntry> by_memory_;
  std::unordered_map<const void*, std::vector<int>> by_storage_;  // bound since the storage was last written
};

}  // namespace plumb
