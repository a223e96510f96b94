#include "plumb/cli/train_rank.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <thread>

#include "plumb/cli/common.h"
#include "plumb/cli/cut.h"
#include "plumb/cli/progress.h"
#include "plumb/cli/samples.h"
#include "plumb/cli/signals.h"
#include "plumb/cli/timeline.h"
#include "plumb/core/error.h"
#include "plumb/core/table.h"
#include "plumb/partition/split.h"
#include "plumb/pipeline/broadcast.h"
#include "plumb/pipeline/graph_stage.h"
#include "plumb/pipeline/runtime.h"
#include "plumb/recording/recorder.h"
#include "plumb/scaling/optim.h"
#include "plumb/schedule/generators.h"

namespace plumb::cli {
namespace {

struct Job {
  Loaded loaded;
  Schedule schedule;
  std::shared_ptr<Pipe> pipe;
  std::unique_ptr<Samples> samples;
  PipelineOptions pipeline;
};

// The output that is the loss: the one named so, or the only floating-point number.
int loss_output(const GraphModule& module) {
  if (const auto named = find_loss_by_name(module.out_spec())) return static_cast<int>(*named);
  const auto args = module.graph().output_node()->args();
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* meta = args[i].is_value() && args[i].value()->meta() ? &*args[i].value()->meta() : nullptr;
    if (meta != nullptr && meta->sizes.empty() && meta->is_floating_point()) return static_cast<int>(i);
  }
  throw UsageError("--loss output: the model returns no number",
                   "--loss cross_entropy or mse, or a model that returns its loss");
}

at::Tensor cross_entropy(const Tensors& outputs, const Tensors& targets) {
  const at::Tensor& logits = outputs.at(0);
  if (logits.dim() < 2) {
    throw Error(ErrorKind::TensorMismatch,
                "--loss cross_entropy: the first output is " + type_text(logits) + ", no logits", "",
                "a model that returns [rows, ..., classes], or another --loss");
  }
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets.at(0).reshape({-1}));
}

at::Tensor mse(const Tensors& outputs, const Tensors& targets) {
  if (outputs.at(0).sizes() != targets.at(0).sizes()) {
    throw Error(
        ErrorKind::TensorMismatch,
        "--loss mse: the first output is " + type_text(outputs[0]) + ", the targets are " + type_text(targets[0]), "",
        "targets of the output's shape");
  }
  return at::mse_loss(outputs[0], targets[0]);
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// By name, or a table in a file.
Schedule read_schedule(const TrainOptions& o) {
  if (!ends_with(o.schedule, ".csv")) {
    try {
      return make_schedule(schedule_traits(o.schedule).name, o.stages, o.microbatches);
    } catch (const Error& e) {
      throw UsageError("--schedule " + o.schedule + ": " + e.message(),
                       e.remedy().empty() ? "--schedule 1F1B" : e.remedy());
    }
  }
  Schedule schedule = read_csv(o.schedule);
  if (schedule.num_ranks() != o.stages || schedule.num_microbatches != o.microbatches) {
    throw UsageError("--schedule " + o.schedule + ": is for " + std::to_string(schedule.num_ranks()) +
                         " processes and " + std::to_string(schedule.num_microbatches) + " microbatches",
                     "--stages " + std::to_string(schedule.num_ranks()) + " --microbatches " +
                         std::to_string(schedule.num_microbatches));
  }
  return schedule;
}

// A process writes its own: a history has one writer.
std::string history_file(const TrainOptions& o, int rank) {
  return o.stages > 1 ? o.history + ".rank" + std::to_string(rank) : o.history;
}

Job prepare(const TrainOptions& o, bool quiet) {
  Job job;
  if (o.stages == 1 && !o.cuts.at.empty()) {
    throw UsageError("--at: one process has no cuts", "--stages " + std::to_string(o.cuts.at.size() + 1));
  }
  job.schedule = read_schedule(o);  // wrong names before anything is read
  if (!o.save.empty() && !is_pt2(o.save)) throw UsageError("--save " + o.save + ": is no .pt2 name", "--save OUT.pt2");
  check_writable("--save", o.save);
  check_timeline(o.timeline);
  if (!o.history.empty()) check_writable("--history", history_file(o, 0));
  if (o.record.empty() != o.history.empty()) {
    throw UsageError(o.record.empty() ? "--history: nothing says what to record" : "--record: nothing says where to",
                     "--record RULES.toml --history FILE");
  }
  if (!o.record.empty()) RecordRules::load(o.record);
  Progress progress(2, quiet);
  progress.next("reading " + o.file);
  job.loaded = load_with_tensors(o.file);
  const GraphModule& module = job.loaded.module();
  job.samples = open_samples(o, module, rows_of_step(o, module));
  if (o.loss == "output") {
    job.pipeline.loss_output = loss_output(module);
  } else {
    job.pipeline.loss = o.loss == "mse" ? mse : cross_entropy;
  }
  job.pipeline.return_outputs = false;
  job.pipeline.seed = static_cast<uint64_t>(o.seed);
  progress.next("cutting " + o.file);
  const int stages = job.schedule.num_stages();
  std::string needed_by = "--stages " + std::to_string(o.stages);
  if (stages != o.stages) needed_by += " with --schedule " + o.schedule;
  job.pipe = cut(module, stages, o.cuts, needed_by);
  return job;
}

// Torch's optimiser, or plumb's with u-muP's learning rates where parameters are tagged. Their decay would not depend
// on the learning rate: it is off.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainOptions& o, bool tagged,
                                                        const std::vector<at::Tensor>& parameters) {
  if (tagged) {
    const optim::ScaledOptions others{.allow_non_unit_scaling_params = true};
    const optim::NamedParameters named = optim::with_names(parameters);
    if (o.optimizer == "sgd")
      return std::make_unique<optim::SGD>(named, torch::optim::SGDOptions(o.lr), std::nullopt, others);
    if (o.optimizer == "adam") return std::make_unique<optim::Adam>(named, torch::optim::AdamOptions(o.lr), others);
    return std::make_unique<optim::AdamW>(named, torch::optim::AdamWOptions(o.lr).weight_decay(0), others);
  }
  if (o.optimizer == "sgd") return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(o.lr));
  if (o.optimizer == "adam") return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(o.lr));
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(o.lr));
}

