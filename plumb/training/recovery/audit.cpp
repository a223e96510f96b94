#include "plumb/training/recovery/audit.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "plumb/core/json_text.h"
#include "plumb/core/mix_bits.h"
#include "plumb/numerics/hash.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/recording/recorder.h"
#include "plumb/schedule/simulate.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/tensors/run_rows.h"
#include "plumb/training/stages.h"
#include "plumb/training/usage.h"
#include "plumb/transforms/module.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using Direction = ScaleTracker::Direction;
using Json = nlohmann::json;

// The number of actions before the longest wait of a rank in a step, of stages of equal costs.
size_t largest_gap(const Schedule& schedule, int rank) {
  const Schedule computing = compute_only(schedule);
  Simulation simulated;
  try {
    simulated = simulate_schedule(computing);
  } catch (const Error&) {
    return 0;  // it runs with other edges between stages
  }
  const auto row = static_cast<size_t>(rank);
  size_t best = 0, done = 0;
  double most = -1, end = 0;
  const auto look = [&](double until) {
    if (until - end > most) most = until - end, best = done;
  };
  for (size_t i = 0; i < computing.rows[row].size(); ++i) {
    const Action& action = computing.rows[row][i];
    if (action.is_idle()) continue;
    const Span& span = simulated.spans[row][i];
    look(span.start);
    end = span.end;
    done += action.second_part().is_idle() ? 1 : 2;
  }
  look(simulated.makespan);
  return best;
}

// Flips a bit of the first floating-point tensor, as a processor that is wrong once does.
void flip_a_bit(Tensors& inputs) {
  for (at::Tensor& input : inputs) {
    if (!input.defined() || input.scalar_type() != at::kFloat || input.numel() == 0) continue;
    const at::Tensor wrong = input.detach().clone(at::MemoryFormat::Contiguous);
    wrong.reshape({-1}).view(at::kInt)[0].bitwise_xor_(1 << 20);
    input = input + (wrong - input.detach());
    return;
  }
}

[[noreturn]] void refuse_audit() {
  throw Error(ErrorKind::Communication, "what a rank says of an audited microbatch cannot be read", "",
              "run the same version of plumb on every rank");
}

}  // namespace

void check_audit(const TrainOptions& o) {
  if (o.audit_every > 0 && !o.audit) throw UsageError("--audit-every: nothing is audited", "--audit");
  if (o.audit && o.processes() > 1 && o.max_restarts == 0) {
    throw UsageError("--audit: nobody makes up for a rank that is wrong", "--max-restarts N");
  }
}

void AuditedStage::watch(int microbatch) {
  watched_ = microbatch;
  tracker_ = ScaleTracker::create();
  const auto made = derive(*module());
  track_scales(*made, *tracker_, nullptr, /*every_type=*/true);
  tracker_->set_enabled(false);
  hashed_.clear(), outputs_.clear();
  Graph& graph = made->graph();
  Node* const output = graph.output_node();
  const auto before_output = graph.inserting_before(output);
  for (size_t i = 0; i < output->args().size(); ++i) {
    Value* const value = output->args()[i].value();
    outputs_.push_back(-1);
    if (value == nullptr || !value->producer()->is_op("plumb::track")) continue;
    // An alias has a gradient of its own, what comes from other stages. What this stage makes of the value adds to the
    // value's gradient, and comes again when the stage runs again.
    outputs_.back() = tracker_->add_slot(false);
    Value* const alias = graph.call("aten::alias", {value})->result();
    Value* const leaving = graph.call("plumb::track", {alias, outputs_.back(), tracker_->id()})->result();
    for (Value* each : {alias, leaving}) each->set_meta(value->meta());
    const Value* tracked = value;
    while (tracked->producer()->is_op("plumb::track")) tracked = tracked->producer()->input(0);
    hashed_.emplace_back(outputs_.back(), tracked->name());
    output->set_arg(i, leaving);
  }
  num_outputs_ = hashed_.size();
  // Slots of inputs that later stages have, too: their gradients have what those add, which the rank that computes
  // again does not get.
  std::set<int64_t> summed;
  const auto& ports = table_.stages[static_cast<size_t>(index_)].inputs;
  const auto placeholders = graph.placeholders();
  for (size_t i = 0; i < ports.size(); ++i) {
    const ValueSource& from = ports[i].source;
    if (from.is_model_input()) continue;
    const auto& users = table_.stages[static_cast<size_t>(from.stage)].outputs[from.index].consumers;
    if (std::ranges::none_of(users, [&](const PortUse& use) { return use.stage > index_; })) continue;
    for (const Use& use : placeholders[i]->result()->uses()) {
      if (use.user->is_op("plumb::track") && use.user->arg("tracker") == Arg(tracker_->id()))
        summed.insert(use.user->arg("slot").constant().toInt());
    }
  }
  watched_stage_ = std::make_unique<GraphStage>(made, table_, index_);
  for (const TrackedTensor& each : tracked_tensors(*made, *tracker_)) {
    ScaleTracker::Wanted wanted{.forward = false, .backward = false, .metrics = false};
    const bool input = each.tensor.operation == "input";
    if (std::ranges::count(outputs_, each.slot) > 0) {
      wanted.forward = wanted.backward = wanted.keep = true;
    } else if ((input && !summed.contains(each.slot)) || each.tensor.operation == "parameter") {
      wanted.backward = wanted.hash = true;
      // A parameter may have the name of a value that the stage gets.
      hashed_.emplace_back(each.slot, (input ? "the gradient of the input " : "the gradient of ") + each.tensor.name);
    }
    tracker_->want(each.slot, wanted);
  }
}

