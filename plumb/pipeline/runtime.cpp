#include "plumb/pipeline/runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

#include <chrono>

#include "plumb/core/error.h"
#include "plumb/pipeline/describe.h"
#include "plumb/pipeline/gradients.h"
#include "plumb/pipeline/run_plan.h"
#include "plumb/pipeline/shared_parameters.h"
#include "plumb/pipeline/transport.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/lower.h"

namespace plumb {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// One microbatch in one stage, from its forward to the end of its backward.
struct Slot {
  std::vector<MessageValue> sources;
  std::unique_ptr<InputBoundary> boundary;
  Tensors outputs;  // for the backward: handles without the values' memory
  Tensors output_grads;
  Tensors seeds;  // gradients that sources have from later users
  Tensors source_grads;
  DeferredWeights deferred;
  std::function<void()> own_weight_work;
  at::Tensor loss;
};

struct LocalStage {
  int stage = 0;
  std::shared_ptr<StageFunction> function;
  const StageWiring* wiring = nullptr;
  std::vector<Slot> slots;
  std::unique_ptr<GradientKeeper> gradients;
  int num_outputs = 0;
};

at::Generator cpu_generator() { return at::detail::getDefaultCPUGenerator(); }

std::string digest_text(const PipelineLayout& layout, const Schedule& schedule) {
  return layout.text() + to_csv(schedule);
}

// The first entry that is not finite, as "[2, 5] is nan"; empty if all are.
std::string first_not_finite(const at::Tensor& t) {
  if (!t.defined() || !(t.is_floating_point() || t.is_complex()) || t.numel() == 0) return "";
  const auto finite = at::isfinite(t.detach());
  if (finite.all().item<bool>()) return "";
  const auto flat = finite.reshape(-1);
  int64_t at = at::argmin(flat.to(at::kByte)).item<int64_t>();
  const auto value = t.detach().reshape(-1)[at].item().toDouble();
  std::string index;
  for (int64_t d = t.dim() - 1; d >= 0; d--) {
    index = std::to_string(at % t.size(d)) + (index.empty() ? "" : ", " + index);
    at /= t.size(d);
  }
  return "[" + index + "] is " + std::to_string(value);
}

// What one rank can tell by itself of layout, schedule and stages.
void check_parts(const PipelineLayout& layout, const Schedule& schedule,
                 const std::map<int, std::shared_ptr<StageFunction>>& stages, int me, int size) {
  layout.check();
  if (schedule.num_stages() != layout.num_stages()) {
    throw Error(ErrorKind::InvalidArgument, "the schedule '" + schedule.name + "' has " +
                                                std::to_string(schedule.num_stages()) + " stages, the model " +
                                                std::to_string(layout.num_stages()));
  }
  if (schedule.num_ranks() != size) {
    throw Error(ErrorKind::InvalidArgument, "the schedule '" + schedule.name + "' is for " +
                                                std::to_string(schedule.num_ranks()) + " ranks, the group has " +
                                                std::to_string(size));
  }
  require_runnable(compute_only(schedule), layout.edges());
  const auto mine = schedule.placement.stages_of(me);
  for (int stage : mine) {
    if (!stages.count(stage) || !stages.at(stage)) {
      throw Error(ErrorKind::InvalidArgument, "rank " + std::to_string(me) + " runs stage " + std::to_string(stage) +
                                                  " in the schedule '" + schedule.name + "' and was not given it");
    }
  }
  if (stages.size() != mine.size()) {
    throw Error(ErrorKind::InvalidArgument, "rank " + std::to_string(me) + " was given " +
                                                std::to_string(stages.size()) + " stages, the schedule '" +
                                                schedule.name + "' has " + std::to_string(mine.size()) + " there");
  }
}

}  // namespace

