#include "plumb/recording/module_diff.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/graph/backward_errors.h"
#include "plumb/graph/module_state_guard.h"
#include "plumb/recording/recorder.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/transforms/module.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using Direction = ScaleTracker::Direction;

std::shared_ptr<GraphModule> tracked(const GraphModule& module, std::shared_ptr<ScaleTracker>& tracker) {
  tracker = ScaleTracker::create();
  auto made = derive(module);
  track_scales(*made, *tracker, nullptr, true);
  for (size_t slot = 0; slot < tracker->num_slots(); ++slot)
    tracker->want(static_cast<int64_t>(slot), {.metrics = false, .keep = true});
  return made;
}

std::string name_key(const HistoryTensor& tensor) {
  const bool state = tensor.operation == "parameter" || tensor.operation == "buffer";
  return tensor.name + (state ? "\nstate" : "");
}

// Values and gradients of parameters as they are; nullopt if they were not seen.
std::optional<at::Tensor> last_of(const ScaleTracker& tracker, int64_t slot, Direction direction) {
  auto all = tracker.hashes(slot, direction);
  return all.empty() ? std::nullopt : std::optional(all.back().kept);
}

std::vector<std::string> operators_of(const GraphModule& module) {
  std::vector<std::string> names;
  for (const Node* node : module.graph().nodes())
    if (node->is_call() && !node->is_op("plumb::track")) names.push_back(node->target());
  return names;
}

struct Output {
  Arg arg;
  std::optional<int64_t> slot;  // if it is tracked
};

// By key or place: another order of a dict's keys is no difference.
std::map<std::string, Output> outputs_of(const GraphModule& module, const ScaleTracker& tracker) {
  std::map<std::string, Output> outputs;
  const std::vector<std::string> names = module.out_spec().leaf_names();
  for (size_t i = 0; i < names.size(); ++i) {
    Output& output = outputs[names[i].empty() ? "0" : names[i]] = {module.graph().output_node()->arg(i)};
    if (!output.arg.is_value()) continue;
    const Node* node = output.arg.value()->producer();
    if (node->is_op("plumb::track") && node->arg("tracker") == Arg(tracker.id()))
      output.slot = node->arg("slot").constant().toInt();
  }
  return outputs;
}

std::vector<HistoryTensor> without_slots(const std::vector<TrackedTensor>& tracked) {
  std::vector<HistoryTensor> tensors;
  for (const TrackedTensor& each : tracked) tensors.push_back(each.tensor);
  return tensors;
}

std::optional<at::Device> device_of(const GraphModule& module) {
  for (const Attr& attr : module.state())
    if (attr.tensor.defined()) return attr.tensor.device();
  return std::nullopt;
}

// Returns copies: a program may write into its inputs, and the other one gets the same.
std::vector<c10::IValue> copies_on_device_of(const GraphModule& module, std::vector<c10::IValue> inputs) {
  const auto device = device_of(module);
  for (c10::IValue& input : inputs) {
    if (!input.isTensor() || !input.toTensor().defined()) continue;
    const at::Tensor& given = input.toTensor();
    const bool elsewhere = device && *device != given.device();
    input = (elsewhere ? given.detach().to(*device) : given.detach().clone()).requires_grad_(given.requires_grad());
  }
  return inputs;
}

