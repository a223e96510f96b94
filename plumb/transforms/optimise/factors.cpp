#include "plumb/transforms/optimise/factors.h"

#include <cmath>
#include <string_view>

#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/rules.h"
#include "plumb/transforms/optimise/pointwise_steps.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

constexpr std::string_view kAttention = "plumb::scaled_dot_product_attention";

// Returns the sizes of an argument that is a tensor of known shape.
const std::vector<int64_t>* sizes_of(const Arg& arg) {
  if (!arg.is_value() || !arg.value()->is_tensor() || !arg.value()->meta()) return nullptr;
  const auto& meta = *arg.value()->meta();
  return meta.symbols.empty() ? &meta.sizes : nullptr;
}

std::optional<std::vector<double>> doubles(const Arg& arg) {
  if (!arg.is_constant() || !arg.constant().isDoubleList()) return std::nullopt;
  return arg.constant().toDoubleVector();
}

bool take_linear_scales(const Node* node, ScaledProduct& product) {
  auto scales = doubles(node->arg("scales"));
  if (!scales) {
    const auto* input = sizes_of(product.left);
    const auto* weight = sizes_of(product.right);
    const auto power = doubles(node->arg("scale_power"));
    if (!input || !weight || !power || power->size() != 3 || weight->size() != 2 || input->empty()) return false;
    const int64_t rows = element_count(at::IntArrayRef(*input).slice(0, input->size() - 1));
    scales = chosen_scales(node, 2, rules::linear((*weight)[1], (*weight)[0], rows, *power));
  }
  if (!scales || (scales->size() != 3 && scales->size() != 5)) return false;
  const auto& s = *scales;
  product.output = s[0], product.grad_left = s[1], product.grad_right = s[2];
  product.bias_output = s.size() == 5 ? s[3] : s[0];
  product.grad_bias = s.size() == 5 ? s[4] : s[2];
  return true;
}

bool take_matmul_scales(const Node* node, ScaledProduct& product) {
  const auto scales = doubles(node->arg("scales"));
  if (!scales || scales->size() != 3) return false;
  product.output = (*scales)[0], product.grad_left = (*scales)[1], product.grad_right = (*scales)[2];
  return true;
}

int64_t dims_of(const Arg& arg) {
  return arg.is_value() && arg.value()->meta() ? static_cast<int64_t>(arg.value()->meta()->sizes.size()) : -1;
}

}  // namespace

bool is_power_of_two(double x) {
  int exponent;
  return std::isfinite(x) && x != 0 && std::fabs(std::frexp(x, &exponent)) == 0.5;
}

bool Factor::exact() const { return is_power_of_two(forward) && is_power_of_two(backward); }

std::optional<Factor> factor_of(const Node* node) {
  const auto lowered = lower_pointwise(node);
  if (!lowered || lowered->operands.size() != 1 || lowered->steps.size() != 1) return std::nullopt;
  const PointwiseStep& step = lowered->steps[0];
  Factor factor{lowered->operands[0]};
  if (step.kind == PointwiseKind::Scale) {
    factor.forward = step.forward;
    factor.backward = step.backward;
  } else if (step.kind == PointwiseKind::Mul && step.b.kind == PointwiseArg::Number) {
    factor.forward = factor.backward = step.b.number;
  } else if (step.kind == PointwiseKind::Div && step.b.kind == PointwiseArg::Number && step.b.number != 0) {
    factor.forward = factor.backward = 1 / step.b.number;
  } else {
    return std::nullopt;
  }
  if (!std::isfinite(factor.forward) || !std::isfinite(factor.backward)) return std::nullopt;
  return factor;
}

