#include "plumb/training/step/evaluate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "plumb/graph/aliases.h"
#include "plumb/graph/mode.h"
#include "plumb/training/folder_weights.h"
#include "plumb/training/stages.h"
#include "plumb/training/step/loss.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

void stop_training(Graph& graph) {
  for (Node* node : graph.nodes()) {
    if (!node->is_call()) continue;
    if (const auto mode = mode_argument(*node)) node->set_arg(*mode, false);
    const Arg* share = node->try_arg("dropout_p");  // dropout probability of scaled_dot_product_attention
    if (share != nullptr && share->is_constant() && share->constant().isDouble()) node->set_arg("dropout_p", 0.0);
  }
}

// Gives every run copies of the state that it writes: batch norm counts its calls, an embedding may shorten its rows.
void write_to_copies(Graph& graph, const State& state) {
  std::set<std::string> written;
  for (const Attr* attr : written_state(graph, state)) written.insert(attr->name);
  std::map<const c10::TensorImpl*, Value*> copies;
  for (Node* node : graph.nodes()) {
    if (node->kind() != NodeKind::GetAttr || !written.contains(node->target())) continue;
    Value*& copy = copies[state.get(node->target()).tensor.unsafeGetTensorImpl()];
    if (copy == nullptr) {
      const auto behind = graph.inserting_after(node);
      copy = graph.call("aten::clone", {node->result()})->result();
      copy->set_meta(node->result()->meta());
    }
    graph.replace_all_uses_with(node->result(), copy, copy->producer());
  }
}

}  // namespace

std::shared_ptr<GraphModule> evaluation_graph(const GraphModule& module) {
  if (module.is_training() && !module.mode_read_at().empty()) {
    throw Error(ErrorKind::InvalidState,
                "the graph was made in training mode, and the model's forward takes another path in evaluation",
                "the forward reads its training mode: " + module.mode_read_at(),
                "save the model in evaluation mode, too, and evaluate that file; train without --eval-data");
  }
  Graph graph = module.graph().clone();
  stop_training(graph);
  write_to_copies(graph, module.state());
  return std::make_shared<GraphModule>(std::move(graph), module.state(), module.in_spec(), module.out_spec());
}

Evaluator::Evaluator(const TrainOptions& options, const TrainJob& job, Samples& samples, const ProcessGroup& world,
                     const ReplicatedGroups& groups)
    : options_(options), job_(job), samples_(samples), world_(world), groups_(groups) {
  rows_ = std::max<int64_t>(1, job.rows / parts_of_step(options));
  units_ = options.loss == "output" ? samples.rows() / rows_ : (samples.rows() + rows_ - 1) / rows_;
  // Parts of all pipelines, so that --recut and other --data-parallel evaluate the same rows.
  if (options.eval_batches > 0)
    units_ = std::min(units_, options.eval_batches * options.microbatches * options.replicas);
  if (units_ == 0) {
    throw UsageError(c10::str(options.eval_data, ": has ", samples.rows(), " rows, a microbatch ", rows_),
                     "more held-out data");
  }
  auto stages = make_stages(options, job, groups.pipeline.rank(), evaluation_graph);
  PipelineOptions of_run = job.pipeline;
  of_run.record_timeline = false;
  of_run.progress = {};
  of_run.replicas = {};
  of_run.gradient_groups = 0;
  pipeline_ = std::make_unique<Pipeline>(job.pipe->table(), job.schedule, std::move(stages), groups.pipeline, of_run);
}

// Returns a microbatch's rows; those beyond the data are the first row again, with targets that do not count.
Batch Evaluator::unit(int64_t number) const {
  std::vector<int64_t> rows(static_cast<size_t>(rows_), 0);
  const int64_t begin = number * rows_, there = std::clamp<int64_t>(samples_.rows() - begin, 0, rows_);
  std::iota(rows.begin(), rows.begin() + there, begin);
  Batch batch = samples_.read(rows);
  if (there == rows_ || batch.targets.empty()) return batch;
  at::Tensor& targets = batch.targets[0];
  if (options_.loss == "cross_entropy") {
    targets.narrow(0, there, rows_ - there).fill_(options_.ignore_index);
  } else {
    at::Tensor counts = at::ones_like(targets);
    counts.narrow(0, there, rows_ - there).zero_();
    batch.targets.push_back(counts);
  }
  return batch;
}

Evaluation Evaluator::run() {
  const auto together = static_cast<int64_t>(job_.schedule.num_microbatches);
  const int64_t calls = (units_ + together - 1) / together;
  const int last = job_.schedule.placement.rank_of(job_.schedule.num_stages() - 1, 0);
  std::vector<double> values(static_cast<size_t>(units_) * 2);  // loss and count, by microbatch
  std::vector<int> owners(values.size());
  for (int64_t call = 0; call < calls; ++call) {
    const int64_t replica = call % options_.replicas, first = call * together;
    for (int64_t u = first; u < std::min(units_, first + together); ++u) {
      owners[2 * u] = owners[2 * u + 1] = static_cast<int>(replica * options_.stages) + last;
    }
    if (groups_.replicas.rank() != replica) continue;
    // Draws by rows of the data: the same however replicas share them, and in a run that goes on.
    std::vector<int64_t> begins;
    for (int64_t u = first; u <= first + together; ++u) begins.push_back(u * rows_);
    pipeline_->set_step(0, std::move(begins));
    Parts parts;
    for (int64_t u = first; u < first + together; ++u) {
      const Batch batch = unit(u);
      const Parts one = cut_batch(options_, batch, 1);
      parts.inputs.push_back(one.inputs[0]);
      parts.targets.push_back(one.targets[0]);
      parts.counts.push_back(u < units_ ? one.counts[0] : 0);
    }
    const StepResult result = pipeline_->eval_microbatches(parts.inputs, parts.targets, parts.counts);
    const at::Tensor mean = pipeline_->gather_loss();
    if (groups_.pipeline.rank() != last) continue;
    for (int64_t u = first; u < std::min(units_, first + together); ++u) {
      const auto m = static_cast<size_t>(u - first);
      // In a two-way table this rank has some of the losses: their mean stands for each.
      const bool all = static_cast<int64_t>(result.losses.size()) == together;
      values[2 * u] = (all ? result.losses[m] : mean).item<double>();
      values[2 * u + 1] = static_cast<double>(parts.counts[m]);
    }
  }
  share_numbers(world_, owners, values);
  double sum = 0, count = 0;
  for (size_t i = 0; i < values.size(); i += 2) {
    if (values[i + 1] == 0) continue;
    sum += values[i] * values[i + 1];
    count += values[i + 1];
  }
  if (count == 0) throw UsageError(options_.eval_data + ": no target counts", "other held-out data");
  return {sum / count, static_cast<int64_t>(count)};
}

Evaluation evaluate_file(TrainOptions options, const std::function<void(const std::string& what)>& phase) {
  options.eval_data = options.data;
  options.eval_targets = options.targets;
  options = checked(std::move(options));
  const TrainJob job = prepare_job(options, {}, {.phase = phase});
  load_folder_weights(options, job, 0);
  const ProcessGroup alone;
  return Evaluator(options, job, *job.eval_samples, alone, divide_into_replicas(alone, 1)).run();
}

}  // namespace plumb
