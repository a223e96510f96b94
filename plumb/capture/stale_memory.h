// Memory whose contents in a replay are not those that the program sees, after an assignment to `.data`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <unordered_map>
#include <vector>

namespace plumb {

class StaleMemory {
 public:
  // Marks the tensor's present memory as stale.
  void add(const at::Tensor& tensor);
  // Notes two tensors that share memory in the program but not in a replay: once one is written, the other is stale.
  void add_twins(const at::Tensor& a, const at::Tensor& b);
  // Called before this tensor's memory is written.
  void before_write(const at::Tensor& tensor);
  bool contains(const at::Tensor& tensor) const;

 private:
  // A weak reference keeps the address from being used again.
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::unordered_map<const c10::StorageImpl*, Weak> stale_;
  std::unordered_map<const c10::StorageImpl*, std::vector<Weak>> twins_;
};

}  // namespace plumb