Tensors AuditedStage::run(const Tensors& inputs, const Microbatch& microbatch) {
  Tensors given = inputs;
  if (std::exchange(wrong_, false)) flip_a_bit(given);
  if (microbatch.index != watched_ || !at::GradMode::is_enabled()) return GraphStage::run(given, microbatch);
  watched_ = -1;
  seen_ = {};
  for (const at::Tensor& input : inputs) {
    seen_.inputs.push_back(input.defined() ? input.detach().clone() : input);
    seen_.requires_grad.push_back(input.defined() && input.requires_grad());
  }
  for (const NamedTensor& buffer : written_state())
    seen_.buffers.emplace_back(buffer.name, buffer.tensor.detach().clone());
  if (const auto rows = running_rows()) seen_.rows = *rows;
  tracker_->set_enabled(true);
  const auto stop = c10::make_scope_exit([&] { tracker_->set_enabled(false); });
  return watched_stage_->run(given, microbatch);
}

AuditedStage::Seen AuditedStage::take() {
  if (!tracker_) return {};
  for (size_t i = 0; i < hashed_.size() && !seen_.inputs.empty(); ++i) {
    const auto& [slot, name] = hashed_[i];
    for (const auto& each : tracker_->hashes(slot, i < num_outputs_ ? Direction::Forward : Direction::Backward))
      seen_.hashes.emplace_back(name, each.kept.defined() ? hash_of(each.kept) : each.hash);
  }
  for (const int64_t slot : outputs_) {
    const auto all = slot < 0 ? std::vector<ScaleTracker::Hashed>() : tracker_->hashes(slot, Direction::Backward);
    seen_.output_grads.push_back(all.empty() ? at::Tensor() : all.front().kept);
  }
  tracker_->clear();
  return std::exchange(seen_, {});
}

void flip_bits(const Fault& fault, TrainStep& step) {
  if (fault.kind == Fault::Kind::Flip) static_cast<AuditedStage&>(*step.stages().at(fault.stage)).compute_wrong();
  if (fault.kind <= Fault::Kind::Flip || step.parameters().empty()) return;
  at::Tensor memory = step.parameters().front().second;
  if (fault.kind == Fault::Kind::RotGradient) memory = memory.grad();
  if (fault.kind == Fault::Kind::RotState) {
    // Numbers, of steps say, are copies.
    const auto state = step.optimizer().state();
    const auto first = std::ranges::find_if(state, [](const auto& named) { return named.second.dim() > 0; });
    memory = first == state.end() ? at::Tensor() : first->second;
  }
  if (!memory.defined() || !memory.is_contiguous() || memory.numel() == 0) return;
  memory = memory.variable_data();  // autograd does not notice it
  memory.reshape({-1}).view(at::kByte)[0].bitwise_xor_(1 << 4);
}

void watch_stages(const TrainJob& job, std::map<int, std::shared_ptr<StageFunction>>& stages) {
  for (auto& [index, stage] : stages) {
    const auto& graph = static_cast<const GraphStage&>(*stage);
    auto watched = std::make_shared<AuditedStage>(graph.module(), job.pipe->table(), index);
    watched->recompute = stage->recompute;
    stage = std::move(watched);
  }
}

