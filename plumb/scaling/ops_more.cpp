// relu, functions of each element (rules.h), pooling, transposed convolutions, group_norm, batch_norm: torch's
// operators between scale factors. They dissolve into those when a program is decomposed; each rule is derived in
// rules.h.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/tangent.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- rescale: x * forward, whose gradient is g * backward

Tensor rescale(const Tensor& input, double forward, double) { return at::mul(input, forward); }

struct Rescale : torch::autograd::Function<Rescale> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, double forward, double backward) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["backward"] = backward;
    return call_operator<"rescale">(input, forward, backward);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {grads[0].defined() ? grads[0] * ctx->saved_data["backward"].toDouble() : Tensor(), Tensor(), Tensor()};
  }
};

Tensor rescale_autograd(const Tensor& input, double forward, double backward) {
  require_plain_autograd("plumb::rescale", input);
  return Rescale::apply(input, forward, backward);
}

Tensor rescaled(const Tensor& input, const std::vector<double>& scales) {
  return call_operator<"rescale">(input, scales[0], scales[1]);
}
OptionalTensor gradient_scaled(const OptionalTensor& parameter, double s) {
  return present(parameter) ? OptionalTensor(call_operator<"rescale">(*parameter, 1.0, s)) : std::nullopt;
}

// ---- activations

Tensor relu(const Tensor& input, OptionalName constraint, OptionalScales scales) {
  return rescaled(at::relu(input), choose_scales("relu", scales, constraint, 2, rules::relu()));
}

// ---- geometry of windows over the last n dimensions

int64_t one_of(at::IntArrayRef values, size_t i, int64_t otherwise) {
  if (values.empty()) return otherwise;
  return values[values.size() == 1 ? 0 : i];
}

constexpr int64_t kMost = int64_t{1} << 24;  // beyond it the arithmetic of sizes may overflow

void check_windows(const char* op, size_t n, const char* what, at::IntArrayRef values, int64_t least) {
  const bool fits = std::all_of(values.begin(), values.end(), [&](int64_t v) { return v >= least && v <= kMost; });
  if (fits && (values.size() <= 1 || values.size() == n)) return;
  throw Error(ErrorKind::InvalidArgument, std::string(op) + ": " + what + " is 1 or " + std::to_string(n) +
                                              " numbers of at least " + std::to_string(least) + ".");
}

rules::Taps window_taps(const Tensor& input, size_t n, at::IntArrayRef kernel, at::IntArrayRef stride,
                        at::IntArrayRef padding, at::IntArrayRef dilation) {
  check_windows("pooling", n, "the kernel", kernel, 1);
  check_windows("pooling", n, "the stride", stride, 1);
  check_windows("pooling", n, "the padding", padding, 0);
  check_windows("pooling", n, "the dilation", dilation, 1);
  rules::Taps taps;
  for (size_t i = 0; i < n; ++i) {
    const int64_t size = one_of(kernel, i, 1), step = one_of(stride, i, size);
    if (size < 1 || step < 1 || input.dim() <= static_cast<int64_t>(n)) {
      throw Error(ErrorKind::InvalidArgument, "pooling: kernel and stride are positive, and input " +
                                                  shape_text(input) + " has channels before " + std::to_string(n) +
                                                  " dimensions of positions.");
    }
    const auto d = static_cast<int64_t>(i) - static_cast<int64_t>(n);
    const int64_t pad = one_of(padding, i, 0);
    rules::count_taps(taps, input.size(d), size, step, pad, one_of(dilation, i, 1));
  }
  return taps;
}

template <size_t N>
Tensor avg_pool(const Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                bool ceil_mode, bool count_include_pad, OptionalName constraint, OptionalScales scales) {
  const auto taps = window_taps(input, N, kernel_size, stride, padding, {});
  Tensor out;
  if constexpr (N == 1) out = at::avg_pool1d(input, kernel_size, stride, padding, ceil_mode, count_include_pad);
  if constexpr (N == 2) out = at::avg_pool2d(input, kernel_size, stride, padding, ceil_mode, count_include_pad);
  if constexpr (N == 3) out = at::avg_pool3d(input, kernel_size, stride, padding, ceil_mode, count_include_pad);
  return rescaled(out, choose_scales("avg_pool", scales, constraint, 2, rules::average_pool(taps)));
}

