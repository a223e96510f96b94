#include "plumb/transforms/optimise/pointwise_steps.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_map>

#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"
#include "plumb/transforms/optimise/factors.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {

std::optional<std::vector<double>> chosen_scales(const Node* node, size_t constrained, std::vector<double> rule) {
  const Arg* constraint = node->try_arg("constraint");
  std::optional<std::string> name;
  if (constraint && constraint->is_constant() && constraint->constant().isString())
    name = constraint->constant().toStringRef();
  std::optional<std::vector<double>> given;
  const Arg& scales = node->arg("scales");
  if (scales.is_list()) return std::nullopt;
  if (scales.is_constant() && scales.constant().isDoubleList()) given = scales.constant().toDoubleVector();
  OptionalScales explicit_scales;
  if (given) explicit_scales = at::ArrayRef<double>(*given);
  OptionalName constraint_name;
  if (name) constraint_name = *name;
  return choose_scales("optimise", explicit_scales, constraint_name, constrained, std::move(rule));
}

namespace {

using Kind = PointwiseKind;

bool is_number(const Node* node, std::string_view name, double wanted) {
  const Arg* arg = node->try_arg(name);
  return !arg || number_of(*arg) == wanted;
}

PointwiseArg input(int64_t i) { return {PointwiseArg::Input, i, 0}; }
PointwiseArg step(int64_t i) { return {PointwiseArg::Step, i, 0}; }
PointwiseStep scale(PointwiseArg a, double f, double b) { return {Kind::Scale, a, {}, f, b}; }

const std::unordered_map<std::string_view, Kind>& unary() {
  static const std::unordered_map<std::string_view, Kind> table = {
      {"aten::neg", Kind::Neg},   {"aten::relu", Kind::Relu}, {"aten::sigmoid", Kind::Sigmoid},
      {"aten::tanh", Kind::Tanh}, {"aten::exp", Kind::Exp},   {"aten::sqrt", Kind::Sqrt},
      {"aten::silu", Kind::Silu}};
  return table;
}

const std::unordered_map<std::string_view, Kind>& binary() {
  static const std::unordered_map<std::string_view, Kind> table = {
      {"aten::add.Tensor", Kind::Add}, {"aten::sub.Tensor", Kind::Sub}, {"aten::mul.Tensor", Kind::Mul},
      {"aten::div.Tensor", Kind::Div}, {"aten::add.Scalar", Kind::Add}, {"aten::sub.Scalar", Kind::Sub},
      {"aten::mul.Scalar", Kind::Mul}, {"aten::div.Scalar", Kind::Div}};
  return table;
}

std::optional<Kind> gelu_kind(const Node* node) {
  const Arg& how = node->arg("approximate");
  if (!how.is_constant() || !how.constant().isString()) return std::nullopt;
  return how.constant().toStringRef() == "tanh" ? Kind::GeluTanh : Kind::Gelu;
}

std::vector<PointwiseStep> scaled_activation(Kind kind, double forward, double backward) {
  return {scale(input(0), 1, backward), {kind, step(0), {}, 1, 1}, scale(step(1), forward, 1)};
}

std::vector<PointwiseStep> weighted(double a, double a_back, double b, double b_back) {
  return {scale(input(0), a, a_back), scale(input(1), b, b_back), {Kind::Add, step(0), step(1), 1, 1}};
}

// `wide`: in 16-bit types sums of products are rounded once, and factors in place before they multiply: no steps.
std::vector<PointwiseStep> steps_of(const Node* node, bool wide) {
  const std::string_view op = node->op_name();
  if (auto it = unary().find(op); it != unary().end()) return {{it->second, input(0), {}, 1, 1}};
  if (auto it = binary().find(node->target()); it != binary().end()) {
    if (!is_number(node, "alpha", 1)) return {};
    const Arg& other = node->arg("other");
    if (other.is_value()) return {{it->second, input(0), input(1), 1, 1}};
    if (const auto n = number_of(other)) return {{it->second, input(0), {PointwiseArg::Number, 0, *n}, 1, 1}};
    return {};
  }
  if (op == "aten::gelu") {
    const auto kind = gelu_kind(node);
    if (kind) return {{*kind, input(0), {}, 1, 1}};
    return {};
  }
  if (op == "plumb::scale_fwd" || op == "plumb::scale_bwd") {
    const auto s = number_of(node->arg("scale"));
    if (!s) return {};
    return {op == "plumb::scale_fwd" ? scale(input(0), *s, 1) : scale(input(0), 1, *s)};
  }
  if (wide && op == "plumb::residual_add") {
    const auto tau = number_of(node->arg("tau"));
    if (!tau) return {};
    const auto weight = rules::residual(*tau);
    return weighted(weight.residual, 1, weight.skip, 1);
  }
  if (!wide || !op.starts_with("plumb::") || !is_number(node, "mult", 1)) return {};
  if (op == "plumb::gelu") {
    const auto kind = gelu_kind(node);
    const auto s = chosen_scales(node, 2, rules::gelu(1));
    if (kind && s) return scaled_activation(*kind, (*s)[0], (*s)[1]);
  } else if (op == "plumb::silu") {
    if (const auto s = chosen_scales(node, 2, rules::silu(1))) return scaled_activation(Kind::Silu, (*s)[0], (*s)[1]);
  } else if (op == "plumb::silu_glu") {
    if (const auto s = chosen_scales(node, 0, {rules::silu_glu(1)})) {
      const double f = (*s)[0];
      return {scale(input(1), 1, f),
              {Kind::Silu, step(0), {}, 1, 1},
              scale(input(0), 1, f),
              {Kind::Mul, step(2), step(1), 1, 1},
              scale(step(3), f, 1)};
    }
  } else if (op == "plumb::add") {
    const auto alpha = number_of(node->arg("alpha"));
    const auto s = chosen_scales(node, 3, rules::add(1, 1, false));
    if (alpha && s) return weighted((*s)[0], (*s)[1], (*s)[0] * *alpha, (*s)[2] * *alpha);
  }
  return {};
}

}  // namespace

