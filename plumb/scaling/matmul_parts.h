// Linear layers and matrix products with a free factor for each of their products, over any way to multiply: values
// (ops_matmul.cpp) or codes of FP8 (ops_fp8.cpp).
//
// A Product multiplies two matrices, or equal batches of them:
//   Tensor operator()(Factors which, a, b, alpha, bias = {}, beta = 1)   alpha * a @ b + beta * bias
//   Tensor values(grad)                                                  the gradient as values
#pragma once

#include <ATen/ExpandUtils.h>

#include <array>
#include <tuple>
#include <vector>

#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"

namespace plumb {

// The kinds of a product's two factors.
enum class Factors { Operands, GradientAndOperand, OperandAndGradient };

// Returns the rule's factors of a linear layer: output, gradients of input and weight. Checks sizes.
std::vector<double> linear_rule(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                                at::ArrayRef<double> scale_power);
// Returns the product's factors (output, gradients of input and weight), then the bias's (output, gradient). Those
// given may leave out the bias's, which are then the output's and the weight's.
std::vector<double> choose_linear_scales(const OptionalScales& given, const OptionalName& constraint,
                                         std::vector<double> rule);

// Both operands as matrices over one batch shape; vectors become a row or a column.
struct MatmulOperands {
  at::Tensor left, right;
  std::vector<int64_t> batch;
  bool left_vector, right_vector;
  bool fold;  // right is a single matrix: left's batch is more rows
  int64_t count() const { return c10::multiply_integers(batch); }
};
MatmulOperands matmul_operands(const at::Tensor& left, const at::Tensor& right);
// Returns the rule's factors: output, gradients of left and right.
std::vector<double> matmul_rule(const MatmulOperands& o);

inline at::Tensor as_batch(const at::Tensor& t, const std::vector<int64_t>& batch) {
  auto sizes = batch;
  sizes.insert(sizes.end(), {t.size(-2), t.size(-1)});
  return t.expand(sizes).reshape({c10::multiply_integers(batch), t.size(-2), t.size(-1)});
}

inline at::Tensor as_rows(const at::Tensor& t) {
  return t.dim() == 2 ? t : t.reshape({leading(t.sizes()), t.size(-1)});
}

template <class Product>
at::Tensor linear_product(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                          const std::vector<double>& s, const Product& product) {
  auto out = product(Factors::Operands, as_rows(input), weight.t(), s[0], bias, s[3]);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return out.view(sizes);
}

template <class Product>
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_gradients(const at::Tensor& grad, const at::Tensor& input,
                                                                const at::Tensor& weight, const std::vector<double>& s,
                                                                std::array<bool, 3> mask, const Product& product) {
  const auto rows = as_rows(grad);
  at::Tensor grad_input, grad_weight, grad_bias;
  if (mask[0]) grad_input = product(Factors::GradientAndOperand, rows, weight, s[1]).view(input.sizes());
  if (mask[1])
    grad_weight = product(Factors::GradientAndOperand, rows.t(), input.reshape({rows.size(0), input.size(-1)}), s[2]);
  if (mask[2]) grad_bias = scaled(product.values(rows).sum(0), s[4]);
  return {grad_input, grad_weight, grad_bias};
}

template <class Product>
at::Tensor matmul_product(const MatmulOperands& o, double s, const Product& product, const OptionalTensor& bias = {}) {
  auto sizes = o.batch;
  if (!o.left_vector) sizes.push_back(o.left.size(-2));
  if (!o.right_vector) sizes.push_back(o.right.size(-1));
  auto out = o.fold ? product(Factors::Operands, as_rows(o.left), o.right, s, bias)
                    : product(Factors::Operands, as_batch(o.left, o.batch), as_batch(o.right, o.batch), s);
  return out.view(sizes);
}

// `left`, `right`: the sizes of the operands as they were given.
template <class Product>
std::tuple<at::Tensor, at::Tensor> matmul_gradients(const at::Tensor& grad, const MatmulOperands& o,
                                                    at::IntArrayRef left, at::IntArrayRef right,
                                                    const std::vector<double>& s, std::array<bool, 2> mask,
                                                    const Product& product) {
  auto g = grad;
  if (o.left_vector) g = o.right_vector ? g.unsqueeze(-1) : g.unsqueeze(-2);
  if (o.right_vector) g = g.unsqueeze(-1);
  at::Tensor grad_left, grad_right;
  if (o.fold) {
    const auto rows = as_rows(g);
    if (mask[0]) grad_left = product(Factors::GradientAndOperand, rows, o.right.t(), s[1]).view(left);
    if (mask[1]) grad_right = product(Factors::OperandAndGradient, as_rows(o.left).t(), rows, s[2]).view(right);
    return {grad_left, grad_right};
  }
  auto back = [&](const at::Tensor& result, const at::Tensor& operand, at::IntArrayRef original) {
    auto sizes = o.batch;
    sizes.insert(sizes.end(), {operand.size(-2), operand.size(-1)});
    return at::sum_to(result.view(sizes), operand.sizes()).view(original);
  };
  const auto g3 = as_batch(g, o.batch);
  if (mask[0]) {
    const auto right3 = as_batch(o.right, o.batch).transpose(1, 2);
    grad_left = back(product(Factors::GradientAndOperand, g3, right3, s[1]), o.left, left);
  }
  if (mask[1]) {
    const auto left3 = as_batch(o.left, o.batch).transpose(1, 2);
    grad_right = back(product(Factors::OperandAndGradient, left3, g3, s[2]), o.right, right);
  }
  return {grad_left, grad_right};
}

// Multiplies values.
struct ValueProduct {
  at::Tensor operator()(Factors, const at::Tensor& a, const at::Tensor& b, double alpha,
                        const OptionalTensor& bias = {}, double beta = 1) const {
    if (present(bias)) return at::addmm(*bias, a, b, beta, alpha);
    return a.dim() == 3 ? batched_gemm(a, b, alpha) : gemm(a, b, alpha);
  }
  at::Tensor values(const at::Tensor& grad) const { return grad; }
};

// Results of the meta device: of a linear layer, and of a product.
at::Tensor linear_sizes(const at::Tensor& input, const at::Tensor& weight);
at::Tensor matmul_sizes(const at::Tensor& left, const at::Tensor& right);

}  // namespace plumb