struct Pipeline::State {
  PipelineLayout layout;
  Schedule schedule;  // compute actions only
  PipelineOptions options;
  Transport transport;
  std::vector<StageWiring> wiring;
  std::map<int, LocalStage> stages;
  SharedParameters shared;
  RunPlan train_plan, eval_plan;
  std::int64_t step_number = 0;
  std::vector<TimelineEvent> timeline;
  bool training = false;
  // Of the step that runs.
  const std::vector<Tensors>* inputs = nullptr;
  const std::vector<Tensors>* targets = nullptr;
  std::vector<double> weights;  // of microbatches' losses
  std::vector<Tensors> model_outputs;
  Tensors losses;

  explicit State(ProcessGroup group) : transport(std::move(group)) {}

  int rank() const { return transport.group().rank(); }
  int last_stage() const { return layout.num_stages() - 1; }

  void arrive(Slot& slot, const StageWiring::Bundle& bundle, std::vector<MessageValue> values) {
    if (layout.open) {
      slot.sources = std::move(values);
      return;
    }
    for (size_t i = 0; i < bundle.indices.size(); i++) slot.sources[bundle.indices[i]] = std::move(values.at(i));
  }

  void arrive(Slot& slot, const StageWiring::GradBundle& bundle, const std::vector<MessageValue>& values) {
    if (layout.open) {
      slot.output_grads.clear();
      for (const auto& v : values) slot.output_grads.push_back(v.tensor);
      return;
    }
    for (size_t i = 0; i < bundle.targets.size(); i++) {
      const auto& target = bundle.targets[i];
      (target.output ? slot.output_grads : slot.seeds)[target.index] = values.at(i).tensor;
    }
  }

  void open(LocalStage& stage, Slot& slot) {
    if (layout.open) return;  // sized by what arrives
    if (slot.sources.empty()) slot.sources.resize(stage.wiring->sources.size());
    if (training && slot.seeds.empty()) {
      slot.seeds.resize(stage.wiring->sources.size());
      slot.output_grads.resize(stage.num_outputs);
    }
  }

  void receive(const RunAction& run, LocalStage& stage, Slot& slot) {
    const auto& w = *stage.wiring;
    for (size_t i = 0; i < run.receives.size(); i++) {
      if (run.receives[i] < 0) continue;  // was handed over on this rank
      auto values = transport.receive(run.receives[i], to_string(run.action));
      const bool forward = run.action.kind == ActionKind::Forward;
      const size_t expected = forward ? w.values_in[i].indices.size() : w.grads_in[i].targets.size();
      if (values.size() != expected && !layout.open) {
        throw Error(ErrorKind::Communication, "a message of " + std::to_string(values.size()) + " values came where " +
                                                  std::to_string(expected) + " were agreed");
      }
      if (forward) {
        arrive(slot, w.values_in[i], std::move(values));
      } else {
        arrive(slot, w.grads_in[i], values);
      }
    }
  }

  void check_finite(const at::Tensor& t, const std::string& what) const {
    if (!options.check_numerics) return;
    const auto bad = first_not_finite(t);
    if (!bad.empty()) throw Error(ErrorKind::Numerics, what + ": entry " + bad);
  }

