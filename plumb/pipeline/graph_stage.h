// A cut graph (plumb/partition) as stages of the runtime.
#pragma once

#include <map>
#include <memory>

#include "plumb/partition/pipe.h"
#include "plumb/pipeline/layout.h"
#include "plumb/pipeline/stage.h"

namespace plumb {

// The runtime's picture of a pipe: where values come from, and which parameters are copies of each other.
PipelineLayout make_layout(const PipeTable& table);

// A stage's graph. Values that are no tensors cross as 0-dim tensors (pack_value).
class GraphStage : public StageFunction {
 public:
  GraphStage(std::shared_ptr<GraphModule> module, StageIO io);
  Tensors forward(const Tensors& inputs) override;
  std::vector<NamedTensor> parameters() const override;
  const std::shared_ptr<GraphModule>& module() const { return module_; }

 private:
  std::shared_ptr<GraphModule> module_;
  StageIO io_;
};

// The stages of `pipe` that rank `rank` holds in this schedule's placement.
std::map<int, std::shared_ptr<StageFunction>> stages_of_rank(const Pipe& pipe, const Schedule& schedule, int rank);

}  // namespace plumb
