// The recording of one forward: its calls, the values they read and make, and the tensors they take from outside.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "plumb/capture/capture.h"
#include "plumb/capture/value_table.h"
#include "plumb/core/error.h"
#include "plumb/graph/module_state_guard.h"

namespace plumb {

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
  // one to a detached tensor.
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
