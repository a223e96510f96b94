// Values and sizes that the program takes out of tensors: known, guarded by a node in every run, or refused.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plumb/capture/call_recorder.h"
#include "plumb/capture/capture_mode.h"

namespace plumb {

// Returns whether this operator (aten::item, ...) returns a value of a tensor to the program.
bool is_value_reader(std::string_view name);

class Guards {
 public:
  Guards(CallRecorder& recorder, const ModuleStateGuard& module_state, Attempt& attempt);

  // Called before a call whose results hold no tensor. Returns true if the call is not to be recorded, because its
  // result is a part of the graph, known, or guarded from now on. Throws if the result can be none of these.
  bool answered_at_capture(const c10::OperatorHandle& op, const std::string& name, const std::vector<RecordedArg>& args,
                           bool from_constants, const torch::jit::Stack& stack);

  // Returns whether sizes of the call's results may depend on the data. Guards the size of a tensor that decides how
  // many tensors the call returns.
  bool results_have_dynamic_sizes(const c10::OperatorHandle& op, const std::string& name,
                                  const std::vector<RecordedArg>& args, at::ArrayRef<c10::IValue> given,
                                  bool from_constants);
  // Returns whether this tensor's sizes may depend on the data and no node checks them yet.
  bool has_dynamic_sizes(const at::Tensor& tensor) const;
  // Adds a node that checks in every run that the sizes are these (`exact`), or that the tensor stays as empty or not.
  void guard_size(const at::Tensor& tensor, bool exact);

  // Returns whether this tensor requires a gradient in a run with the inputs as they were given, although all inputs
  // require one while capturing. `guarded`: if that depends on inputs, nodes check it in every run.
  bool requires_grad(const at::Tensor& tensor, bool guarded);

  // Called when the program reads all values of the tensor. Adds a node that checks them and returns a copy to read
  // from; undefined if they need no check or may not be guarded.
  at::Tensor guard_values(const at::Tensor& tensor);
  // If the call reads values of tensors: notes those that decide about the program's path, and gives them the values
  // of CaptureRequest::control_values.
  void note_control_values(const c10::OperatorHandle& op, const std::string& name, const std::vector<RecordedArg>& args,
                           at::ArrayRef<c10::IValue> given);

  // Refuses a graph that writes a buffer whose value was guarded.
  void check_buffer_reads() const;

 private:
  // Adds a node with these values and constants as arguments; `about` goes to the notes.
  void guard(std::string_view op, std::vector<RecordedArg> args, std::vector<c10::IValue> constants,
             const std::string& about);
  void guard_equal(const std::vector<RecordedArg>& args, const torch::jit::Stack& stack);
  bool guard_check(const RecordedArg& condition, const at::Tensor& tensor);
  bool guard_buffer(const RecordedArg& arg, const at::Tensor& tensor);
  bool guard_value_read(const RecordedArg& arg, const at::Tensor& tensor, bool truth);
  void refuse_random(const std::string& name, const RecordedArg& arg);
  bool is_known(const RecordedArg& condition) const;
  void note_control_value(const RecordedArg& arg, const at::Tensor& tensor);
  bool takes_dynamic(const c10::FunctionSchema& schema, const std::vector<RecordedArg>& args) const;

  CallRecorder& recorder_;
  const ModuleStateGuard& module_state_;
  Attempt& attempt_;
  std::vector<std::pair<int, Error>> buffer_reads_;  // attribute, and the refusal if it is written
  size_t control_values_ = 0;
};

// Returns Guards::requires_grad of this thread's capture; without one the tensor's own.
bool requires_grad_as_given(const at::Tensor& tensor, bool guarded);

}  // namespace plumb
