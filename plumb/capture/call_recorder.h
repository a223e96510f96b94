// The recording of one forward: its calls, the values they read and make, and the tensors they take from outside.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "plumb/graph/graph.h"
#include "plumb/graph/module_state_guard.h"

namespace plumb {

// An argument while recording: values are numbers, because records can still be thrown away.
struct RecordedArg {
  std::variant<int, c10::IValue, std::vector<RecordedArg>> data;
};

// Calls `visit` with the number of every value in it, in order.
template <class Visit>
void for_each_value(const RecordedArg& arg, const Visit& visit) {
  if (const int* value = std::get_if<int>(&arg.data)) visit(*value);
  if (const auto* list = std::get_if<std::vector<RecordedArg>>(&arg.data)) {
    for (const RecordedArg& element : *list) for_each_value(element, visit);
  }
}

// Returns whether `is` holds for a tensor of a value, itself or an element of a list.
template <class Is>
bool any_tensor(const c10::IValue& v, const Is& is) {
  if (v.isTensor()) return is(v.toTensor());
  if (!v.isList() || v.isIntList() || v.isDoubleList()) return false;
  const auto elements = v.toListRef();
  return std::any_of(elements.begin(), elements.end(), [&](const c10::IValue& e) { return any_tensor(e, is); });
}

struct Record {
  c10::OperatorHandle op;
  std::vector<RecordedArg> args;
  std::vector<int32_t> layout;  // as Node::result_layout()
  std::vector<int> results;     // value numbers, flattened
  bool grad_enabled;
  std::shared_ptr<const ModuleStack> modules;
  std::shared_ptr<const SourceLocation> source;
  bool dynamic = false;  // sizes of its results may depend on the data
};

// The facts known of a value number.
struct RecordedValue {
  enum Origin : uint8_t { Input, Attribute, Result } origin = Result;
  TensorMeta meta;
  bool requires_grad = false;
  bool from_constants = false;  // made of constants alone: the same at every call
  bool dead = false;            // its record was thrown away
  bool written = false;         // its memory was written since: requires_grad may have changed
  bool dynamic = false;         // its sizes may depend on the data
  bool size_guarded = false;    // a node checks them
  const void* grad_fn = nullptr;
  int attribute = -1;  // index into CallRecorder::attributes
  // The values that its tensor object and its memory were before, -1 for none: once this one is dead, they are again.
  int object_before = -1, memory_before = -1;
};

// Values by identity: the number that a tensor object, or the memory it shows, has in a recording.
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
  // Returns the results whose tensor objects somebody holds, with their numbers, in order.
  std::vector<std::pair<int, at::Tensor>> held_results() const;
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

// Memory whose contents in a replay are not those that the program sees, after an assignment to `.data`.
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

// The CPU memory that operators made for results without a gradient, to notice that a program writes it outside of
// torch's sight, by accessor or raw pointer. (Written so, a result with a gradient has a wrong one in eager mode, too.)
// Of more than 64 KiB only the first reading is looked at, and only if no operator has written them before: a loop may
// read or write a row at a time.
class SeenMemory {
 public:
  // Memory that no operator has made, parameters say, is not looked at: it may be large.
  void leave_out(const at::Tensor& tensor);
  // Keeps a hash of the tensor's memory as it is now, unless a view of it was seen.
  void see(const at::Tensor& tensor);
  // Called before this tensor's memory is written in sight.
  void before_write(const at::Tensor& tensor);
  // Returns whether the memory is another one than when it was seen last.
  bool has_changed(const at::Tensor& tensor);

 private:
  // A weak reference keeps the address from being used again.
  struct Seen {
    c10::weak_intrusive_ptr<c10::StorageImpl> keep;
    std::optional<size_t> hash;  // nothing: it is not looked at any more
  };
  std::unordered_map<const c10::StorageImpl*, Seen> seen_;
  std::unordered_set<const c10::StorageImpl*> left_out_;
};

class CallRecorder {
 public:
  CallRecorder(const CaptureRequest& request, ModuleStateGuard& module_state);

  // --- values ---
  // The number of the value that this tensor is now; `reader` names the operator that asks, for messages. A tensor that
  // is not known becomes a constant. Refuses tensors that a graph cannot hold.
  int look_up(const at::Tensor& tensor, const std::string& reader);
  // Looks up every tensor of an operator's argument. `from_constants` becomes false if one of them is no constant.
  RecordedArg argument(const c10::IValue& v, const std::string& reader, bool& from_constants);
  // Called before `arg` is written, as `tensor`. If that is another tensor on the same memory (`.data`), the write is
  // one to a plumb::data.
  void cut_off_data(const at::Tensor& tensor, RecordedArg& arg);
  // Adds the tensor that the model is called with in place of `given`.
  void add_input(const at::Tensor& fed, const at::Tensor& given);
  // Adds a constant with a copy of this tensor's contents.
  int constant_copy(const at::Tensor& tensor);
  // Returns the call that made this value, or null.
  const Record* producer(const RecordedArg& arg) const;

  // --- calls ---
  // Returns a call of this operator, with the module and line where the program is now.
  Record begin(const c10::OperatorHandle& op);
  // Numbers the call's results, which are on top of the stack, and keeps the call.
  void finish(Record record, const torch::jit::Stack& stack, bool from_constants);
  // Adds a call of an operator that the program did not make: with one result, or with none.
  int emit(std::string_view op, std::vector<RecordedArg> args, const at::Tensor& result, bool from_constants);
  void emit(std::string_view op, std::vector<RecordedArg> args);

  struct Mark {
    size_t records, values;
  };
  Mark mark() const { return {records.size(), values.size()}; }
  // Throws away the calls recorded since.
  void drop_since(const Mark& mark);

  // --- places and messages ---
  // The modules that the program is in, shared by the calls made there; null outside of all modules.
  std::shared_ptr<const ModuleStack> modules_now();
  std::string where() const;
  void note(std::string text) { notes.push_back(std::move(text)); }
  // Adds where() to the text.
  void note_here(const std::string& text);
  // Throws, and remembers the error: the exception's type is lost on its way through Python.
  [[noreturn]] void refuse(const std::string& what, const std::string& remedy, ErrorKind kind = ErrorKind::Capture);

  const CaptureRequest& request;
  ValueTable values;
  StaleMemory stale;
  SeenMemory seen;
  std::vector<Record> records;
  std::vector<Attr> attributes;                  // attributes of the state, then constants
  size_t num_state = 0;                          // how many of them came with the request
  std::vector<int> attribute_values;             // value number of each, -1 while unused
  std::vector<int> input_values;                 // -1 for inputs that are no tensors
  std::vector<at::Tensor> fed;                   // inputs that are tensors, as the model was called with
  std::vector<std::pair<int, int>> write_backs;  // (attribute, value) to write at the end of the graph
  std::vector<std::string> notes;
  std::vector<ModuleFrame> module_stack;
  bool any_dynamic = false;  // a size that depends on the data was met
  std::optional<Error> refusal;
  bool refused_in_library = false;  // the refused line is of a library that has another way for graph makers

 private:
  void check_tensor(const at::Tensor& tensor, const std::string& reader);
  void refuse_nested(const at::Tensor& tensor, const std::string& reader);
  int known_as(ValueTable::Found found, const at::Tensor& tensor, const std::string& reader);
  int add_attribute(const at::Tensor& constant);
  int add_constant(const at::Tensor& tensor, const std::string& reader);
  void bind_result(Record& record, const at::Tensor& tensor, bool from_constants);

  ModuleStateGuard& module_state_;
  std::shared_ptr<const ModuleStack> last_stack_;
};

}  // namespace plumb
