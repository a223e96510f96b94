#include "plumb/training/reports/step_hashes.h"

#include "plumb/pipeline/runtime/graph_stage.h"

namespace plumb {
namespace {

// Statistics beside the hashes say how far apart two steps are.
RecordRules rules_of(const TrainOptions& o) {
  if (o.replay == 0) return {};
  return RecordRules::parse(
      "every = 1\n[[rule]]\nstatistics = [\"hash\", \"mean_abs\", \"std\", \"abs_max\", \"nan_count\"]\n");
}

}  // namespace

TrainOptions without_outputs(TrainOptions o) {
  if (o.replay == 0) return o;
  for (auto* path : {&o.save, &o.save_hf, &o.dump, &o.record, &o.history, &o.timeline, &o.csv, &o.tensorboard, &o.page,
                     &o.eval_data, &o.eval_targets, &o.verdict_page, &o.verdict_recipe})
    path->clear();
  o.eval_every = o.eval_batches = 0;
  o.verdict.clear();
  return o;
}

StepHashes::StepHashes(const TrainOptions& o, int rank, TrainStep& step, std::optional<int64_t> after)
    : o_(o),
      step_(step),
      // A step that is done again is a file of its own.
      recorder_(rules_of(o), hashes_file(o, rank, o.replay > 0 ? std::nullopt : after),
                {.append = o.replay == 0 && after.has_value(),
                 .after = o.replay > 0 ? std::nullopt : after,
                 .part = true,
                 .ranks = o.processes()}) {
  if (o.replay == 0) return;
  recorder_.set_enabled(false);
  for (const auto& [index, stage] : step.stages()) {
    recorder_.attach(*std::static_pointer_cast<GraphStage>(stage)->module(),
                     step.stages().size() > 1 || o.stages > 1 ? index : -1);
  }
}

void StepHashes::begin_step(int64_t step) {
  recorder_.set_step(step);
  recorder_.set_enabled(step == o_.replay);
}

void StepHashes::add(const std::string& name, const char* kind, const at::Tensor& tensor) {
  recorder_.add_hash({.name = name, .module = parent_of(name), .operation = kind}, tensor);
}

void StepHashes::gradients() {
  if (recorder_.current_step() != o_.replay) return;
  for (const auto& [name, tensor] : step_.parameters()) {
    if (tensor.grad().defined()) add(name, "gradient", tensor.grad());
  }
}

void StepHashes::end_step(const NamedTensors& held) {
  for (const auto& [name, tensor] : held) add(name, "state", tensor);
  for (const auto& [name, tensor] : step_.optimizer().state()) add(name, "optimizer", tensor);
  recorder_.step();
}

}  // namespace plumb