Auditor::Auditor(const TrainOptions& o, TrainJob& job, const TrainRanks& ranks, TrainStep& step, StateCopies* copies,
                 Report report)
    : o_(o),
      job_(job),
      ranks_(ranks),
      step_(step),
      copies_(ranks.world.size() > 1 ? copies : nullptr),
      report_(std::move(report)),
      period_(audit_period(o, job.schedule)),
      gap_(largest_gap(job.schedule, ranks.rank())) {
  if (copies_ != nullptr && copies_->are_shared()) {
    transport_ = std::make_unique<Transport>(ranks.world);
  } else if (ranks.world.size() > 1) {
    left_out_ = c10::str("--audit: ", copies_ != nullptr ? "ranks of several hosts do" : "a rank of this launcher does",
                         " not see other ranks' weights, so that only the state is audited, and no microbatch runs "
                         "again");
  }
  for (const auto& [index, stage] : step_.stages())
    for (const NamedTensor& each : stage->written_state()) changing_.insert(each.tensor.unsafeGetTensorImpl());
  wrote();
}

std::vector<std::pair<std::string, at::Tensor>> Auditor::state() const {
  auto all = step_.parameters();
  for (auto& [name, tensor] : step_.optimizer().state()) all.emplace_back("the optimizer's " + name, tensor);
  return all;
}

void Auditor::wrote() {
  written_.clear();
  for (const auto& [name, tensor] : state()) written_.emplace_back(name, hash_of(tensor));
  check_replicas();
}

// Every rank of one stage's replicas has the same state: one that has not is wrong, both are where there is no
// majority.
void Auditor::check_replicas() {
  const ProcessGroup& group = ranks_.groups.replicas;
  if (group.size() == 1) return;
  uint64_t sum = 0;
  for (const auto& [name, hash] : written_) sum = mix_seeds(sum, hash);
  std::vector<int> owners(static_cast<size_t>(group.size()));
  std::iota(owners.begin(), owners.end(), 0);
  std::vector<double> sums(owners.size());
  const double mine = sums[static_cast<size_t>(group.rank())] = static_cast<double>(sum >> 11);  // 53 bits are exact
  share_numbers(group, owners, sums);
  if (2 * std::ranges::count(sums, mine) > group.size()) return;
  fail({now_, ranks_.world.rank(), "the state after the step", "replicas have other values"});
}

void Auditor::fail(const event::AuditFailed& found) {
  report_(found);
  stop(found);
}

// The rank that has computed again has reported it.
void Auditor::stop(const event::AuditFailed& found) {
  throw Error(ErrorKind::ExecutionFailed,
              c10::str("rank ", found.rank, " is wrong: step ", found.step, ", ", found.tensor, ": ", found.why), "",
              "look at its machine: memory, processor, temperature");
}

int64_t audit_period(const TrainOptions& o, const Schedule& schedule) {
  if (o.audit_every > 0) return o.audit_every;
  const int64_t stage_runs = int64_t{schedule.num_stages()} * schedule.num_microbatches * o.replicas;  // in a step
  return (200 + stage_runs - 1) / stage_runs;
}

AuditChoice audit_choice(const TrainOptions& o, const Schedule& schedule, int64_t step) {
  uint64_t chance = mix_seeds(static_cast<uint64_t>(o.seed) ^ 0x6175646974u, static_cast<uint64_t>(step));
  const auto below = [&](int count) {
    chance = mix_bits(chance);
    return static_cast<int>(chance % static_cast<uint64_t>(count));
  };
  AuditChoice choice;
  choice.rank = below(o.processes());
  choice.by = (choice.rank + 1 + below(o.processes() - 1)) % o.processes();
  const auto stages = schedule.placement.stages_of(choice.rank % schedule.num_ranks());
  choice.stage = stages[static_cast<size_t>(below(static_cast<int>(stages.size())))];
  std::set<int> computed;  // microbatches that this rank computes: of a bidirectional schedule half of them
  for (const Action& action : schedule.rows[static_cast<size_t>(choice.rank % schedule.num_ranks())]) {
    const Action forward = action.first_part();
    if (forward.kind == ActionKind::Forward && forward.stage == choice.stage) computed.insert(forward.microbatch);
  }
  if (computed.empty()) computed.insert(0);  // a table may give a copy of a stage nothing to do
  choice.microbatch = *std::next(computed.begin(), below(static_cast<int>(computed.size())));
  return choice;
}