// Runs a tracked module forward and backward, and leaves nothing behind.
void run_both_ways(GraphModule& module, const std::function<at::Tensor(GraphModule&)>& loss_of) {
  if (!loss_of)
    throw Error(ErrorKind::InvalidArgument, "ModuleDiff::run() has no function", "", "give one that runs the graph");
  const at::AutoGradMode with_gradients(true);
  ModuleStateGuard guard(module.state(), {});
  guard.keep_written(module.graph(), module.state());
  const std::vector<at::Generator> generators = guard.generators();
  for (const at::Generator& generator : generators) set_generator_seed(generator, 1);
  const NodeSeeds seeds(1, generators);
  for (const Attr& attr : module.state()) {
    const bool has_gradient = attr.tensor.defined() && attr.tensor.requires_grad() && attr.tensor.is_leaf();
    if (has_gradient) attr.tensor.mutable_grad().reset();
  }
  const at::Tensor loss = loss_of(module);
  if (!loss.defined()) return;
  if (loss.numel() != 1) {
    throw Error(ErrorKind::InvalidArgument, c10::str("the loss has ", loss.numel(), " elements"), "",
                "return a tensor of one element to go backward from");
  }
  if (loss.requires_grad()) return run_backward_of(module.graph(), [&] { loss.backward(); });
  const auto trained = [](const Attr& attr) { return attr.tensor.defined() && attr.tensor.requires_grad(); };
  if (std::any_of(module.state().begin(), module.state().end(), trained)) {
    throw Error(ErrorKind::InvalidArgument, "the loss depends on no parameter: no gradient would be compared", "",
                "return a tensor of one element to go backward from, without detach()");
  }
}

// The tensors of two modules, compared in pairs.
class Pairs {
 public:
  Pairs(DiffReport& report, const ScaleTracker& a, const ScaleTracker& b, double tolerance)
      : report_(report), a_(a), b_(b), tolerance_(tolerance) {}

  // Compares the report's last tensor, value and gradient, with the other module's if it has one.
  void add(int64_t slot, std::optional<int64_t> other) {
    const size_t place = places_[slot] = report_.tensors.size() - 1;
    const std::string& name = report_.tensors[place].tensor.name;
    if (!other) return report_.only_a.push_back(name);
    others_[slot] = *other;
    for (const Direction direction : {Direction::Forward, Direction::Backward}) {
      const auto x = last_of(a_, slot, direction), y = last_of(b_, *other, direction);
      if (x.has_value() != y.has_value() && direction == Direction::Backward)
        (x ? report_.only_a : report_.only_b).push_back("the gradient of " + name);
      if (x && y) compare({place, direction == Direction::Forward ? DiffKind::Value : DiffKind::Gradient}, *x, *y);
    }
  }

  // Values of one name may be other outputs, or one of them none: outputs of one key or place are compared, too.
  void add_outputs(const std::map<std::string, Output>& a, const std::map<std::string, Output>& b,
                   const std::map<int64_t, std::string>& names_of_b) {
    for (const auto& [name, x] : a) {
      const auto other = b.find(name);
      if (other == b.end() || x.arg.is_constant() || other->second.arg.is_constant()) {
        if (other == b.end() || !(x.arg == other->second.arg)) report_.other_outputs.push_back(name);
        continue;
      }
      const Output& y = other->second;
      if (!x.slot || !y.slot) continue;
      if (const auto pair = others_.find(*x.slot); pair != others_.end() && pair->second == *y.slot) continue;
      const auto value = last_of(a_, *x.slot, Direction::Forward), second = last_of(b_, *y.slot, Direction::Forward);
      if (!value || !second) continue;
      Difference where{places_.at(*x.slot), DiffKind::Value};
      where.output = name, where.other_name = names_of_b.at(*y.slot);
      compare(std::move(where), *value, *second);
    }
    for (const auto& [name, y] : b)
      if (!a.contains(name)) report_.other_outputs.push_back(name);
  }

  std::vector<Compared> take() { return std::move(compared_); }

 private:
  void compare(Difference where, const at::Tensor& x, const at::Tensor& y) {
    const TensorDistance apart = distance_between(x, y);
    where.distance = apart;
    const bool apart_at_all = apart.differing > 0 || !apart.types.empty();
    const bool differs = apart_at_all && !(apart.relative <= tolerance_ && tolerance_ > 0);
    auto& shown = report_.tensors[where.tensor].distance;
    if (where.kind == DiffKind::Value && (differs || !shown)) shown = apart;
    compared_.push_back({std::move(where), differs});
  }

  DiffReport& report_;
  const ScaleTracker &a_, &b_;
  const double tolerance_;
  std::map<int64_t, size_t> places_;   // in the report, by slots of a
  std::map<int64_t, int64_t> others_;  // slots of b by slots of a
  std::vector<Compared> compared_;
};

}  // namespace