template <size_t N>
Tensor max_pool(const Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
                at::IntArrayRef dilation, bool ceil_mode, OptionalName constraint, OptionalScales scales) {
  const auto taps = window_taps(input, N, kernel_size, stride, padding, dilation);
  Tensor out;
  if constexpr (N == 1) out = at::max_pool1d(input, kernel_size, stride, padding, dilation, ceil_mode);
  if constexpr (N == 2) out = at::max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode);
  if constexpr (N == 3) out = at::max_pool3d(input, kernel_size, stride, padding, dilation, ceil_mode);
  return rescaled(out, choose_scales("max_pool", scales, constraint, 2, rules::max_pool(taps)));
}

// ---- transposed convolutions: weight (in, out / groups, kernel...)

template <size_t N>
Tensor conv_transpose(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef output_padding, int64_t groups, at::IntArrayRef dilation,
                      OptionalName constraint, at::ArrayRef<double> scale_power, OptionalScales scales) {
  const auto n = static_cast<int64_t>(N);
  const std::string op = "conv_transpose" + std::to_string(N) + "d";
  if (weight.dim() != n + 2 || (input.dim() != n + 2 && input.dim() != n + 1) || groups < 1 ||
      input.size(-n - 1) != weight.size(0)) {
    bad_shape(op.c_str(), "input " + shape_text(input) + " does not fit weight " + shape_text(weight) +
                              "; weight is (in, out / groups, kernel).");
  }
  check_windows(op.c_str(), N, "the stride", stride, 1);
  check_windows(op.c_str(), N, "the padding", padding, 0);
  check_windows(op.c_str(), N, "the output padding", output_padding, 0);
  check_windows(op.c_str(), N, "the dilation", dilation, 1);
  rules::Taps taps;
  taps.examples = input.dim() == n + 2 ? input.size(0) : 1;
  // Counted as the convolution whose gradient this is: from the output's positions to the input's.
  for (size_t i = 0; i < N; ++i) {
    const auto d = static_cast<int64_t>(i);
    const int64_t step = one_of(stride, i, 1), pad = one_of(padding, i, 0), spacing = one_of(dilation, i, 1);
    const int64_t length = (input.size(d - n) - 1) * step - 2 * pad + spacing * (weight.size(2 + d) - 1) +
                           one_of(output_padding, i, 0) + 1;
    rules::count_taps(taps, length, weight.size(2 + d), step, pad, spacing);
  }
  const auto rule = rules::transposed_convolution(weight.size(0), weight.size(1), groups, taps, scale_power.vec());
  const auto s = choose_scales(op.c_str(), scales, constraint, 2, rule);
  auto x = call_operator<"rescale">(input, 1.0, s[1]);
  auto w = call_operator<"rescale">(weight, 1.0, s[2]);
  // A bias's gradient sums over the output's positions, of which a stride makes more than the input has.
  const int64_t positions = std::max<int64_t>(taps.examples * taps.inputs, 1);
  const auto b = gradient_scaled(bias, scales ? s[2] : 1 / std::pow(static_cast<double>(positions), scale_power[2]));
  Tensor out;
  if constexpr (N == 1) out = at::conv_transpose1d(x, w, b, stride, padding, output_padding, groups, dilation);
  if constexpr (N == 2) out = at::conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation);
  if constexpr (N == 3) out = at::conv_transpose3d(x, w, b, stride, padding, output_padding, groups, dilation);
  return call_operator<"rescale">(out, s[0], 1.0);
}

// ---- norms over channels: a weight's gradient sums over everything but the channels

double channel_scale(const char* op, const Tensor& input) {
  if (input.dim() < 2) bad_shape(op, "input " + shape_text(input) + " has no channels.");
  return rules::norm_grad_weight(input.size(1), input.numel());
}

