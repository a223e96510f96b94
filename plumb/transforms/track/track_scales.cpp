#include "plumb/transforms/track/track_scales.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

constexpr const char* kTrack = "plumb::track";
constexpr const char* kTrackRounded = "plumb::track_rounded";

// By this tracker: several may measure one value.
bool is_tracked(const Value* value, int64_t tracker) {
  for (const Use& use : value->uses()) {
    if (use.user->is_op(kTrackRounded) && use.user->arg("tracker") == Arg(tracker) &&
        use.user->arg("before") != Arg(int64_t(-1)))
      return true;
    if (!use.user->is_op(kTrack)) continue;
    if (use.user->arg("tracker") == Arg(tracker) || is_tracked(use.user->result(), tracker)) return true;
  }
  return false;
}

// Returns whether an operator writes into this very value.
bool is_written(const Value* value) {
  return std::ranges::any_of(value->uses(), [&](const Use& use) {
    const auto written = use.user->written_inputs();
    return std::ranges::find(written, value) != written.end();
  });
}

// Returns the operand that chooses how torch computes an operator, or null. Where it requires a gradient, the way is
// another one, with other bits. One that requires a gradient without tracking chooses nothing.
const Value* choosing_operand(const Node* node) {
  const Value* operand = nullptr;
  if (node->is_op("aten::scaled_dot_product_attention")) operand = node->arg("attn_mask").value();
  for (const char* name : {"aten::linalg_svdvals", "aten::linalg_eigvals", "aten::linalg_eigvalsh"})
    if (node->is_op(name)) operand = node->arg(0).value();
  // A batch times a matrix that is trained is one product of matrices.
  if (node->is_op("aten::matmul") || node->is_op("aten::linalg_matmul")) {
    const Value *a = node->arg(0).value(), *b = node->arg(1).value();
    if (!a || !b || !a->meta() || !b->meta()) return nullptr;
    if (a->meta()->sizes.size() > b->meta()->sizes.size()) std::swap(a, b);
    if (a->meta()->sizes.size() <= 2 && b->meta()->sizes.size() >= 3) operand = a;
  }
  return operand && operand->meta() && operand->meta()->requires_grad ? nullptr : operand;
}

// Returns the inputs that choosing_operand() hangs on for any node.
std::set<const Value*> choosing_inputs(const Graph& graph) {
  std::vector<const Value*> left;
  for (const Node* node : graph.nodes()) {
    if (const Value* operand = choosing_operand(node)) left.push_back(operand);
  }
  std::set<const Value*> seen, inputs;
  while (!left.empty()) {
    const Value* value = left.back();
    left.pop_back();
    if (!seen.insert(value).second) continue;
    const Node* node = value->producer();
    if (node->kind() == NodeKind::Placeholder) inputs.insert(value);
    for (size_t i = 0; i < node->num_inputs(); ++i) left.push_back(node->input(i));
  }
  return inputs;
}

template <class AddSlot>
bool insert_tracking(GraphModule& module, int64_t tracker, const AddSlot& add_slot, Report& report,
                     bool every_type = false) {
  Graph& graph = module.graph();
  UninitializedMemory memory;
  const std::set<const Value*> choosing = choosing_inputs(graph);
  bool changed = false;
  for (Node* node : graph.nodes()) {
    memory.pass(*node);
    if (node->kind() == NodeKind::Output || node->is_op(kTrack)) continue;
    for (Value* value : node->results()) {
      if (node->is_op(kTrackRounded) && node->arg("tracker") == Arg(tracker) && node->arg("after") != Arg(int64_t(-1)))
        continue;
      if (!value->is_tensor() || !value->has_uses() || is_tracked(value, tracker) ||
          !(every_type || may_be_float(value, module.state())))
        continue;
      // A view that is written next holds nothing yet, either, though other parts of its memory may be written.
      if (memory.is_unwritten(value) || (memory.holds(value) && !node->writes() && is_written(value))) {
        report.add(ReportKind::LeftAlone, node, node->target(), "", "its memory is not written yet").node =
            value->name();
        continue;
      }
      Node* before = node->next();
      while (before->kind() == NodeKind::Placeholder) before = before->next();  // inputs come first
      const bool input = node->kind() == NodeKind::Placeholder;
      const int64_t slot = add_slot(input, input && !choosing.contains(value));
      Node* track = insert_call(graph, before, kTrack, {value, slot, tracker}, node, value);
      track->result()->rename(graph.unique_name(value->name() + "_tracked"));
      graph.replace_all_uses_with(value, track->result(), track);
      // Whether an input requires a gradient is asked of the input: what is tracked always does.
      for (const Use& use : std::vector<Use>(track->result()->uses().begin(), track->result()->uses().end())) {
        if (use.user->is_op("plumb::guard_requires_grad")) use.user->set_arg("x", value);
      }
      report.add(ReportKind::Tracked, node, node->target()).node = value->name();
      changed = true;
    }
  }
  return changed;
}

