// The scale factors of each operator, as plain arithmetic on sizes.
// U = Unit Scaling (arXiv 2303.11257, appendix E.2), M = u-muP (arXiv 2407.17465, appendix B).
//
// A rule gives the factors before any constraint: [output, gradients ...], for inputs of zero mean and unit variance.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace plumb::rules {

using Scales = std::vector<double>;

// exp of the linear interpolation between log(lower) and log(upper); alpha 0 is lower, 1 is upper; both limits > 0.
double logarithmic_interpolation(double alpha, double lower, double upper);

// [output, grad_input]; mult is the factor inside the nonlinearity (M, table "activation multipliers"). mult > 0.
Scales gelu(double mult);
Scales silu(double mult);
// [output, grad_input].
Scales relu();
// Returns one factor for the output and both gradients: the rule is constrained by construction.
double silu_glu(double mult);
// [output, grad_input] for a softmax over dim_size values.
Scales softmax(int64_t dim_size, double mult);
// Returns one factor for output and gradient; 0 <= p < 1.
double dropout(double p);

// [output, grad_left, grad_right] of (left x inner) @ (inner x right). left_repeats, right_repeats: how often an
// operand is used again by broadcasting over batch dimensions, whose gradients add up.
Scales matmul(int64_t left, int64_t inner, int64_t right, int64_t left_repeats = 1, int64_t right_repeats = 1);
// [output, grad_input, grad_weight]; the bias has grad_weight's. power: exponents for the three.
Scales linear(int64_t fan_in, int64_t fan_out, int64_t batch, const std::vector<double>& power);
// [output, grad_input, grad_weight] of a convolution of any rank. weight sizes are (out, in / groups, kernel...).
//   kernel:  product of the kernel's sizes
//   stride:  product of the strides
//   batch:   output positions over all examples
Scales convolution(int64_t out_channels, int64_t in_channels_per_group, int64_t kernel, int64_t stride, int64_t groups,
                   int64_t batch, const std::vector<double>& power);

// [output, grad_input, grad_other]; repeats as for matmul. scalar: one operand has a single value.
Scales add(int64_t input_repeats, int64_t other_repeats, bool scalar);
// Returns the factor of a norm's weight and bias gradients: each is a sum over numel / normalized values.
double norm_grad_weight(int64_t normalized, int64_t numel);
// Returns the factor of an embedding table's gradient: a row is looked up batch / num_embeddings times.
double embedding_grad_weight(int64_t num_embeddings, int64_t batch);
// Returns one factor for the output and the gradients of query, key and value (M, appendix B, "attention").
double attention(int64_t seq_len, int64_t head_size, double mult, double dropout_p, bool is_causal);
// Returns the factor of the logits' gradient of a summed cross entropy over `classes`.
double cross_entropy_grad(int64_t classes, double label_smoothing);
// Returns the factor of both gradients of a summed squared error.
double mse_grad();

// How a window meets its inputs; what padding adds is zero, and values near a border are used less often.
struct Taps {
  int64_t examples = 1, inputs = 1, outputs = 1, kernel = 1;  // positions and kernel sizes, all dimensions multiplied
  int64_t pairs = 1;                                          // (output position, kernel position) that meet an input
};
// One dimension's part of Taps, to be multiplied in.
void count_taps(Taps& taps, int64_t length, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation);

// [output, grad_input, grad_weight] of a convolution of any rank, borders counted.
Scales convolution_nd(int64_t out_channels, int64_t in_channels_per_group, int64_t groups, const Taps& taps,
                      const std::vector<double>& power);
// weight sizes are (in, out / groups, kernel ...); taps: of the convolution from the output's positions to the input's.
Scales transposed_convolution(int64_t in_channels, int64_t out_channels_per_group, int64_t groups, const Taps& taps,
                              const std::vector<double>& power);
// [output, grad_input]. An average of k values; the largest of k (a gradient goes to one input of each window).
Scales average_pool(const Taps& taps);
Scales max_pool(const Taps& taps);

// The two weights of a residual layer: tau and 1 over sqrt(1 + tau^2) (M, section 2.3). Throws Error(InvalidArgument)
// where that root is not finite.
struct Residual {
  double residual, skip;
};
Residual residual(double tau);

// tau of residual branch `index` of `layers` in a transformer whose branches alternate attention and MLP, so that all
// attention branches together, all MLP branches together and the embedding contribute as asked (M, appendix G).
using ResidualScalingFn = std::function<double(int64_t index, int64_t layers)>;
ResidualScalingFn transformer_residual_scaling_rule(double residual_mult = 1.0, double residual_attn_ratio = 1.0);

}  // namespace plumb::rules

namespace plumb {

// A unit-scaled function of each element. A row of the table in rules.cpp is all that one needs: the operator, what
// unit_scale() replaces by it and fold()'s way back follow from the row.
struct ElementwiseFunction {
  std::string_view name;               // "tanh": of aten::tanh(mult * x), which plumb::tanh scales
  rules::Scales (*rule)(double mult);  // [output, grad_input] for mult > 0
  at::Tensor (*torch)(const at::Tensor&) =
      nullptr;           // the operator is torch's between factors; null: it has its own kernels
  bool divided = false;  // plumb's is aten's of mult * x, over mult
};

std::span<const ElementwiseFunction> elementwise_functions();

// Finds a row by its name without or with "plumb::". Null if there is none.
const ElementwiseFunction* try_find_elementwise(std::string_view name);
// Throws Error(UnknownName) if there is none.
const ElementwiseFunction& find_elementwise(std::string_view name);

}  // namespace plumb