  void forward(const RunAction& run, LocalStage& stage, Slot& slot) {
    const auto& w = *stage.wiring;
    const int m = run.action.microbatch;
    Tensors values;
    std::vector<bool> wants;
    for (size_t i = 0; i < slot.sources.size(); i++) {
      auto& source = slot.sources[i];
      if (!layout.open && w.sources[i].stage < 0) {
        const int index = w.sources[i].index;
        if (inputs->empty() || (*inputs)[m].size() <= static_cast<size_t>(index) || !(*inputs)[m][index].defined()) {
          throw Error(ErrorKind::InvalidArgument,
                      "stage " + std::to_string(stage.stage) + " uses input " + std::to_string(index) +
                          " of the model, and rank " + std::to_string(rank()) + " was not given it",
                      "", "give the input to step() on every rank whose stages use it");
        }
        source = {(*inputs)[m][index], false};
      }
      values.push_back(source.tensor);
      wants.push_back(training && source.requires_grad);
    }
    slot.sources.clear();
    auto boundary = std::make_unique<InputBoundary>(values, wants);
    std::vector<std::int64_t> versions;
    for (const auto& v : values) versions.push_back(v.defined() && !v.is_inference() ? v._version() : 0);
    Tensors in;
    if (layout.open) {
      in = boundary->inputs();
    } else {
      for (int source : w.source_of_input) in.push_back(boundary->inputs()[source]);
    }
    if (options.seed) {
      cpu_generator().set_current_seed(((*options.seed * 1000003 + step_number) * 1000003 + stage.stage) * 1000003 + m);
    }
    Tensors outputs = stage.function->run(in, m);
    // The last stage's outputs are nobody's inputs; a stage with a loss of its own returns that alone.
    const bool counted = !layout.open && (stage.stage != last_stage() || options.loss || options.return_outputs);
    if (counted && static_cast<int>(outputs.size()) != stage.num_outputs) {
      throw Error(ErrorKind::InvalidArgument, "stage " + std::to_string(stage.stage) + " returned " +
                                                  std::to_string(outputs.size()) + " values, its layout says " +
                                                  std::to_string(stage.num_outputs));
    }
    for (size_t i = 0; !layout.open && i < values.size(); i++) {
      const auto& source = w.sources[i];
      if (source.stage < 0 || !values[i].defined() || values[i].is_inference()) continue;
      if (values[i]._version() == versions[i] || !shared_on_this_rank(source, stage.stage, m)) continue;
      throw Error(ErrorKind::InvalidArgument,
                  "stage " + std::to_string(stage.stage) + " writes in place to output " +
                      std::to_string(source.index) + " of stage " + std::to_string(source.stage) +
                      ", which other stages of the same rank use too",
                  "", "clone the value before writing to it");
    }
    for (size_t k = 0; k < outputs.size(); k++) {
      check_finite(outputs[k], "output " + std::to_string(k) + " of stage " + std::to_string(stage.stage) +
                                   ", microbatch " + std::to_string(m));
    }
    if (stage.stage == last_stage()) finish_model(m, outputs, slot);
    send_values(run, stage, m, outputs);
    if (!training) return;
    boundary->release_inputs();
    slot.boundary = std::move(boundary);
    if (stage.stage == last_stage()) return;  // only the loss goes backwards
    slot.outputs.resize(outputs.size());
    for (size_t k = 0; k < outputs.size(); k++) {
      if ((layout.open || w.output_used[k]) && outputs[k].defined() && outputs[k].requires_grad()) {
        slot.outputs[k] = backward_handle(outputs[k]);
      }
    }
  }

  // Whether a value that was handed over in memory has other users here.
  bool shared_on_this_rank(const ValueSource& source, int stage, int m) const {
    if (schedule.placement.rank_of(source.stage, m) != rank()) return false;
    int users = 0;
    for (const auto& [s, local] : stages) {
      const auto& sources = local.wiring->sources;
      users += std::find(sources.begin(), sources.end(), source) != sources.end();
    }
    return users > 1;
  }

  void finish_model(int m, const Tensors& outputs, Slot& slot) {
    const bool wanted = training || (options.loss ? !targets->empty() : false);
    if (wanted) {
      at::Tensor loss;
      if (options.loss) {
        loss = options.loss(outputs, targets->empty() ? Tensors{} : (*targets)[m]);
      } else if (options.loss_output >= 0 && static_cast<size_t>(options.loss_output) < outputs.size()) {
        loss = outputs[options.loss_output];
      }
      if (!loss.defined() || loss.numel() != 1 || (training && !loss.requires_grad())) {
        throw Error(ErrorKind::InvalidArgument,
                    "the loss of microbatch " + std::to_string(m) + " is " + describe(loss) +
                        (loss.defined() && loss.numel() == 1 ? " and requires no gradient" : ", not one number"),
                    "", "give PipelineOptions::loss, or a model whose output loss_output is its loss");
      }
      check_finite(loss, "the loss of microbatch " + std::to_string(m));
      losses[m] = loss.detach();
      if (training) slot.loss = loss;
    }
    if (options.return_outputs || !training) {
      for (const auto& o : outputs) model_outputs[m].push_back(o.defined() ? o.detach() : o);
    }
  }