void Auditor::begin_step(int64_t step) {
  now_ = step;
  received_.reset();
  if (!transport_) return;
  audited_ = std::exchange(watched_, std::nullopt);
  if (audited_) exchange();
  if (step % period_ != 0) return action_done(0);
  watched_ = audit_choice(o_, job_.schedule, step);
  const auto& stages = step_.stages();
  if (const auto at = stages.find(watched_->stage); watched_->rank == ranks_.world.rank() && at != stages.end())
    static_cast<AuditedStage&>(*at->second).watch(watched_->microbatch);
  action_done(0);
}

// The audited rank's tensors go to the rank that computes again.
void Auditor::exchange() {
  const int me = ranks_.world.rank();
  MessagePlan plan;
  std::vector<MessageValue> message;
  if (me == audited_->rank) {
    const AuditedStage::Seen seen = static_cast<AuditedStage&>(*step_.stages().at(audited_->stage)).take();
    Json buffers = Json::array();
    Tensors tensors = seen.inputs;
    for (const auto& [name, tensor] : seen.buffers) buffers.push_back(name), tensors.push_back(tensor);
    tensors.insert(tensors.end(), seen.output_grads.begin(), seen.output_grads.end());
    const Json said = {{"inputs", seen.inputs.size()}, {"buffers", buffers},      {"requires", seen.requires_grad},
                       {"first", seen.rows.first},     {"rows", seen.rows.count}, {"hashes", seen.hashes}};
    message.push_back({text_tensor(said.dump())});
    for (const at::Tensor& tensor : tensors) message.push_back({tensor.defined() ? tensor.cpu() : tensor});
    plan.sends.push_back({{MessageKind::Exchange, me, audited_->by}, audited_->by});
  }
  if (me == audited_->by) plan.receives.push_back({{MessageKind::Exchange, audited_->rank, me}, audited_->rank});
  transport_->begin_step(plan);
  if (me == audited_->rank) transport_->send(0, message);
  if (me == audited_->by) {
    const auto came = transport_->receive(0, "the audit").values;
    const auto text = text_of(came);
    if (!text) refuse_audit();
    try {
      const Json said = parse_json(*text, 8);
      AuditedStage::Seen seen;
      const size_t inputs = said.at("inputs").get<size_t>();
      const auto buffers = said.at("buffers").get<std::vector<std::string>>();
      if (inputs >= came.size() || buffers.size() >= came.size() - inputs || said.at("requires").size() != inputs)
        refuse_audit();
      seen.requires_grad = said.at("requires").get<std::vector<bool>>();
      seen.rows = {said.at("first").get<int64_t>(), said.at("rows").get<int64_t>()};
      seen.hashes = said.at("hashes").get<decltype(seen.hashes)>();
      for (size_t i = 0; i < buffers.size(); ++i) {
        seen.buffers.emplace_back(buffers[i], came[1 + inputs + i].tensor);
        if (!seen.buffers.back().second.defined()) refuse_audit();
      }
      for (size_t i = 1; i < came.size(); ++i) {
        if (i <= inputs) seen.inputs.push_back(came[i].tensor);
        if (i > inputs + buffers.size()) seen.output_grads.push_back(came[i].tensor);
      }
      if (inputs > 0) received_ = std::move(seen);
    } catch (const Json::exception&) {
      refuse_audit();
    }
  }
  transport_->end_step();
}

void Auditor::action_done(size_t done) {
  if (done == gap_ && received_) run_again();
}

