#include "plumb/training/verdict_run.h"

#include <ATen/ATen.h>

#include "plumb/training/usage.h"

namespace plumb {
namespace {

VerdictOptions verdict_options(const TrainOptions& o) {
  VerdictOptions options;
  if (o.verdict != std::vector<std::string>{"all"}) options.recipes = o.verdict;
  return options;
}

}  // namespace

void check_verdict(const TrainOptions& o, const TrainJob& job) {
  if (o.verdict.empty()) {
    const std::string option = !o.verdict_page.empty()     ? "--verdict-page"
                               : !o.verdict_recipe.empty() ? "--verdict-recipe"
                                                           : "";
    if (!option.empty()) throw UsageError(option + ": no verdict is asked for", "--verdict all");
    return;
  }
  if (o.processes() > 1 || job.schedule.num_stages() > 1) {
    throw UsageError("--verdict: is measured on a model in one part",
                     "plumb verdict FILE before the training, or --stages 1 --data-parallel 1 without --plan");
  }
  used_by("--verdict", [&] { Verdict(*job.pipe->stage(0), verdict_options(o)); });
}

VerdictRun::VerdictRun(const TrainOptions& o, const TrainJob& job, at::Device device)
    : job_(job),
      device_(device),
      steps_(verdict_steps(o.verdict_steps, o.warmup)),
      verdict_(*job.pipe->stage(0), verdict_options(o)) {}

Verdict::Parts VerdictRun::losses(const Parts& parts) const {
  Verdict::Parts all;
  const auto total = static_cast<double>(parts.total());
  for (size_t i = 0; i < parts.inputs.size(); ++i) {
    if (parts.counts[i] == 0) continue;
    all.push_back([this, &parts, i, total](GraphModule& graph) {
      std::vector<c10::IValue> inputs;
      // The stage takes only those inputs of the model that it uses.
      for (const StageInputPort& port : job_.pipe->table().stages[0].inputs)
        inputs.emplace_back(parts.inputs[i].at(port.source.index).to(device_));
      Tensors outputs;
      for (const c10::IValue& out : graph.run(std::move(inputs)))
        outputs.push_back(out.isTensor() ? out.toTensor() : at::Tensor());
      const at::Tensor loss = job_.pipeline.loss(outputs, parts.targets[i]);
      return loss * (static_cast<double>(parts.counts[i]) / total);
    });
  }
  return all;
}

std::optional<VerdictReport> VerdictRun::step(int64_t step, bool last, const Parts& parts) {
  if (!steps_.empty() && steps_.front() <= step) {
    try {
      verdict_.measure(losses(parts));
      steps_.erase(steps_.begin());
      measured_ = parts;
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::Numerics) throw;
      problem_ = "no step could be measured: " + e.message();
    }
  }
  if (!measured_ || !(steps_.empty() || last)) return std::nullopt;
  try {
    return verdict_.conclude(losses(*measured_));
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::InvalidState) throw;
    problem_ = e.message();
    return std::nullopt;
  }
}

}  // namespace plumb
