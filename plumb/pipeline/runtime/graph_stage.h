// A cut graph (plumb/partition) as stages of the runtime.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plumb/graph/graph_store.h"
#include "plumb/partition/pipe.h"
#include "plumb/partition/stage_specializer.h"
#include "plumb/pipeline/runtime/stage.h"
#include "plumb/pipeline/transport/process_group.h"
#include "plumb/schedule/schedule.h"

namespace plumb {

// A stage's graph. Values that are no tensors cross as 0-dim tensors (pack_value).
//
// With a `specializer` it runs a graph of its own for every sizes of the model's inputs that come. Without one it takes
// the sizes it was cut for, or, if the graph has symbols, those that these allow; others throw Error(TensorMismatch)
// with this `remedy`. Thread-safe. `variant`: `module` has the tensors alone, all graphs are the specializer's.
class GraphStage : public StageFunction {
 public:
  GraphStage(std::shared_ptr<GraphModule> module, const PipeTable& table, int index,
             std::shared_ptr<StageSpecializer> specializer = nullptr, std::string remedy = {}, bool variant = false);
  // Runs the stage; it knows only the sizes of those of the model's inputs that it takes.
  Tensors forward(const Tensors& inputs) override;
  Tensors run(const Tensors& inputs, const Microbatch& microbatch) override;
  std::vector<NamedTensor> parameters() const override;
  std::optional<at::Device> device() const override;
  std::vector<NamedTensor> written_state() const override;
  const Graph* graph() const override { return &module_->graph(); }
  const std::shared_ptr<GraphModule>& module() const { return module_; }

  // Returns the graph for these sizes of the model's inputs; none: as they were cut. Throws what
  // StageSpecializer::stage() throws.
  std::shared_ptr<GraphModule> graph_for(const ModelSizes& known);
  // Inputs that are no tensors may also be given as such. `sizes`: as for graph_for().
  std::vector<c10::IValue> run_values(std::vector<c10::IValue> inputs, const ModelSizes& sizes);
  // For a call outside of a step: also returns the sizes of the model's inputs that these values come from; empty if
  // they are as they were cut. `told`: the sizes that the stages before passed on. Throws Error(InvalidState) if a
  // value of another stage has other sizes and nothing tells the model's inputs' sizes, and Error(Unsupported) for
  // other sizes inside of a capture, whose graph would not pass them on.
  std::pair<std::vector<c10::IValue>, ModelSizes> run_by_hand(std::vector<c10::IValue> inputs, ModelSizes told);

 private:
  // `known` with the sizes of the inputs here; empty if none of them is other than it was cut.
  ModelSizes known_sizes(const std::vector<c10::IValue>& inputs, ModelSizes known) const;
  [[noreturn]] void raise_other_sizes(const ModelSizes& known) const;

  std::shared_ptr<GraphModule> module_;
  StageIO io_;
  std::map<size_t, StageInputPort> model_inputs_;  // inputs of the whole pipe with known sizes, by number
  int index_;
  std::shared_ptr<StageSpecializer> specializer_;
  std::string remedy_;
  std::mutex mutex_;
  bool variant_;
  // Many sizes come again in every epoch, some never: as many graphs as are cheap to keep.
  GraphStore<ModelSizes, std::shared_ptr<GraphModule>> others_{64};
};

// Returns the stages of `pipe` that rank `rank` holds in this schedule's placement. `specializer`: lets them take other
// sizes than the pipe was cut for (specialize_on_sizes). Throws Error(InvalidArgument) for a rank that the schedule
// does not have, and for a stage that the pipe does not have.
std::map<int, std::shared_ptr<StageFunction>> stages_of_rank(
    const Pipe& pipe, const Schedule& schedule, int rank,
    const std::shared_ptr<StageSpecializer>& specializer = nullptr);

// After a training: every rank's `pipe` gets the parameters and buffers of every stage from the rank that runs it (of
// two such ranks from that of microbatch 0), so that pipe.merge_state_dict() is the trained model. All ranks of `group`
// must call it. Throws what broadcast() throws.
void gather_state(const Pipe& pipe, const Schedule& schedule, const ProcessGroup& group);

}  // namespace plumb