std::vector<std::pair<std::string, uint64_t>> Auditor::computed_again() {
  const AuditChoice& choice = *audited_;
  std::shared_ptr<AuditedStage>& stage = others_[choice.stage];
  if (!stage) {
    const auto made = make_stages(o_, job_, choice.rank % job_.schedule.num_ranks());
    const auto& graph = static_cast<GraphStage&>(*made.at(choice.stage));
    const auto copy = derive(*graph.module());
    // A recorder that is attached to this rank's own stage measures the training alone.
    for (Node* node : copy->graph().nodes()) {
      if (node->is_op("plumb::track") || node->is_op("plumb::track_rounded")) node->set_arg("tracker", int64_t{0});
    }
    stage = std::make_shared<AuditedStage>(copy, job_.pipe->table(), choice.stage);
  }
  auto copied = copies_->model_of(choice.rank, now_ - 2);
  for (const auto& [name, tensor] : received_->buffers) {
    const auto known = copied.find(job_.first_name(name));
    if (known == copied.end() || known->second.scalar_type() != tensor.scalar_type() ||
        known->second.sizes() != tensor.sizes())
      refuse_audit();
    known->second = tensor;
  }
  std::vector<std::pair<std::string, at::Tensor>> weights;
  std::map<std::string, at::Tensor> first;  // tied ones stay one
  for (const Attr& attr : stage->module()->state()) {
    if (attr.kind == AttrKind::Constant) continue;
    const std::string name = job_.first_name(attr.name);
    const auto from = copied.find(name);
    if (from == copied.end()) refuse_audit();
    at::Tensor& tensor = first[name];
    if (!tensor.defined())
      tensor = at::empty_like(attr.tensor.detach(), attr.tensor.options().device(ranks_.device))  // with its strides
                   .copy_(from->second)
                   .set_requires_grad(attr.tensor.requires_grad());
    weights.emplace_back(attr.name, tensor);
  }
  stage->module()->set_state(weights);
  const at::AutoGradMode with_gradients(true);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const auto before = generator_state(generator);
  const uint64_t seed = mix_seeds(*job_.pipeline.seed, static_cast<uint64_t>(now_ - 2));
  Tensors inputs;
  for (const at::Tensor& input : received_->inputs)
    inputs.push_back(input.defined() ? input.to(ranks_.device, input.scalar_type(), false, true) : input);
  const InputBoundary boundary(inputs, received_->requires_grad);
  stage->watch(0);
  Tensors outputs;
  {
    const RunningRows running(received_->rows);
    const NodeSeeds seeds(seed, {generator});
    outputs = stage->forward(boundary.inputs());
  }
  Tensors ends, grads;
  for (size_t i = 0; i < std::min(outputs.size(), received_->output_grads.size()); ++i) {
    const at::Tensor& grad = received_->output_grads[i];
    if (!grad.defined() || !outputs[i].requires_grad()) continue;
    ends.push_back(outputs[i]);
    grads.push_back(grad.to(ranks_.device));
  }
  if (!ends.empty()) stage_backward(ends, grads, boundary);
  set_generator_state(generator, before);
  auto seen = stage->take();
  return std::move(seen.hashes);
}

void Auditor::run_again() {
  const auto differing = [&](const auto& again) -> std::optional<std::string> {
    for (const auto& [name, hash] : received_->hashes) {
      const auto at = std::ranges::find(again, name, [](const auto& e) { return e.first; });
      if (at != again.end() && at->second != hash) return name;
    }
    return std::nullopt;
  };
  if (const auto wrong = differing(computed_again())) {
    // Once more: it may be this rank that was wrong.
    const bool here = !differing(computed_again());
    accused_ = here ? ranks_.world.rank() : audited_->rank;
    report_({now_ - 1, static_cast<int>(accused_), *wrong,
             c10::str("stage ", audited_->stage, ", microbatch ", audited_->microbatch, ", computed again by rank ",
                      ranks_.world.rank(), here ? ", which was wrong itself" : "")});
  }
  received_.reset();
}

void Auditor::check_state() {
  const auto now = state();
  for (size_t i = 0; i < std::min(now.size(), written_.size()); ++i) {
    if (changing_.contains(now[i].second.unsafeGetTensorImpl())) continue;
    if (now[i].first == written_[i].first && hash_of(now[i].second) == written_[i].second) continue;
    if (copies_ != nullptr) copies_->forget(now_ - 1);
    fail({now_, ranks_.world.rank(), now[i].first, "its memory changed after it was written"});
  }
}

void Auditor::gradient_changed(const std::string& parameter) {
  fail({now_, ranks_.world.rank(), "the gradient of " + job_.first_name(parameter),
        "its memory changed between two microbatches"});
}

void Auditor::check() {
  check_state();
  if (!audited_) return;
  if (received_) run_again();
  const int64_t accused = largest_of_all(ranks_.world, std::exchange(accused_, -1));  // one rank at most accuses one
  if (accused < 0) return;
  copies_->forget(now_ - 1);  // everyone's edge after the audited step
  if (accused == ranks_.world.rank())
    stop({now_ - 1, ranks_.world.rank(), "a stage's result", "another rank computes something else"});
}

}  // namespace plumb
