#include "plumb/partition/backward.h"

#include <ATen/ATen.h>

#include <map>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"

namespace plumb {
namespace {

bool differentiable(ValueType type, const std::optional<TensorMeta>& meta) {
  return type == ValueType::Tensor && (!meta || at::isFloatingType(meta->dtype) || at::isComplexType(meta->dtype));
}

std::string show(const std::optional<GradRef>& ref, const PipeTable& table) {
  if (!ref) return "None";
  return str("%grad_", ref->stage, "_", table.stages[ref->stage].inputs[ref->input].name);
}

}  // namespace

SymbolicBackward make_backward(const PipeTable& table) {
  if (!table.loss_output || !table.outputs.at(*table.loss_output).port) {
    throw Error(ErrorKind::InvalidState, table.loss_output ? "the loss is a constant" : "the pipe has no loss", "",
                "mark a tensor among the outputs as the loss");
  }
  SymbolicBackward backward;
  backward.loss_port = *table.outputs[*table.loss_output].port;
  std::map<ValueSource, GradRef> newest;  // the gradient of a value from all users so far
  auto look_up = [&](const ValueSource& source) -> std::optional<GradRef> {
    auto it = newest.find(source);
    return it == newest.end() ? std::nullopt : std::optional(it->second);
  };
  for (int s = table.num_stages() - 1; s >= 0; --s) {
    const StageIO& io = table.stages[s];
    const bool last = s + 1 == table.num_stages();
    StageBackwardStep step{s, {}, {}, {}};
    for (size_t j = 0; j < io.outputs.size(); ++j) {
      step.output_grads.push_back(look_up({s, j}));
      if (step.output_grads.back() || (last && j == backward.loss_port)) step.outputs_with_grads.push_back(j);
    }
    if (step.outputs_with_grads.empty()) continue;
    for (const StageInputPort& in : io.inputs) step.input_seeds.push_back(look_up(in.source));
    for (size_t i = 0; i < io.inputs.size(); ++i) {
      if (differentiable(io.inputs[i].type, io.inputs[i].meta)) newest[io.inputs[i].source] = {s, i};
    }
    backward.steps.push_back(std::move(step));
  }
  return backward;
}

std::string SymbolicBackward::to_string(const PipeTable& table) const {
  std::string text = "backward of %" + table.stages.back().outputs[loss_port].name + "\n";
  const auto value = [](const auto& port) { return "%" + port.name; };
  const auto gradient = [&](const std::optional<GradRef>& ref) { return show(ref, table); };
  for (const StageBackwardStep& step : steps) {
    const StageIO& io = table.stages[step.stage];
    std::vector<std::string> made;
    for (size_t i = 0; i < io.inputs.size(); ++i)
      made.push_back(differentiable(io.inputs[i].type, io.inputs[i].meta) ? show(GradRef{step.stage, i}, table) : "_");
    text += str("  ", join(made), made.empty() ? "" : " = ", "stage_backward(stage=", step.stage, ", stage_output=[",
                join(io.outputs, value), "], output_grads=[", join(step.output_grads, gradient), "], input_values=[",
                join(io.inputs, value), "], input_seeds=[", join(step.input_seeds, gradient), "], outputs_with_grads=[",
                join(step.outputs_with_grads, [](size_t j) { return str(j); }), "])\n");
  }
  return text;
}

}  // namespace plumb