Saving saving_of(const Node* node, const LoweredNode& lowered) {
  // These are one pass each way by themselves.
  if (node->is_op("plumb::add") || node->is_op("plumb::residual_add")) return {1, 2};
  if (node->is_op("plumb::gelu")) return {0, 1};
  Saving saving;
  for (const PointwiseStep& step : lowered.steps) {
    switch (step.kind) {
      case Kind::Add:
      case Kind::Sub:
      case Kind::Mul:
      case Kind::Neg:
      case Kind::Scale: saving += {1, 2}; break;
      case Kind::Relu: break;  // computed again, which is as much as it saves
      default: saving += {0, 1};
    }
  }
  // Below 32 bits every step is a call of torch's.
  const at::ScalarType dtype = node->result()->meta()->dtype;
  if (dtype != at::kFloat && dtype != at::kDouble) saving.calls = 0;
  return saving;
}

std::optional<LoweredNode> lower_pointwise(const Node* node) {
  if (!node->is_call() || node->num_results() != 1 || !node->result()->is_tensor() || !node->result()->meta())
    return std::nullopt;
  const TensorMeta& meta = *node->result()->meta();
  if (!at::isFloatingType(meta.dtype)) return std::nullopt;
  LoweredNode lowered;
  lowered.operands = node->inputs();
  if (lowered.operands.empty()) return std::nullopt;
  for (const Value* operand : lowered.operands) {
    if (!operand->is_tensor() || !operand->meta() || operand->meta()->dtype != meta.dtype ||
        operand->meta()->sizes != meta.sizes || operand->meta()->symbols != meta.symbols ||
        operand->meta()->device != meta.device)
      return std::nullopt;
  }
  // The first operand must be the node's first argument: numbers come second.
  if (!node->args()[0].is_value()) return std::nullopt;
  if (node->is_op("plumb::add") && meta.numel() == 1) return std::nullopt;  // another rule
  lowered.steps = steps_of(node, meta.dtype == at::kFloat || meta.dtype == at::kDouble);
  if (lowered.steps.empty()) return std::nullopt;
  lowered.recomputes = node->is_op("plumb::silu_glu");
  return lowered;
}

namespace {

struct Factors {
  double forward, backward;
};

std::optional<Factors> factors_of(const PointwiseStep& step) {
  if (step.kind == Kind::Scale) return Factors{step.forward, step.backward};
  if (step.kind == Kind::Mul && step.b.kind == PointwiseArg::Number) return Factors{step.b.number, step.b.number};
  return std::nullopt;
}

bool rounds_once(double a, double b) { return is_power_of_two(a) || is_power_of_two(b); }

bool does_nothing(const PointwiseStep& step) {
  if (step.kind == Kind::Div) return step.b.kind == PointwiseArg::Number && step.b.number == 1;
  const auto factors = factors_of(step);
  return factors && factors->forward == 1 && factors->backward == 1;
}

// Returns whether a chain whose last step does nothing may end with `before` instead. Later operators may write the
// chain's result in place, so it must not be one that a gradient needs.
bool may_end_with(const std::vector<PointwiseStep>& steps, const PointwiseArg& before, int64_t num_inputs) {
  if (before.kind != PointwiseArg::Step) return false;
  const std::vector<bool> all(static_cast<size_t>(num_inputs), true);
  return !pointwise_needs({steps, num_inputs}, all).kept[static_cast<size_t>(before.index)];
}

}  // namespace