// What rank 0 knows, told to all.
int64_t of_rank_0(const ProcessGroup& world, int64_t number) {
  if (world.size() == 1) return number;
  const at::Tensor told = at::full({1}, number, at::kLong);
  broadcast(world, told, 0);
  return told.item<int64_t>();
}

void save(const TrainOptions& o, const Job& job) {
  at::NoGradGuard no_grad;
  const State trained = job.pipe->merge_state_dict();
  for (const Attr& attr : job.loaded.module().state()) {
    const Attr* now = trained.find(attr.name);
    if (now != nullptr && now->tensor.data_ptr() != attr.tensor.data_ptr()) attr.tensor.detach().copy_(now->tensor);
  }
  save_pt2(job.loaded.program, o.save);
}

// The rows of a batch that this replica trains on.
Batch part_of_replica(Batch batch, const ProcessGroup& replicas) {
  if (replicas.size() == 1) return batch;
  const auto mine = static_cast<size_t>(replicas.rank());
  return {split_batch(batch.inputs, {}, replicas.size()).inputs[mine],
          batch.targets.empty() ? batch.targets : split_batch(batch.targets, {}, replicas.size()).inputs[mine]};
}

// Says on stderr how far a long step is: first after a second, then less and less often.
class StepProgress {
 public:
  void begin(int step) {
    step_ = step;
    begin_ = std::chrono::steady_clock::now();
    next_ = 1;
  }
  void operator()(size_t done, size_t total) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    if (seconds < next_ || done == total) return;
    next_ = 2 * seconds;
    std::fprintf(stderr, "step %d: %zu of %zu actions after %.0f s\n", step_, done, total, seconds);
  }

 private:
  int step_ = 1;
  double next_ = 1;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace

void check_train(const TrainOptions& options) { prepare(options, options.json).samples->draw(); }