const RegisterTransform track_scales_pass{
    "track_scales",
    "Inserts plumb::track after every floating-point tensor; without a tracker they only hand their tensors on.",
    {},
    [](GraphModule& module, const PassOptions&, Report& report) {
      int64_t slots = 0;
      return insert_tracking(module, 0, [&](bool, bool) { return slots++; }, report);
    },
};

}  // namespace

bool track_scales(GraphModule& module, ScaleTracker& tracker, Report* report, bool every_type) {
  Report own("track_scales");
  return insert_tracking(
      module, tracker.id(), [&](bool input, bool probe) { return tracker.add_slot(input, probe); },
      report ? *report : own, every_type);
}

std::shared_ptr<TransformedModule> track_scales(const std::shared_ptr<GraphModule>& module,
                                                const MetricsOptions& options) {
  auto result = derive(not_null(module));
  if (!result->tracker) result->tracker = ScaleTracker::create(options);
  return transformed(result, "track_scales", [](TransformedModule& made, Report& report) {
    return track_scales(made, *made.tracker, &report);
  });
}

ScalesGraph scales_graph(const TransformedModule& module) {
  if (!module.tracker) {
    throw Error(ErrorKind::InvalidState, "this module's scales are not tracked", "",
                "use the module that track_scales() returns");
  }
  const Graph& graph = module.graph();
  ScalesGraph result;
  std::unordered_map<const Value*, size_t> place;
  for (const Node* node : graph.nodes()) {
    if (node->is_op(kTrack)) {
      const size_t at = place.at(node->input(0));
      place.emplace(node->result(), at);
      if (node->arg("tracker") != Arg(module.tracker->id()) || !node->arg("slot").is_constant()) continue;
      result.nodes[at].metrics = module.tracker->metrics(node->arg("slot").constant().toInt());
      result.nodes[at].is_float_tensor |= result.nodes[at].metrics.has_value();
      continue;
    }
    auto metrics_of = [&](std::string_view name) -> std::optional<Metrics> {
      if (node->arg("tracker") != Arg(module.tracker->id()) || !node->arg(name).is_constant()) return std::nullopt;
      return module.tracker->metrics(node->arg(name).constant().toInt());
    };
    if (node->is_op(kTrackRounded)) {
      if (auto metrics = metrics_of("before")) result.nodes[place.at(node->input(0))].metrics = std::move(metrics);
    }
    std::vector<size_t> inputs;
    for (const Value* value : node->inputs()) inputs.push_back(place.at(value));
    ScaleNode entry;
    entry.kind = node->kind();
    entry.target = node->kind() == NodeKind::Output ? "output" : node->target();
    entry.module = node->meta().module_path();
    if (const auto& source = node->meta().source) entry.source = source->file + ":" + std::to_string(source->line);
    if (node->kind() == NodeKind::Output || node->num_results() == 0) {
      entry.name = node->kind() == NodeKind::Output ? "output" : node->target();
      entry.inputs = std::move(inputs);
      result.nodes.push_back(std::move(entry));
      continue;
    }
    for (const Value* value : node->results()) {
      ScaleNode one = entry;
      one.name = value->name();
      one.result_index = value->result_index();
      one.inputs = inputs;
      one.meta = value->meta();
      const auto dtype = value->is_tensor() ? dtype_of(value, module.state()) : std::nullopt;
      one.is_float_tensor = dtype && at::isFloatingType(*dtype);
      if (node->kind() == NodeKind::GetAttr) {
        const Attr* attr = module.state().find(node->target());
        one.is_parameter = attr && attr->kind == AttrKind::Parameter;
        one.requires_grad = one.is_parameter && attr->tensor.defined() && attr->tensor.requires_grad();
      }
      if (node->is_op(kTrackRounded)) {
        one.target = "plumb::simulate_format";
        one.metrics = metrics_of("after");
      }
      place.emplace(value, result.nodes.size());
      result.nodes.push_back(std::move(one));
    }
  }
  return result;
}

}  // namespace plumb