std::optional<Factor> factor_of_attention(const Node* node) {
  if (!node->is_op(kAttention)) return std::nullopt;
  const auto* value = sizes_of(node->arg("value"));
  const auto mult = number_of(node->arg("mult")), dropout = number_of(node->arg("dropout_p"));
  const Arg& causal = node->arg("is_causal");
  if (!value || value->size() < 2 || !mult || !dropout || !causal.is_constant() || !causal.constant().isBool())
    return std::nullopt;
  const int64_t length = (*value)[value->size() - 2], head = value->back();
  const auto scales =
      chosen_scales(node, 0, {rules::attention(length, head, *mult, *dropout, causal.constant().toBool())});
  if (!scales || scales->size() != 1 || !std::isfinite((*scales)[0]) || (*scales)[0] == 1) return std::nullopt;
  return Factor{nullptr, (*scales)[0], (*scales)[0]};
}

void drop_factor_of_attention(Node* node) { node->set_arg("scales", c10::IValue(std::vector<double>{1})); }

Node* source_behind_views(const Value* operand) {
  while (operand->uses().size() == 1) {
    Node* node = operand->producer();
    if (!node->facts().rearranges) return node;
    const Value* source = node->input(0);
    // Another type: the memory's bits are read as other numbers.
    if (!source->meta() || !operand->meta() || source->meta()->dtype != operand->meta()->dtype) return node;
    operand = source;
  }
  return nullptr;
}

void ScaledProduct::multiply_result(const Factor& factor) {
  output *= factor.forward;
  bias_output *= factor.forward;
  grad_left *= factor.backward;
  grad_right *= factor.backward;
  grad_bias *= factor.backward;
}

void ScaledProduct::multiply_left(const Factor& factor) {
  output *= factor.forward;
  grad_left *= factor.backward;
  grad_right *= factor.forward;
}

void ScaledProduct::multiply_right(const Factor& factor) {
  output *= factor.forward;
  grad_right *= factor.backward;
  grad_left *= factor.forward;
}

std::optional<ScaledProduct> product_of(const Node* node) {
  if (!node->is_call() || node->num_results() != 1) return std::nullopt;
  const std::string_view op = node->op_name();
  ScaledProduct product;
  if (op == "aten::linear" || op == "plumb::linear") {
    product.linear = true;
    product.left = node->arg("input");
    product.right = node->arg("weight");
    product.bias = node->arg("bias");
    if (dims_of(product.left) < 1 || dims_of(product.right) != 2) return std::nullopt;
  } else if (op == "aten::mm" || op == "aten::bmm" || op == "aten::matmul" || op == "plumb::matmul") {
    if (node->args().size() < 2 || node->target().ends_with(".out") || node->target().ends_with(".dtype"))
      return std::nullopt;
    product.left = node->arg(size_t(0));
    product.right = node->arg(1);
    if (dims_of(product.left) < 2 || dims_of(product.right) < 2) return std::nullopt;
  } else {
    return std::nullopt;
  }
  const auto& meta = node->result()->meta();
  if (!meta || !meta->is_floating_point() || !meta->symbols.empty()) return std::nullopt;
  for (const Value* value : node->inputs()) {
    if (!value->meta() || value->meta()->dtype != meta->dtype) return std::nullopt;
  }
  if (op == "plumb::linear" && !take_linear_scales(node, product)) return std::nullopt;
  if (op == "plumb::matmul" && !take_matmul_scales(node, product)) return std::nullopt;
  return product;
}

Node* call_product(Graph& graph, const ScaledProduct& product) {
  std::vector<double> scales = {product.output, product.grad_left, product.grad_right};
  if (!product.linear)
    return graph.call("plumb::matmul", {product.left, product.right, std::nullopt, c10::IValue(scales)});
  if (!product.bias.is_none() && (product.bias_output != product.output || product.grad_bias != product.grad_right))
    scales.insert(scales.end(), {product.bias_output, product.grad_bias});
  return graph.call("plumb::linear", {product.left, product.right, product.bias, std::nullopt,
                                      c10::IValue(std::vector<double>{0.5, 0.5, 0.5}), c10::IValue(scales)});
}

}  // namespace plumb
