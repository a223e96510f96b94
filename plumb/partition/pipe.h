// A graph cut into stages: runs here as the reference, hands out its stages, moves them, and restores the whole model.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/partition/stage_io.h"

namespace plumb {

struct BackwardResult {
  std::vector<c10::IValue> outputs;     // flat
  std::vector<at::Tensor> input_grads;  // one a flat input; undefined where it has none
};

class Pipe {
 public:
  // Made by pipeline(). The original's tensors are kept here only if no stage uses them.
  struct Origin {
    std::string name;
    AttrKind kind;
    bool persistent;
    int stage;            // that holds it (the first one), or -1
    std::string held_as;  // its name there; another name of the same tensor for tied weights
    at::Tensor tensor;    // if no stage holds it
  };
  // A pipe that is moved is copied: the graphs are shared, and the old one can still be used.
  Pipe(const Pipe&) = default;
  Pipe& operator=(const Pipe&) = default;
  // Throws Error(InvalidState) if the loss is a constant.
  Pipe(std::vector<std::shared_ptr<GraphModule>> stages, PipeTable table, Graph whole, std::vector<Origin> origins,
       TreeSpec in_spec, TreeSpec out_spec, std::vector<std::string> notes);

  int num_stages() const { return table_.num_stages(); }
  // Throws Error(InvalidArgument) if there is no such stage. Inputs and outputs are flat, as in
  // stage_inputs/stage_outputs.
  const std::shared_ptr<GraphModule>& stage(int index) const;
  const std::vector<StageInputPort>& stage_inputs(int index) const;
  const std::vector<StageOutputPort>& stage_outputs(int index) const;
  const PipeTable& table() const { return table_; }
  // Returns the original's input names and structure.
  const std::vector<std::string>& input_names() const { return input_names_; }
  const TreeSpec& in_spec() const { return in_spec_; }
  const TreeSpec& out_spec() const { return out_spec_; }
  // Changes that split() made to the request: cuts it moved.
  const std::vector<std::string>& notes() const { return notes_; }

  // Runs stage after stage in this process, with autograd through all of them. Arguments as the original's.
  c10::IValue forward(std::vector<c10::IValue> args,
                      std::vector<std::pair<std::string, c10::IValue>> kwargs = {}) const;
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs) const;  // flat
  // Returns this pipe with other graphs in its stages, to be run: GraphStage::graph_for().
  Pipe with_stages(std::vector<std::shared_ptr<GraphModule>> stages) const;
  // Returns every parameter of every stage, each tensor once.
  std::vector<at::Tensor> parameters() const;
  void train(bool on = true);

  // --- loss and backward ---
  bool has_loss_and_backward() const { return table_.loss_output.has_value(); }
  // Runs one microbatch forward and back from the loss, all stages as one (stage_backward.h). Accumulates into the
  // parameters' `.grad`, replicated ones included: every copy gets the sum. Outputs and gradients equal those of the
  // undivided graph and its backward(), bit for bit. Throws Error(InvalidState) if the pipe has no loss and
  // Error(TensorMismatch) if the loss is no one-element tensor that requires grad.
  BackwardResult run_with_backward(std::vector<c10::IValue> inputs) const;

  // --- state ---
  const std::vector<ReplicatedParam>& replicated_params() const { return table_.replicated; }
  // Returns the whole model's state, names and order as in the original, tied names tied, tensors shared with the
  // stages. Throws Error(InvalidState) naming the parameter and stages if copies of a replicated parameter differ.
  State merge_state_dict() const;
  // Returns the undivided graph with that state.
  std::shared_ptr<GraphModule> merge() const;

  // Moves one stage, or all: state, shapes' devices, and device arguments of operators that at capture made or moved
  // tensors. Tensors are replaced: make optimizers afterwards.
  void move_stage(int index, at::Device device);
  void to(at::Device device);

  // Returns inputs, calls of stages, ports and stages as text.
  std::string print_readable() const;
  // Returns the text of one stage's graph.
  std::string stage_text(int index) const;

 private:
  void check_stage(int index) const;
  // `joined`: by stage, the state that it runs with in place of its own.
  std::vector<c10::IValue> run_stages(const std::vector<c10::IValue>& inputs, const std::map<int, State>& joined) const;
  void add_to_copies(const ReplicatedParam& copies, const at::Tensor& grad) const;
  std::vector<c10::IValue> outputs_of(std::vector<c10::IValue>& last) const;

  std::vector<std::shared_ptr<GraphModule>> stages_;
  PipeTable table_;
  std::shared_ptr<Graph> whole_;
  std::vector<Origin> origins_;
  TreeSpec in_spec_, out_spec_;
  std::vector<std::string> notes_, input_names_;
  std::vector<std::optional<TensorMeta>> input_metas_;
};

}  // namespace plumb