Tensor group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps, bool cudnn_enabled) {
  const double s = channel_scale("group_norm", input);
  // torch counts to num_groups where there are no channels.
  if (num_groups < 1 || num_groups > std::max<int64_t>(input.size(1), 1)) {
    bad_shape("group_norm", "there are " + std::to_string(num_groups) + " groups for " + std::to_string(input.size(1)) +
                                " channels.");
  }
  return at::group_norm(input, num_groups, gradient_scaled(weight, s), gradient_scaled(bias, s), eps, cudnn_enabled);
}

Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training, double momentum,
                  double eps, bool cudnn_enabled) {
  const double s = channel_scale("batch_norm", input);
  return at::batch_norm(input, gradient_scaled(weight, s), gradient_scaled(bias, s), running_mean, running_var,
                        training, momentum, eps, cudnn_enabled);
}

template <size_t N>
void define_windows(torch::Library& m) {
  const std::string n = std::to_string(N), list = "int[" + n + "] ";
  const std::string tail = "str? constraint=\"to_output_scale\", ";
  define_composite(m,
                   "avg_pool" + n + "d(Tensor input, " + list + "kernel_size, " + list + "stride=[], " + list +
                       "padding=0, bool ceil_mode=False, bool count_include_pad=True, *, " + tail +
                       "float[]? scales=None) -> Tensor",
                   avg_pool<N>);
  define_composite(m,
                   "max_pool" + n + "d(Tensor input, " + list + "kernel_size, " + list + "stride=[], " + list +
                       "padding=0, " + list + "dilation=1, bool ceil_mode=False, *, " + tail +
                       "float[]? scales=None) -> Tensor",
                   max_pool<N>);
  define_composite(m,
                   "conv_transpose" + n + "d(Tensor input, Tensor weight, Tensor? bias=None, " + list + "stride=1, " +
                       list + "padding=0, " + list + "output_padding=0, int groups=1, " + list + "dilation=1, *, " +
                       tail + "float[] scale_power=[0.5, 0.5, 0.5], float[]? scales=None) -> Tensor",
                   conv_transpose<N>);
}

}  // namespace

const RegisterOperators ops_more_rows{
    {"plumb::",
     "rescale relu elementwise_scales avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d group_norm"},
    {"plumb::", "batch_norm", {.writes = {"running_mean", "running_var"}, .writes_if = "training"}},
    {"plumb::", "conv_transpose1d", {.contraction = Contraction::transposed_convolution(1)}},
    {"plumb::", "conv_transpose2d", {.contraction = Contraction::transposed_convolution(2)}},
    {"plumb::", "conv_transpose3d", {.contraction = Contraction::transposed_convolution(3)}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  const std::string tail = "str? constraint=\"to_output_scale\", float[]? scales=None) -> Tensor";
  define(m, "rescale(Tensor input, float forward, float backward) -> Tensor", rescale, rescale, rescale_autograd);
  define_composite(m, "relu(Tensor input, *, " + tail, relu);
  for (const ElementwiseFunction& function : elementwise_functions()) {
    if (!function.torch) continue;
    define_composite(m, std::string(function.name) + "(Tensor input, *, float mult=1.0, " + tail,
                     [function](const Tensor& input, double mult, OptionalName constraint, OptionalScales scales) {
                       const std::string name(function.name);
                       return rescaled(function.torch(mult == 1 ? input : input * mult),
                                       choose_scales(name.c_str(), scales, constraint, 2, function.rule(mult)));
                     });
  }
  m.def("elementwise_scales(str name, float mult) -> float[]",
        [](std::string_view name, double mult) { return find_elementwise(name).rule(mult); });
  define_windows<1>(m);
  define_windows<2>(m);
  define_windows<3>(m);
  define_composite(m,
                   "group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
                   "bool cudnn_enabled=True) -> Tensor",
                   group_norm);
  define_composite(m,
                   "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
                   "bool training, float momentum, float eps, bool cudnn_enabled=True) -> Tensor",
                   batch_norm);
}

}  // namespace plumb