  void send_values(const RunAction& run, LocalStage& stage, int m, const Tensors& outputs) {
    const auto& bundles = stage.wiring->values_out;
    for (size_t i = 0; i < bundles.size(); i++) {
      std::vector<MessageValue> values;
      auto add = [&](const at::Tensor& t) {
        values.push_back({t.defined() ? t.detach() : t, t.defined() && t.requires_grad()});
      };
      if (layout.open) {
        for (const auto& t : outputs) add(t);
      } else {
        for (int k : bundles[i].indices) add(outputs[k]);
      }
      if (run.sends[i] >= 0) {
        transport.send(run.sends[i], values);
        continue;
      }
      auto& to = stages.at(bundles[i].stage);
      auto& slot = to.slots[m];
      open(to, slot);
      for (const auto& in : to.wiring->values_in) {
        if (in.stage == stage.stage) arrive(slot, in, std::move(values));
      }
    }
  }

  void send_grads(const RunAction& run, LocalStage& stage, int m, const Tensors& grads) {
    const auto& bundles = stage.wiring->grads_out;
    for (size_t i = 0; i < bundles.size(); i++) {
      std::vector<MessageValue> values;
      if (layout.open) {
        for (const auto& g : grads) values.push_back({g, false});
      } else {
        for (int k : bundles[i].indices) values.push_back({grads[k], false});
      }
      if (run.sends[i] >= 0) {
        transport.send(run.sends[i], values);
        continue;
      }
      auto& to = stages.at(bundles[i].stage);
      auto& slot = to.slots[m];
      for (const auto& in : to.wiring->grads_in) {
        if (in.stage == stage.stage) arrive(slot, in, values);
      }
    }
  }

  // Outputs with a gradient, and their gradients: what the backward starts from.
  void collect(const LocalStage& stage, const Slot& slot, int m, Tensors& outputs, Tensors& grads) {
    if (stage.stage == last_stage()) {
      outputs.push_back(slot.loss);
      grads.push_back(weights[m] == 1 ? at::ones_like(slot.loss) : at::full_like(slot.loss, weights[m]));
      return;
    }
    if (slot.output_grads.size() != slot.outputs.size()) {
      throw Error(ErrorKind::Communication, "stage " + std::to_string(stage.stage) + " handed on " +
                                                std::to_string(slot.outputs.size()) + " values and got gradients for " +
                                                std::to_string(slot.output_grads.size()));
    }
    for (size_t k = 0; k < slot.outputs.size(); k++) {
      if (!slot.outputs[k].defined() || !slot.output_grads[k].defined()) continue;
      outputs.push_back(slot.outputs[k]);
      grads.push_back(slot.output_grads[k]);
    }
  }

  void backward(const RunAction& run, LocalStage& stage, Slot& slot) {
    const int m = run.action.microbatch;
    if (run.action.kind == ActionKind::BackwardWeight) {
      stage.gradients->accumulate(m, [&] {
        if (slot.deferred.pending()) stage_backward_weight(slot.deferred);
        if (slot.own_weight_work) slot.own_weight_work();
      });
      slot = Slot();
      return;
    }
    Tensors outputs, grads;
    collect(stage, slot, m, outputs, grads);
    Tensors input_grads;
    const bool own_work = stage.function->has_own_weight_work();
    if (run.action.kind == ActionKind::FullBackward) {
      stage.gradients->accumulate(m, [&] {
        input_grads = stage_backward(outputs, grads, *slot.boundary, slot.seeds);
        if (!own_work) return;
        if (auto work = stage.function->own_weight_work()) work();
      });
      slot = Slot();
    } else if (own_work) {
      input_grads = stage_backward(outputs, grads, *slot.boundary, slot.seeds);
      slot = Slot();
      slot.own_weight_work = stage.function->own_weight_work();
    } else {
      auto half = stage_backward_input(outputs, grads, *slot.boundary, slot.seeds);
      input_grads = std::move(half.input_grads);
      slot = Slot();
      slot.deferred = std::move(half.deferred);
    }
    for (size_t i = 0; i < input_grads.size(); i++) {
      check_finite(input_grads[i], "the gradient of input " + std::to_string(i) + " of stage " +
                                       std::to_string(stage.stage) + ", microbatch " + std::to_string(m));
    }
    send_grads(run, stage, m, input_grads);
  }

