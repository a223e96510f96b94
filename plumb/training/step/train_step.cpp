#include "plumb/training/step/train_step.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "plumb/training/folder_weights.h"
#include "plumb/training/recovery/audit.h"
#include "plumb/training/stages.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

// Copies of a tied parameter that one rank holds become one tensor: it has one name, and one state of the optimizer.
void join_copies(const TrainJob& job, int rank) {
  std::map<std::string, at::Tensor> first;
  for (const int index : job.schedule.placement.stages_of(rank)) {
    GraphModule& stage = *job.pipe->stage(index);
    std::vector<std::pair<std::string, at::Tensor>> joined;
    for (const Attr& attr : stage.state()) {
      if (attr.kind != AttrKind::Parameter) continue;
      const auto [known, is_first] = first.emplace(job.first_name(attr.name), attr.tensor);
      if (!is_first) joined.emplace_back(attr.name, known->second);
    }
    if (!joined.empty()) stage.set_state(joined);
  }
}

}  // namespace

TrainStep::TrainStep(const TrainOptions& o, TrainJob& job, const TrainRanks& ranks) : o_(o), job_(job), ranks_(ranks) {
  const int rank = ranks.rank();
  load_folder_weights(o, job, rank);
  if (!ranks.device.is_cpu()) {
    for (const int stage : job.schedule.placement.stages_of(rank)) job.pipe->move_stage(stage, ranks.device);
  }
  join_copies(job, rank);
  stages_ = make_stages(o, job, rank);
  if (o.audit || std::ranges::any_of(job.faults, [](const Fault& f) { return f.kind == Fault::Kind::Flip; }))
    watch_stages(job, stages_);
  std::set<const c10::TensorImpl*> seen;
  for (const auto& [index, stage] : stages_) {
    for (const NamedTensor& p : stage->parameters()) {
      if (!p.tensor.requires_grad() || !seen.insert(p.tensor.unsafeGetTensorImpl()).second) continue;
      parameters_.emplace_back(job.first_name(p.name), p.tensor);
    }
  }
  for (const ModelParameter& p : job.trained) {
    owners_.push_back(job.schedule.placement.rank_of(p.stage, 0));
    measured_.push_back(owners_.back() == rank ? job.pipe->stage(p.stage)->state().get(p.held_as).tensor
                                               : at::Tensor());
  }
  // None goes on before all have come (state_copies.h).
  for (int r = 0; r < ranks.groups.pipeline.size(); ++r) owners_.push_back(r);
  owners_.push_back(job.schedule.placement.rank_of(job.schedule.num_stages() - 1, 0));
  optimizer_ = std::make_unique<Optimizer>(o, job.tagged, parameters_);
  if (o.accumulate > 1) passes_ = std::make_unique<PassSum>(parameters_);
}

void TrainStep::connect() {
  PipelineOptions of_run = job_.pipeline;
  of_run.replicas = ranks_.groups.replicas;
  pipeline_ = std::make_unique<Pipeline>(job_.pipe->table(), job_.schedule, stages_, ranks_.groups.pipeline, of_run);
}

TrainStep::Numbers TrainStep::compute(int64_t step, const Parts& parts, const std::function<void()>& before_sharing) {
  if (parts.total() == 0) {
    throw Error(ErrorKind::InvalidArgument, c10::str("step ", step, ": no target of the batch counts"), "",
                "a larger --batch, or data with fewer masked or ignored targets");
  }
  for (const auto& [name, tensor] : parameters_) tensor.mutable_grad().reset();
  Numbers numbers;
  for (int64_t pass = 0; pass < o_.accumulate; ++pass) run_pass(step, parts, pass, numbers);
  if (passes_) passes_->give(o_.accumulate);
  if (before_sharing) before_sharing();
  share(numbers);
  return numbers;
}

void TrainStep::run_pass(int64_t step, const Parts& parts, int64_t pass, Numbers& numbers) {
  const auto whole = static_cast<double>(parts.total()), passes = static_cast<double>(o_.accumulate);
  const auto of_pipeline = static_cast<size_t>(o_.microbatches),
             of_pass = of_pipeline * static_cast<size_t>(o_.replicas);
  const size_t first = static_cast<size_t>(pass) * of_pass;
  const size_t mine = first + static_cast<size_t>(ranks_.groups.replicas.rank()) * of_pipeline;
  const auto part = [&](const auto& all, size_t from, size_t count) {
    return std::vector(all.begin() + static_cast<int64_t>(from), all.begin() + static_cast<int64_t>(from + count));
  };
  double counting = 0;
  for (const int64_t count : part(parts.counts, first, of_pass)) counting += static_cast<double>(count);
  if (counting == 0) return;  // no target of the pass counts
  pipeline_->set_step(step - 1, part(parts.first_rows, mine, of_pipeline + 1));
  pipeline_->step_microbatches(part(parts.inputs, mine, of_pipeline), part(parts.targets, mine, of_pipeline),
                               part(parts.counts, mine, of_pipeline), static_cast<int64_t>(counting));
  // Norms and torch's optimizers take no sparse gradients, as nn.Embedding(sparse=True) has them.
  for (const auto& [name, tensor] : parameters_) {
    if (at::Tensor& grad = tensor.mutable_grad(); grad.defined() && grad.is_sparse()) grad = grad.to_dense();
  }
  const double weight = counting * passes / whole;
  if (passes_) passes_->take(weight);
  const at::Tensor loss = pipeline_->gather_loss();
  if (loss.defined()) numbers.loss += loss.item<double>() * (weight / passes);
}

// Every rank gets the loss, the gradients' squares and the memory of all.
void TrainStep::share(Numbers& numbers) {
  std::vector<double> shared;
  for (const at::Tensor& p : measured_) {
    shared.push_back(p.defined() && p.grad().defined() ? sum_of_squares(p.grad()) : 0);
  }
  shared.resize(owners_.size() - 1, memory_of_process(ranks_.device));
  shared.push_back(numbers.loss);
  share_numbers(ranks_.groups.pipeline, owners_, shared);
  numbers.loss = shared.back();
  numbers.memory = *std::max_element(shared.begin() + static_cast<int64_t>(measured_.size()), shared.end() - 1);
  shared.resize(measured_.size());
  numbers.norm = std::sqrt(std::accumulate(shared.begin(), shared.end(), 0.0));
  numbers.squares = std::move(shared);
}

void TrainStep::update(const Numbers& numbers) {
  clip_gradients(parameters_, numbers.norm, o_.clip);
  optimizer_->step();
}

}  // namespace plumb
