// A cut graph (plumb/partition) as stages of the runtime.
#pragma once

#include <map>
#include <memory>

#include "plumb/partition/pipe.h"
#include "plumb/partition/stage_specializer.h"
#include "plumb/pipeline/layout.h"
#include "plumb/pipeline/process_group.h"
#include "plumb/pipeline/stage.h"

namespace plumb {

// The runtime's picture of a pipe: where values come from, which sizes of the model's inputs it was cut for, and which
// parameters are copies of each other.
PipelineLayout make_layout(const PipeTable& table);

// A stage's graph. Values that are no tensors cross as 0-dim tensors (pack_value).
//
// With a `specializer` it runs a graph of its own for every sizes of the model's inputs that come. Without one it takes
// the sizes it was cut for, or, if the graph has symbols, those that these allow; others raise Error(InvalidArgument).
class GraphStage : public StageFunction {
 public:
  GraphStage(std::shared_ptr<GraphModule> module, StageIO io, std::shared_ptr<StageSpecializer> specializer = nullptr,
             int index = -1);
  // Knows the sizes of those of the model's inputs that it takes.
  Tensors forward(const Tensors& inputs) override;
  Tensors run(const Tensors& inputs, const Microbatch& microbatch) override;
  std::vector<NamedTensor> parameters() const override;
  const std::shared_ptr<GraphModule>& module() const { return module_; }

 private:
  Tensors run_graph(GraphModule& graph, const Tensors& inputs) const;
  // The known sizes of the model's inputs; empty if all are as they were when it was cut.
  ModelSizes known_sizes(const Tensors& inputs) const;
  GraphModule& graph_for(const ModelSizes& known);
  [[noreturn]] void raise_other_sizes(const ModelSizes& known) const;

  std::shared_ptr<GraphModule> module_;
  StageIO io_;
  std::shared_ptr<StageSpecializer> specializer_;
  int index_;
  std::map<ModelSizes, std::shared_ptr<GraphModule>> others_;
};

// The stages of `pipe` that rank `rank` holds in this schedule's placement. `specializer`: lets them take other sizes
// than the pipe was cut for (specialize_on_sizes).
std::map<int, std::shared_ptr<StageFunction>> stages_of_rank(
    const Pipe& pipe, const Schedule& schedule, int rank,
    const std::shared_ptr<StageSpecializer>& specializer = nullptr);

// After a training: every rank's `pipe` gets the parameters and buffers of every stage from the rank that runs it
// (where that is two, from the one of microbatch 0), so that pipe.merge_state_dict() is the trained model. All ranks of
// `group` must call it. Raises what broadcast() raises.
void gather_state(const Pipe& pipe, const Schedule& schedule, const ProcessGroup& group);

}  // namespace plumb
