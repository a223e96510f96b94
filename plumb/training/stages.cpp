#include "plumb/training/stages.h"

#include <ATen/autocast_mode.h>

#include "plumb/pipeline/graph_stage.h"

namespace plumb {
namespace {

// torch.autocast("cpu", torch.bfloat16) around a forward.
class AutocastStage : public GraphStage {
 public:
  using GraphStage::GraphStage;
  Tensors run(const Tensors& inputs, const Microbatch& microbatch) override {
    const Region region;
    return GraphStage::run(inputs, microbatch);
  }

 private:
  struct Region {
    bool was = at::autocast::is_autocast_enabled(at::kCPU);
    at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
    Region() {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::increment_nesting();
    }
    ~Region() {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, was);
      at::autocast::set_autocast_dtype(at::kCPU, dtype);
    }
  };
};

}  // namespace

std::map<int, std::shared_ptr<StageFunction>> make_stages(
    const TrainOptions& o, const TrainJob& job, int rank,
    const std::function<std::shared_ptr<GraphModule>(const GraphModule&)>& change) {
  std::map<int, std::shared_ptr<StageFunction>> stages = stages_of_rank(*job.pipe, job.schedule, rank);
  for (auto& [index, stage] : stages) {
    if (change || o.autocast == "bf16") {
      auto module = job.pipe->stage(index);
      if (change) module = change(*module);
      const PipeTable& table = job.pipe->table();
      stage = o.autocast == "bf16" ? std::make_shared<AutocastStage>(module, table, index)
                                   : std::make_shared<GraphStage>(module, table, index);
    }
    stage->recompute = parse_recompute(o.recompute);
  }
  return stages;
}

}  // namespace plumb
