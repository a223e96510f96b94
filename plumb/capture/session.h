// One capture under way: sees every operator call of this thread and has it recorded, guarded, skipped or refused.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plumb/capture/call_recorder.h"
#include "plumb/capture/capture_mode.h"
#include "plumb/capture/guards.h"
#include "plumb/graph/module_state_guard.h"

namespace plumb {

class Session {
 public:
  Session(const CaptureRequest& request, Attempt& attempt);
  ~Session();
  Session(const Session&) = delete;

  // Returns the session of this thread, or null.
  static Session* current();

  // Returns flat inputs to call the model with: clones, floating ones requiring grad.
  std::vector<c10::IValue> feed();
  // Sees every call between start() and stop().
  void start();
  void stop();
  // Sees nothing from pause() to resume(). An attempt that skipped computation is given up, because code in between may
  // ask for values.
  void pause();
  void resume();

  // Records one call of an operator, its arguments on top of the stack; leaves its results there.
  void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Writes `value` into the buffer at the end of the graph (a buffer that the model re-assigned); `what` names it.
  void write_back(int attribute, const at::Tensor& value, const std::string& what);
  // Records an assignment of `value` to `tensor.data` as a copy into the tensor's memory. Refuses any other assignment.
  void assign_data(const at::Tensor& tensor, const at::Tensor& value);
  // Refuses a forward that has given a tensor of the module other memory unseen.
  void refuse_other_memory();
  // Refuses a forward that has run a backward and left a gradient in a parameter or an input.
  void refuse_gradients();
  // Refuses a forward that has seeded torch's random numbers.
  void refuse_seeds();
  // Called after stop(), when outputs and inputs are released. Returns the tensors that the forward has left elsewhere,
  // besides the module's state, with the values of a computed call. Empty for a front end that puts attributes back.
  std::vector<at::Tensor> take_left();
  // Writes `now` at the end of the graph into a tensor that the module holds as an attribute, if the graph reads `old`.
  void write_back_attribute(const std::string& name, const at::Tensor& old, const at::Tensor& now);

  const CaptureRequest& request;
  Attempt& attempt;

 private:
  ModuleStateGuard module_state_;

 public:
  CallRecorder recorder;
  Guards guards;

 private:
  struct Call;
  void record_call(Call& call);
  void record_lift_fresh(torch::jit::Stack* stack);
  void record_asked(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  void record_dual(torch::jit::Stack* stack);
  bool was_read_for_gradients(const at::Tensor& tensor) const;
  bool is_opened(const c10::OperatorHandle& op, const std::string& name) const;
  bool autocast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool& composite);
  void refuse_numpy(const Call& call, at::ArrayRef<c10::IValue> args);
  void before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  void run_opaque(const c10::OperatorHandle& op, torch::jit::Stack* stack);
  void compute(const std::vector<at::Tensor>& left);

  size_t autocast_hits_ = 0;
  // A composite operator whose inner calls are recorded on trial: the casts before it, and what read a value inside.
  struct Tried {
    size_t hits;
    std::string reader;
  };
  Tried* tried_ = nullptr;
  bool active_ = false;
  bool inside_torch_func_ = false;
  Session* outer_ = nullptr;
};

// Builds the GraphModule from the records.
std::shared_ptr<GraphModule> build_graph(Session& session, const std::vector<c10::IValue>& outputs, TreeSpec out_spec,
                                         const CaptureOptions& options);

// Refuses a forward that left hooks on the gradients of its tensors: a capture cannot see them.
void refuse_hooks(CallRecorder& recorder, const std::vector<c10::IValue>& outputs);

// Refuses graphs in which memory made by `empty` is read before any recorded write: it was filled by raw pointer.
void refuse_unwritten_reads(const Graph& graph);

}  // namespace plumb