at::Tensor sum_of_outputs(const std::vector<c10::IValue>& outputs) {
  at::Tensor sum;
  for (const c10::IValue& out : outputs) {
    if (!out.isTensor() || !out.toTensor().defined() || !out.toTensor().requires_grad()) continue;
    at::Tensor part = out.toTensor();
    if (c10::isFloat8Type(part.scalar_type())) part = part.to(at::kFloat);  // torch has no sum of them
    part = part.sum();
    if (part.is_complex()) part = at::real(part);
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

ModuleDiff::ModuleDiff(const GraphModule& given_a, const GraphModule& given_b) {
  a = tracked(given_a, of_a_);
  b = tracked(given_b, of_b_);
}

void ModuleDiff::run(const std::function<at::Tensor(GraphModule& graph)>& loss) {
  run_both_ways(*a, loss);
  run_both_ways(*b, loss);
}

DiffReport ModuleDiff::report(const DiffNames& names, double tolerance) const {
  if (!(tolerance >= 0 && std::isfinite(tolerance))) {
    throw Error(ErrorKind::InvalidArgument, c10::str("tolerance is ", tolerance), "", "a relative difference, 0.001");
  }
  DiffReport report{names.a, names.b};
  if (operators_of(*a) != operators_of(*b) || device_of(*a) != device_of(*b)) report.basis = DiffBasis::Distance;
  std::vector<TrackedTensor> all = tracked_tensors(*a, *of_a_), all_b = tracked_tensors(*b, *of_b_);
  const std::vector<std::string> compared_as = names_among(without_slots(all_b), without_slots(all));
  std::map<int64_t, std::string> names_of_b;  // by slot
  std::map<std::string, TrackedTensor> others;
  for (size_t i = 0; i < all_b.size(); ++i) {
    TrackedTensor& each = all_b[i];
    names_of_b.emplace(each.slot, std::exchange(each.tensor.name, compared_as[i]));
    others.emplace(name_key(each.tensor), std::move(each));
  }
  // Outputs whose names the other module does not have are compared by their places.
  const auto outputs_a = outputs_of(*a, *of_a_), outputs_b = outputs_of(*b, *of_b_);
  std::set<std::string> names_of_a;
  for (const TrackedTensor& each : all) names_of_a.insert(name_key(each.tensor));
  const auto find_other = [&](const TrackedTensor& each) {
    const auto named = others.find(name_key(each.tensor));
    if (named != others.end() || outputs_a.size() != outputs_b.size()) return named;
    const auto output = std::ranges::find_if(outputs_a, [&](const auto& o) { return o.second.slot == each.slot; });
    if (output == outputs_a.end() || !outputs_b.contains(output->first)) return others.end();
    const auto slot = outputs_b.at(output->first).slot;
    return std::ranges::find_if(
        others, [&](const auto& other) { return other.second.slot == slot && !names_of_a.contains(other.first); });
  };
  Pairs pairs(report, *of_a_, *of_b_, tolerance);
  for (TrackedTensor& each : all) {
    each.tensor.inputs.assign(each.inputs.begin(), each.inputs.end());
    report.tensors.push_back({each.tensor});
    const auto other = find_other(each);
    pairs.add(each.slot, other == others.end() ? std::nullopt : std::optional(other->second.slot));
    if (other != others.end()) others.erase(other);
  }
  pairs.add_outputs(outputs_a, outputs_b, names_of_b);
  for (const auto& [key, each] : others) report.only_b.push_back(names_of_b.at(each.slot));
  conclude(report, pairs.take());
  return report;
}

DiffReport diff(const GraphModule& a, const GraphModule& b, const std::vector<c10::IValue>& inputs,
                const ModuleDiffOptions& options) {
  ModuleDiff both(a, b);
  both.run([&](GraphModule& module) {
    const std::vector<c10::IValue> outputs = module.run(copies_on_device_of(module, inputs));
    return options.loss ? options.loss(outputs) : sum_of_outputs(outputs);
  });
  return both.report(options.names, options.tolerance);
}

}  // namespace plumb