  void run_actions(const RunPlan& plan) {
    for (const auto& run : plan.actions) {
      auto& stage = stages.at(run.action.stage);
      auto& slot = stage.slots[run.action.microbatch];
      TimelineEvent event{rank(), run.action};
      if (options.record_timeline) event.waiting = now();
      try {
        open(stage, slot);
        receive(run, stage, slot);
        if (options.record_timeline) event.start = now();
        if (run.action.kind == ActionKind::Forward) {
          forward(run, stage, slot);
        } else {
          backward(run, stage, slot);
        }
      } catch (const Error& e) {
        if (e.kind() == ErrorKind::Communication) throw;
        const std::string place = "rank " + std::to_string(rank()) + " at " + to_string(run.action);
        throw Error(e.kind(), place + ": " + e.message(), e.where(), e.remedy());
      } catch (const std::exception& e) {
        throw Error(ErrorKind::InvalidArgument,
                    "rank " + std::to_string(rank()) + " at " + to_string(run.action) + ": " + error_text(e));
      }
      if (options.record_timeline) {
        event.end = now();
        timeline.push_back(event);
      }
    }
  }

  // Sums the gradients of shared parameters over their copies.
  void sum_copies(const RunPlan& plan) {
    if (shared.groups.empty()) return;
    std::map<std::pair<int, const ParameterCopy*>, at::Tensor> foreign;
    for (size_t i = 0; i < plan.messages.sends.size(); i++) {
      const auto& m = plan.messages.sends[i];
      if (m.id.kind != MessageKind::Copies) continue;
      std::vector<MessageValue> values;
      for (const auto* c : copies_for_peer(shared, rank(), m.peer)) {
        values.push_back({stages.at(c->local_stage).gradients->step_gradient(c->index), false});
      }
      transport.send(static_cast<int>(i), values);
    }
    for (size_t i = 0; i < plan.messages.receives.size(); i++) {
      const auto& m = plan.messages.receives[i];
      if (m.id.kind != MessageKind::Copies) continue;
      auto values = transport.receive(static_cast<int>(i), "the end of the step");
      const auto copies = copies_for_peer(shared, m.peer, rank());
      for (size_t k = 0; k < copies.size(); k++) foreign[{m.peer, copies[k]}] = values.at(k).tensor;
    }
    at::NoGradGuard no_grad;
    for (const auto& group : shared.groups) {
      at::Tensor total;
      for (const auto& copy : group) {
        const at::Tensor g = copy.rank == rank() ? stages.at(copy.local_stage).gradients->step_gradient(copy.index)
                                                 : foreign[{copy.rank, &copy}];
        if (!g.defined()) continue;
        total = total.defined() ? total.add_(g) : g.clone();
      }
      for (const auto& copy : group) {
        if (copy.rank == rank()) stages.at(copy.local_stage).gradients->set_step_gradient(copy.index, total);
      }
    }
  }

  void begin(bool train, int num) {
    training = train;
    timeline.clear();
    model_outputs.assign(num, {});
    losses.assign(num, {});
    for (auto& [s, stage] : stages) {
      stage.slots.clear();
      stage.slots.resize(num);
    }
  }

  StepResult result(const std::vector<int64_t>& rows) {
    StepResult r;
    r.timeline = timeline;
    if (!stages.count(last_stage())) return r;
    double total = 0, sum = 0;
    at::Tensor mean;
    for (size_t m = 0; m < losses.size(); m++) total += static_cast<double>(rows[m]);
    for (size_t m = 0; m < losses.size(); m++) {
      if (!losses[m].defined()) continue;
      r.losses.push_back(losses[m]);
      auto part = losses[m] * (static_cast<double>(rows[m]) / total);
      mean = mean.defined() ? mean + part : part;
      sum += static_cast<double>(rows[m]);
    }
    if (mean.defined() && sum == total) r.loss = mean;
    // In a two-way table this rank has the outputs of some microbatches only.
    std::vector<Tensors> here;
    std::vector<int64_t> rows_here;
    for (size_t m = 0; m < model_outputs.size(); m++) {
      if (model_outputs[m].empty()) continue;
      here.push_back(std::move(model_outputs[m]));
      rows_here.push_back(rows[m]);
    }
    r.outputs = merge_outputs(here, options.output_merges, rows_here);
    return r;
  }

