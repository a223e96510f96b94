#include "plumb/recording/module_diff.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

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
#include "plumb/transforms/formats/recurrent_steps.h"
#include "plumb/transforms/module.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using Direction = ScaleTracker::Direction;

std::shared_ptr<ScaleTracker> track(GraphModule& module) {
  auto tracker = ScaleTracker::create();
  track_scales(module, *tracker, nullptr, true);
  for (size_t slot = 0; slot < tracker->num_slots(); ++slot)
    tracker->want(static_cast<int64_t>(slot), {.metrics = false, .keep = true});
  return tracker;
}

// By module and operator: results whose names say what their nodes draw.
std::map<std::pair<std::string, std::string>, std::vector<Value*>> draws_of(const GraphModule& module) {
  std::map<std::pair<std::string, std::string>, std::vector<Value*>> draws;
  for (const Node* node : module.graph().nodes())
    if ((node->is_random() || node->is_op("plumb::python_function")) && node->num_results() > 0)
      draws[{node->meta().module_path(), std::string(node->op_name())}].push_back(node->result(0));
  return draws;
}

// Nodes draw by their names, and torch.export and transforms change names. As many nodes of one operator in one module
// draw in both modules the same numbers one after the other.
void draw_alike(GraphModule& a, GraphModule& b) {
  if (random_recurrent_layers(a).size() != random_recurrent_layers(b).size()) {
    for (GraphModule* module : {&a, &b})
      for (Node* node : random_recurrent_layers(*module)) take_apart(*module, node);
  }
  Graph& graph = b.graph();
  const auto of_a = draws_of(a);
  for (const auto& [place, draws] : draws_of(b)) {
    const auto others = of_a.find(place);
    if (others == of_a.end() || others->second.size() != draws.size()) continue;
    for (size_t i = 0; i < draws.size(); ++i) {
      const std::string name = others->second[i]->name();
      Value* holder = graph.find_value(name);
      if (holder == draws[i]) continue;
      if (holder != nullptr) holder->rename(graph.unique_name(name));
      draws[i]->rename(name);
    }
  }
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
  for (const TrackedTensor& each : tracked) {
    tensors.push_back(each.tensor);
    tensors.back().inputs.assign(each.inputs.begin(), each.inputs.end());
  }
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

// Runs a tracked module forward and backward, and leaves nothing behind. Returns the gradients of its parameters.
std::map<std::string, at::Tensor> run_both_ways(GraphModule& module,
                                                const std::function<at::Tensor(GraphModule&)>& loss_of) {
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
  std::map<std::string, at::Tensor> gradients;
  if (!loss.defined()) return gradients;
  if (loss.numel() != 1) {
    throw Error(ErrorKind::InvalidArgument, c10::str("the loss has ", loss.numel(), " elements"), "",
                "return a tensor of one element to go backward from");
  }
  if (loss.requires_grad()) {
    run_backward_of(module.graph(), [&] { loss.backward(); });
    for (const Attr& attr : module.state())
      if (attr.tensor.defined() && attr.tensor.grad().defined()) gradients.emplace(attr.name, attr.tensor.grad());
    return gradients;
  }
  const auto trained = [](const Attr& attr) { return attr.tensor.defined() && attr.tensor.requires_grad(); };
  if (std::any_of(module.state().begin(), module.state().end(), trained)) {
    throw Error(ErrorKind::InvalidArgument, "the loss depends on no parameter: no gradient would be compared", "",
                "return a tensor of one element to go backward from, without detach()");
  }
  return gradients;
}

std::optional<at::Tensor> gradient_of(const std::map<std::string, at::Tensor>& gradients,
                                      const std::string& parameter) {
  const auto found = gradients.find(parameter);
  return found == gradients.end() ? std::nullopt : std::optional(found->second);
}

bool has_values(const Attr& attr) { return attr.tensor.defined() && !attr.tensor.is_meta(); }

bool has_hooks(const GraphModule& module, const std::string& parameter) {
  const Attr* attr = module.state().find(parameter);
  if (attr == nullptr || !attr->tensor.defined()) return false;
  const auto* meta = torch::autograd::impl::get_autograd_meta(attr->tensor);
  return meta != nullptr && (!meta->hooks_.empty() || meta->cpp_hooks_list_ || meta->post_acc_grad_hooks_);
}

// The tensors of two modules, compared in pairs.
class Pairs {
 public:
  using Gradients = std::pair<std::optional<at::Tensor>, std::optional<at::Tensor>>;

  Pairs(DiffReport& report, const ScaleTracker& a, const ScaleTracker& b, double tolerance)
      : report_(report), a_(a), b_(b), tolerance_(tolerance) {}

  // Compares the report's last tensor, value and gradient, with the other module's if it has one. `gradients`: those to
  // compare instead of what was seen in the graphs.
  void add(int64_t slot, std::optional<int64_t> other, const std::optional<Gradients>& gradients) {
    const size_t place = places_[slot] = report_.tensors.size() - 1;
    const std::string& name = report_.tensors[place].tensor.name;
    if (!other) return report_.only_a.push_back(name);
    others_[slot] = *other;
    const auto x = last_of(a_, slot, Direction::Forward), y = last_of(b_, *other, Direction::Forward);
    if (x && y) compare({place, DiffKind::Value}, *x, *y);
    const auto [dx, dy] =
        gradients ? *gradients
                  : std::pair(last_of(a_, slot, Direction::Backward), last_of(b_, *other, Direction::Backward));
    if (dx.has_value() != dy.has_value()) {
      (dx ? report_.only_a : report_.only_b).push_back("the gradient of " + name);
      if (report_.tensors[place].tensor.operation == "parameter") report_.lost_gradients.push_back(name);
    }
    if (dx && dy) compare({place, DiffKind::Gradient}, *dx, *dy);
  }

  // Compares the report's last tensor, a parameter or buffer that no operator takes.
  void add_unused(const at::Tensor& x, const at::Tensor& y) {
    compare({report_.tensors.size() - 1, DiffKind::Value}, x, y);
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

ModuleDiff::ModuleDiff(const GraphModule& given_a, const GraphModule& given_b)
    : a(derive(given_a)), b(derive(given_b)) {
  draw_alike(*a, *b);
  of_a_ = track(*a);
  of_b_ = track(*b);
}

void ModuleDiff::run(const std::function<at::Tensor(GraphModule& graph)>& loss) {
  gradients_a_ = run_both_ways(*a, loss);
  gradients_b_ = run_both_ways(*b, loss);
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
    std::optional<Pairs::Gradients> gradients;
    if (has_hooks(*a, each.tensor.name) || has_hooks(*b, each.tensor.name))
      gradients.emplace(gradient_of(gradients_a_, each.tensor.name), gradient_of(gradients_b_, each.tensor.name));
    pairs.add(each.slot, other == others.end() ? std::nullopt : std::optional(other->second.slot), gradients);
    if (other != others.end()) others.erase(other);
  }
  for (const Attr& attr : a->state()) {
    const Attr* other = b->state().find(attr.name);
    const std::string kind = attr.kind == AttrKind::Parameter ? "parameter" : "buffer";
    HistoryTensor tensor{attr.name, parent_of(attr.name), kind};
    const bool is_used = attr.kind == AttrKind::Constant || names_of_a.contains(name_key(tensor));
    if (is_used || other == nullptr || !has_values(attr) || !has_values(*other)) continue;
    report.tensors.push_back({std::move(tensor)});
    pairs.add_unused(attr.tensor, other->tensor);
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