int train_rank(const TrainOptions& o, const std::function<void(const nlohmann::json&)>& event) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  at::set_num_threads(o.threads > 0 ? o.threads : std::max(1, cores / o.processes()));
  at::manual_seed(static_cast<uint64_t>(o.seed));
  Job job = prepare(o, o.json || o.processes() > 1);
  const State& whole = job.loaded.module().state();
  const bool tagged =
      std::any_of(whole.begin(), whole.end(), [](const Attr& a) { return parameter_data(a.tensor).has_value(); });
  const ProcessGroup world = o.processes() > 1 ? make_group_from_environment() : ProcessGroup();
  const ReplicatedGroups groups = divide_into_replicas(world, o.replicas);
  const ProcessGroup& group = groups.pipeline;
  job.pipeline.replicas = groups.replicas;
  job.pipeline.record_timeline = !o.timeline.empty();
  StepProgress progress;
  if (world.rank() == 0 && !o.json) job.pipeline.progress = std::ref(progress);
  const auto stages = stages_of_rank(*job.pipe, job.schedule, group.rank());
  std::vector<at::Tensor> parameters;
  for (const auto& [index, stage] : stages) {
    for (const NamedTensor& p : stage->parameters()) {
      if (p.tensor.requires_grad()) parameters.push_back(p.tensor);
    }
  }
  for (const auto& [index, stage] : stages) stage->recompute = parse_recompute(o.recompute);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (!parameters.empty()) optimizer = make_optimizer(o, tagged, parameters);
  if (tagged && world.rank() == 0)
    event({{"learning_rates", "u-muP's, of each parameter's own, for the file's parameters are tagged"}});
  Pipeline pipeline(make_layout(job.pipe->table()), job.schedule, stages, group, job.pipeline);
  std::unique_ptr<Recorder> recorder;
  if (!o.record.empty() && groups.replicas.rank() == 0) {  // replicas have the same weights
    const bool part = o.stages > 1;
    recorder = std::make_unique<Recorder>(RecordRules::load(o.record), history_file(o, group.rank()),
                                          RecorderOptions{.part = part});
    for (const auto& [index, stage] : stages)
      recorder->attach(*std::static_pointer_cast<GraphStage>(stage)->module(), part ? index : -1);
  }
  std::vector<std::vector<TimelineEvent>> timelines;
  const auto begin = std::chrono::steady_clock::now();
  std::optional<KeptSignal> signal;
  if (!o.save.empty()) signal.emplace(/*others=*/false);
  int64_t stopped_by = 0;
  int last = 0;  // of the steps in `timelines`
  for (int step = 1; step <= o.steps && stopped_by == 0; ++step) {
    progress.begin(step);
    const Batch batch = part_of_replica(job.samples->draw(), groups.replicas);
    for (const at::Tensor& p : parameters) p.mutable_grad().reset();
    pipeline.step(batch.inputs, batch.targets);
    if (optimizer) optimizer->step();
    if (step == 1 && o.recompute != "none" && groups.replicas.rank() == 0) {
      for (const auto& [index, stage] : stages)
        event({{"stage", index}, {"recompute", pipeline.recomputed(index).text()}});
    }
    const at::Tensor step_loss = pipeline.gather_loss();
    if (recorder) {
      recorder->step(step_loss.defined() ? Recorder::Scalars{{"loss", step_loss.item<double>()}} : Recorder::Scalars{});
    }
    if (step_loss.defined() && groups.replicas.rank() == 0) {
      const double loss = step_loss.item<double>();
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      event({{"step", step}, {"steps", o.steps}, {"loss", loss}, {"seconds", seconds}});
      if (!std::isfinite(loss)) {
        throw Error(ErrorKind::Numerics,
                    "the loss of step " + std::to_string(step) + " is " + short_number(loss) +
                        ": training ended, its weights are not saved",
                    "", "a smaller --lr, or plumb track to see where numbers grow");
      }
    }
    if (signal) stopped_by = of_rank_0(world, signal->taken());
    if (stopped_by != 0 && world.rank() == 0) event({{"interrupted", step}, {"steps", o.steps}});
    if (!o.timeline.empty() && (stopped_by != 0 || step > o.steps - o.timeline_steps)) {
      timelines.push_back(pipeline.gather_timeline());
      last = step;
    }
  }
  if (groups.replicas.rank() != 0) return static_cast<int>(stopped_by);
  // Weights before pictures.
  if (!o.save.empty()) {
    gather_state(*job.pipe, job.schedule, group);
    if (group.rank() == 0) {
      save(o, job);
      event({{"saved", o.save}});
    }
  }
  if (!o.timeline.empty() && group.rank() == 0) {
    const DrawnTimeline drawn = draw_timeline(o.timeline, job.schedule, timelines, last);
    event({{"drew", o.timeline}, {"bubble", drawn.bubble}, {"conclusion", drawn.conclusion}});
  }
  return static_cast<int>(stopped_by);
}

}  // namespace plumb::cli