  StepResult run(const std::vector<Tensors>& in, const std::vector<Tensors>& tgt, std::vector<int64_t> rows,
                 bool train) {
    const int num = schedule.num_microbatches;
    for (const auto* list : {&in, &tgt}) {
      if (!list->empty() && static_cast<int>(list->size()) != num) {
        throw Error(ErrorKind::InvalidArgument, "the schedule has " + std::to_string(num) +
                                                    " microbatches, the batch " + std::to_string(list->size()));
      }
    }
    for (size_t m = 0; m < in.size(); m++) {
      for (size_t i = 0; i < in[m].size(); i++) {
        if (train && in[m][i].defined() && in[m][i].requires_grad()) {
          throw Error(ErrorKind::InvalidArgument,
                      "input " + std::to_string(i) +
                          " of the model requires a gradient; a pipeline gives gradients of "
                          "parameters only",
                      "", "detach the input, or make it a parameter of the first stage");
        }
      }
    }
    if (rows.empty()) rows.assign(num, 1);
    if (static_cast<int>(rows.size()) != num) {
      throw Error(ErrorKind::InvalidArgument,
                  std::to_string(rows.size()) + " row counts for " + std::to_string(num) + " microbatches");
    }
    inputs = &in;
    targets = &tgt;
    double total = 0;
    for (auto n : rows) total += static_cast<double>(n);
    weights.assign(num, 1);
    if (options.scale_grads) {
      for (int m = 0; m < num; m++) weights[m] = static_cast<double>(rows[m]) * num / total;
    }
    begin(train, num);
    const RunPlan& plan = train ? train_plan : eval_plan;
    at::Tensor generator_state;
    if (options.seed) generator_state = cpu_generator().get_state();
    struct Cleanup {
      State& s;
      at::Tensor generator;
      ~Cleanup() {
        for (auto& [i, stage] : s.stages) {
          stage.slots.clear();
          stage.gradients->end_step();
        }
        s.inputs = s.targets = nullptr;
        if (generator.defined()) cpu_generator().set_state(generator);
      }
    } cleanup{*this, generator_state};
    c10::AutoGradMode grad_mode(train);
    try {
      transport.begin_step(plan.messages);
      if (train) {
        for (auto& [s, stage] : stages) stage.gradients->begin_step(stage.function->parameters());
      }
      run_actions(plan);
      if (train) {
        sum_copies(plan);
        for (auto& [s, stage] : stages) stage.gradients->finish_step(options.scale_grads ? num : 1);
      }
      transport.end_step();
    } catch (const std::exception& e) {
      transport.tell_failure(error_text(e));
      throw;
    } catch (...) {
      transport.tell_failure("an exception of unknown type");
      throw;
    }
    step_number++;
    return result(rows);
  }
};

