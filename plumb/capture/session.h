// One capture under way: the records of operator calls, and what each tensor that is met stands for.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/intrusive_ptr.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"

namespace plumb {

// An argument while recording: values are numbers, because records can still be thrown away.
struct RecordedArg {
  std::variant<int, c10::IValue, std::vector<RecordedArg>> data;
};

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

// What is known of a value number.
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
  int attribute = -1;  // index into Session::attributes
};

// A capture without values met a question that only values answer.
struct NeedsValues : std::runtime_error {
  NeedsValues() : std::runtime_error("the capture needs values") {}
};

// A backward pass runs inside the forward.
struct NeedsOpenComposites : std::runtime_error {
  NeedsOpenComposites() : std::runtime_error("the capture needs the operators inside of composite ones") {}
};

// Whether this operator (aten::item, ...) hands a value out of a tensor to the program.
bool is_value_reader(std::string_view name);

class Session {
 public:
  explicit Session(const CaptureRequest& request);
  ~Session();
  Session(const Session&) = delete;

  // The session of this thread, or null.
  static Session* current();

  // Flat inputs to call the model with: clones, floating ones requiring grad.
  std::vector<c10::IValue> feed();
  // Sees every call between start() and stop().
  void start();
  void stop();
  // Sees nothing from pause() to resume(). A capture that goes without values starts again with them: what happens
  // meanwhile may ask for some.
  void pause();
  void resume();

  // The number of the value that this tensor is now; `reader` names who asks, for messages.
  int look_up(const at::Tensor& tensor, const std::string& reader);
  void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Where the program is now, shared by the records made there; null outside of all modules.
  std::shared_ptr<const ModuleStack> modules_now();
  // Writes `value` into the buffer at the end of the graph (a buffer that the model re-assigned); `what` names it.
  void write_back(int attribute, const at::Tensor& value, const std::string& what);
  // The same for a tensor that the module holds as an attribute, where the graph reads the old one.
  void write_back_attribute(const std::string& name, const at::Tensor& old, const at::Tensor& now);

  // Whether this tensor's sizes may depend on the data, and a node that checks in every run that they are these
  // (`exact`), or that they are still as empty or not.
  bool has_dynamic_sizes(const at::Tensor& tensor) const;
  void guard_size(const at::Tensor& tensor, bool exact);
  at::Tensor guard_values(const at::Tensor& tensor);
  // Buffers whose values were read must not be written by the graph.
  void check_buffer_reads() const;

  // Throws, and remembers why: on its way through Python the exception's type is lost.
  [[noreturn]] void refuse(const std::string& what, const std::string& remedy,
                           ErrorKind kind = ErrorKind::Capture) const;
  void note(std::string text) { notes.push_back(std::move(text)); }

  const CaptureRequest& request;
  std::vector<Attr> attributes;       // of the state, then constants
  size_t num_state = 0;               // how many of them came with the request
  std::vector<int> attribute_values;  // value number of each, -1 while unused
  std::vector<Record> records;
  std::vector<RecordedValue> values;
  std::vector<int> input_values;                 // -1 for inputs that are no tensors
  std::vector<std::pair<int, int>> write_backs;  // (attribute, value)
  std::vector<std::string> notes;
  std::vector<ModuleFrame> module_stack;
  mutable std::optional<Error> refusal;
  // Large products may be left out, and whether one was: then no value is what it will be.
  bool may_stand_in = false, stood_in = false;
  bool needs_values = false;  // was thrown, whoever may have caught it
  // Composite operators are seen as those that they are made of; and whether that turned out to be needed.
  bool open_composites = false, needs_open = false;

 private:
  struct AliasKey {
    const void* storage;
    int64_t offset;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
    auto operator<=>(const AliasKey&) const = default;
  };
  struct ImplEntry {
    int value;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> keep;
  };
  struct StorageEntry {
    int value;
    c10::weak_intrusive_ptr<c10::StorageImpl> keep;
  };

  static std::optional<AliasKey> alias_key(const at::Tensor& tensor);
  int new_value(const at::Tensor& tensor, RecordedValue::Origin origin);
  void bind(const at::Tensor& tensor, int value);
  int add_constant(const at::Tensor& tensor, const std::string& reader);
  int emit(std::string_view op, std::vector<RecordedArg> args, const at::Tensor& result, bool from_constants);
  RecordedArg record_arg(const c10::IValue& v, const std::string& reader, bool& from_constants);
  void check_tensor(const at::Tensor& tensor, const std::string& reader) const;
  bool refuse_or_skip_valueless(const c10::OperatorHandle& op, const std::string& name,
                                const std::vector<RecordedArg>& args, bool from_constants,
                                const torch::jit::Stack& stack);
  void before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  void guard_equal(const std::vector<RecordedArg>& args, const torch::jit::Stack& stack);
  bool is_known(const RecordedArg& condition) const;
  const Record* producer(const RecordedArg& arg) const;
  bool guard_check(const RecordedArg& condition, const at::Tensor& tensor);
  bool guard_buffer(const RecordedArg& arg, const at::Tensor& tensor);
  bool guard_answer(const RecordedArg& arg, const at::Tensor& tensor, bool truth);
  void decide(const std::vector<RecordedArg>& args, at::ArrayRef<c10::IValue> values);
  void decide(const RecordedArg& arg, const at::Tensor& tensor);
  void guard(std::string_view op, std::vector<RecordedArg> args, const std::string& about);
  [[noreturn]] void ask_for_values();
  int constant_copy(const at::Tensor& tensor);
  bool is_opened(const c10::OperatorHandle& op, const std::string& name) const;
  bool has_dynamic(const c10::FunctionSchema& schema, const std::vector<RecordedArg>& args) const;
  void lift_fresh(torch::jit::Stack* stack);
  bool autocast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool& composite);
  void bind_results(Record& record, const torch::jit::Stack& stack, bool from_constants);
  std::string where() const;

  std::unordered_map<const c10::TensorImpl*, ImplEntry> by_impl_;
  std::map<AliasKey, StorageEntry> by_memory_;
  std::unordered_map<const void*, std::vector<int>> attributes_by_storage_;
  std::unordered_map<const void*, std::vector<int>> values_by_storage_;  // bound since the storage was last written
  std::map<int, at::Tensor> saved_;                       // attribute -> its contents before the first write
  std::vector<std::pair<at::Tensor, at::Tensor>> grads_;  // parameter, its gradient before
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::shared_ptr<const ModuleStack> last_stack_;
  std::vector<std::pair<int, Error>> buffer_reads_;  // attribute, and the refusal if it is written
  bool any_dynamic_ = false;
  size_t decisions_ = 0;
  size_t autocast_hits_ = 0;
  bool active_ = false;
  Session* outer_ = nullptr;
  friend void capture_fallback(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*);
};

// records -> GraphModule
std::shared_ptr<GraphModule> build_graph(Session& session, const std::vector<c10::IValue>& outputs, TreeSpec out_spec,
                                         const CaptureOptions& options);

// Refuses graphs in which memory made by `empty` is read before any recorded write: somebody filled it by raw pointer.
void refuse_unwritten_reads(const Graph& graph);

}  // namespace plumb