void merge_factors(PointwiseProgram& program, std::vector<bool>& cheap, bool exact) {
  std::vector<PointwiseStep> steps;
  std::vector<bool> still_cheap;
  std::vector<PointwiseArg> now;  // what stands for each step
  auto moved = [&](const PointwiseArg& arg) {
    return arg.kind == PointwiseArg::Step ? now[static_cast<size_t>(arg.index)] : arg;
  };
  for (size_t i = 0; i < program.steps.size(); ++i) {
    PointwiseStep step = program.steps[i];
    step.a = moved(step.a);
    step.b = moved(step.b);
    if (does_nothing(step) && (i + 1 < program.steps.size() || may_end_with(steps, step.a, program.num_inputs))) {
      now.push_back(step.a);
      continue;
    }
    const auto outer = factors_of(step);
    // A factor multiplies the step just before it, or an input.
    const bool follows = step.a.kind == PointwiseArg::Step && step.a.index + 1 == static_cast<int64_t>(steps.size());
    if (const auto inner = outer && follows ? factors_of(steps.back()) : std::nullopt;
        inner &&
        (!exact || (rounds_once(inner->forward, outer->forward) && rounds_once(inner->backward, outer->backward)))) {
      const double f = inner->forward * outer->forward, b = inner->backward * outer->backward;
      if (std::isfinite(f) && std::isfinite(b)) {
        steps.back() = scale(steps.back().a, f, b);
        now.push_back(step.a);
        continue;
      }
    }
    steps.push_back(step);
    still_cheap.push_back(cheap[i]);
    now.push_back({PointwiseArg::Step, static_cast<int64_t>(steps.size()) - 1, 0});
  }
  program.steps = std::move(steps);
  cheap = std::move(still_cheap);
}

void choose_kept(PointwiseProgram& program, const std::vector<bool>& cheap) {
  // In units of a pass that reads a tensor which has to be held until the backward pass.
  constexpr double kHeld = 1, kWritten = 1.3, kArithmetic = 0.15, kDivision = 0.6, kFunction = 4;
  auto& steps = program.steps;
  for (auto& step : steps) step.keep = true;
  const std::vector<bool> all(static_cast<size_t>(program.num_inputs), true);
  const PointwiseNeeds asked = pointwise_needs(program, all);  // with all kept: what the gradient itself asks for

  struct Cost {
    double idle, there;  // cost of all that is asked for up to here, without this step's result, and with it
    bool keep;
  };
  std::vector<Cost> costs;
  auto cost = [&](const PointwiseArg& arg, bool there) {
    const auto at = static_cast<size_t>(arg.index);
    if (arg.kind == PointwiseArg::Input) return there && !asked.inputs[at] ? kHeld : 0.0;
    if (arg.kind == PointwiseArg::Step) return there ? costs[at].there : costs[at].idle;
    return 0.0;
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& step = steps[i];
    double again = cost(step.a, true) + cost(step.b, true);
    switch (step.kind) {
      case Kind::Div:
      case Kind::Sqrt: again += kDivision; break;
      case Kind::Sigmoid:
      case Kind::Tanh:
      case Kind::Exp:
      case Kind::Silu:
      case Kind::Gelu:
      case Kind::GeluTanh: again += cheap[i] ? kArithmetic : kFunction; break;
      default: again += kArithmetic;
    }
    const double below = cost(step.a, false) + cost(step.b, false), kept = below + kWritten;
    Cost own{below, std::min(again, kept), kept < again};
    if (asked.kept[i]) own.idle = own.there;
    costs.push_back(own);
  }
  std::vector<bool> there = asked.kept;
  for (size_t i = steps.size(); i-- > 0;) {
    steps[i].keep = there[i] && costs[i].keep && i + 1 != steps.size();
    if (!there[i] || steps[i].keep || i + 1 == steps.size()) continue;
    for (const auto* arg : {&steps[i].a, &steps[i].b}) {
      if (arg->kind == PointwiseArg::Step) there[static_cast<size_t>(arg->index)] = true;
    }
  }
}

}  // namespace plumb