Pipeline::Pipeline(PipelineLayout layout, Schedule schedule, std::map<int, std::shared_ptr<StageFunction>> stages,
                   ProcessGroup group, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(group))) {
  auto& s = *state_;
  const int me = s.rank();
  try {
    check_parts(layout, schedule, stages, me, s.transport.group().size());
  } catch (const Error& e) {
    // The others wait for this rank: they are told why it does not come.
    try {
      s.transport.exchange("!" + e.message());
    } catch (const std::exception&) {
      // Told as far as possible.
    }
    throw;
  }
  s.wiring = connect_stages(layout);
  s.schedule = compute_only(schedule);
  s.layout = std::move(layout);
  s.options = std::move(options);
  const std::string digest = digest_text(s.layout, s.schedule);
  const auto digests = s.transport.exchange(digest);
  for (size_t r = 0; r < digests.size(); r++) {
    if (digests[r] == digest) continue;
    if (digests[r].substr(0, 1) == "!") {
      throw Error(ErrorKind::Communication, "rank " + std::to_string(me) + " cannot start: rank " + std::to_string(r) +
                                                " failed: " + digests[r].substr(1));
    }
    throw Error(
        ErrorKind::Communication,
        "rank " + std::to_string(me) + " and rank " + std::to_string(r) + " were given different layouts or schedules",
        "", "make both from the same model and arguments on every rank");
  }
  std::map<int, std::vector<NamedTensor>> parameters;
  for (auto& [index, function] : stages) {
    LocalStage local;
    local.stage = index;
    local.function = function;
    local.wiring = &s.wiring[index];
    local.num_outputs = s.layout.stages[index].num_outputs;
    parameters[index] = function->parameters();
    s.stages.emplace(index, std::move(local));
  }
  s.shared = find_shared_parameters(s.layout, s.schedule.placement, parameters, s.transport);
  std::map<int, std::set<int>> shared_indices;
  for (const auto& group_of_copies : s.shared.groups) {
    for (const auto& copy : group_of_copies) {
      if (copy.rank == me) shared_indices[copy.local_stage].insert(copy.index);
    }
  }
  for (auto& [index, local] : s.stages) {
    std::vector<int> order;
    for (const auto& action : s.schedule.rows[me]) {
      if (action.stage == index &&
          (action.kind == ActionKind::FullBackward || action.kind == ActionKind::BackwardWeight)) {
        order.push_back(action.microbatch);
      }
    }
    local.gradients = std::make_unique<GradientKeeper>(order, shared_indices[index], s.options.scale_grads);
  }
  s.train_plan = plan_run(s.schedule, s.wiring, me, s.shared.copy_peers);
  s.eval_plan = plan_run(forward_only(s.schedule), s.wiring, me, {});
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

namespace {

struct Batch {
  std::vector<Tensors> inputs, targets;
  std::vector<int64_t> rows;
};

bool any_defined(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.defined(); });
}

Batch cut(const Tensors& inputs, const Tensors& targets, const PipelineOptions& options, int num) {
  Batch batch;
  if (any_defined(inputs)) {
    auto cut = split_batch(inputs, options.input_chunks, num);
    batch.inputs = std::move(cut.inputs);
    batch.rows = std::move(cut.rows);
  }
  if (any_defined(targets)) {
    auto cut = split_batch(targets, options.target_chunks, num);
    batch.targets = std::move(cut.inputs);
    batch.rows = std::move(cut.rows);  // the loss is over the targets
  }
  return batch;
}

}  // namespace

StepResult Pipeline::step(const Tensors& inputs, const Tensors& targets) {
  auto batch = cut(inputs, targets, state_->options, state_->schedule.num_microbatches);
  return state_->run(batch.inputs, batch.targets, std::move(batch.rows), true);
}

StepResult Pipeline::step_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows) {
  return state_->run(inputs, targets, rows, true);
}

StepResult Pipeline::eval_microbatches(const std::vector<Tensors>& inputs, const std::vector<Tensors>& targets,
                                       const std::vector<int64_t>& rows) {
  return state_->run(inputs, targets, rows, false);
}

StepResult Pipeline::eval(const Tensors& inputs, const Tensors& targets) {
  auto batch = cut(inputs, targets, state_->options, state_->schedule.num_microbatches);
  return state_->run(batch.inputs, batch.targets, std::move(batch.rows), false);
}

std::vector<TimelineEvent> Pipeline::gather_timeline() {
  std::vector<TimelineEvent> all;
  for (const auto& text : state_->transport.exchange(to_text(state_->timeline))) {
    for (const auto& e : parse_timeline(text)) all.push_back(e);
  }
  start_at_zero(all);
  return all;
}

const std::vector<TiedParameter>& Pipeline::tied() const { return state_->shared.tied; }
const Schedule& Pipeline::schedule() const { return state_->schedule; }
const PipelineLayout& Pipeline::layout() const { return state_->layout; }
int Pipeline::rank() const { return state_->rank(); }

}  // namespace plumb
