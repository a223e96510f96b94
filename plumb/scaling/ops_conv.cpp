// conv1d, conv2d, conv3d. A convolution has no alpha: the factors go to the weight, which is small.
#include <torch/library.h>

#include "plumb/core/error.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;

template <size_t N>
struct Geometry {
  std::array<int64_t, N> stride, padding, dilation;
  int64_t groups;
};

template <size_t N>
std::array<int64_t, N> spread(const char* what, at::IntArrayRef values) {
  std::array<int64_t, N> all{};
  if (values.size() != 1 && values.size() != N) {
    throw Error(ErrorKind::InvalidArgument, "conv" + std::to_string(N) + "d: " + what + " needs 1 or " +
                                                std::to_string(N) + " values, not " + std::to_string(values.size()) +
                                                ".");
  }
  for (size_t i = 0; i < N; ++i) all[i] = values[values.size() == 1 ? 0 : i];
  return all;
}

template <size_t N>
Geometry<N> geometry(at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  Geometry<N> g{spread<N>("stride", stride), spread<N>("padding", padding), spread<N>("dilation", dilation), groups};
  for (size_t i = 0; i < N; ++i) {
    constexpr int64_t kMost = int64_t{1} << 24;  // beyond it the arithmetic of sizes may overflow
    const auto fits = [](int64_t value, int64_t least) { return value >= least && value <= kMost; };
    if (!fits(g.stride[i], 1) || !fits(g.dilation[i], 1) || !fits(g.padding[i], 0) || !fits(groups, 1)) {
      throw Error(ErrorKind::InvalidArgument, "conv" + std::to_string(N) +
                                                  "d: stride, dilation and groups are positive, padding is not "
                                                  "negative, none is beyond 2^24.");
    }
  }
  return g;
}

template <size_t N>
std::vector<double> conv_rule(const Tensor& input, const Tensor& weight, const Geometry<N>& g,
                              at::ArrayRef<double> scale_power) {
  const std::string op = "conv" + std::to_string(N) + "d";
  const auto dims = static_cast<int64_t>(N);
  if (weight.dim() != dims + 2 || (input.dim() != dims + 2 && input.dim() != dims + 1) ||
      input.size(-dims - 1) != weight.size(1) * g.groups) {
    bad_shape(op.c_str(), "input " + shape_text(input) + " does not fit weight " + shape_text(weight) + " with " +
                              std::to_string(g.groups) + " groups; weight is (out, in / groups, kernel).");
  }
  const int64_t examples = input.dim() == dims + 2 ? input.size(0) : 1;
  rules::Taps taps;
  for (size_t i = 0; i < N; ++i) {
    const auto d = static_cast<int64_t>(i);
    rules::count_taps(taps, input.size(d - dims), weight.size(2 + d), g.stride[i], g.padding[i], g.dilation[i]);
  }
  if (taps.outputs == 0) bad_shape(op.c_str(), "the kernel is larger than the padded input.");
  if constexpr (N == 1) {
    return rules::convolution(weight.size(0), weight.size(1), taps.kernel, g.stride[0], g.groups,
                              examples * taps.outputs, scale_power.vec());
  }
  taps.examples = examples;
  return rules::convolution_nd(weight.size(0), weight.size(1), g.groups, taps, scale_power.vec());
}

at::MemoryFormat conv_format(const Tensor& input, const Tensor& weight) {
  const auto format = input.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  if (input.dim() < 4) return at::MemoryFormat::Contiguous;
  return input.suggest_memory_format() == format || weight.suggest_memory_format() == format
             ? format
             : at::MemoryFormat::Contiguous;
}

template <size_t N>
Tensor conv(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
            at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, OptionalName constraint,
            at::ArrayRef<double> scale_power, OptionalScales scales) {
  const auto g = geometry<N>(stride, padding, dilation, groups);
  const double s = choose_scales("conv", scales, constraint, 2, conv_rule<N>(input, weight, g, scale_power))[0];
  const bool single = input.dim() == static_cast<int64_t>(N) + 1;
  auto x = single ? input.unsqueeze(0) : input;
  const OptionalTensor b = present(bias) ? OptionalTensor(*bias * s) : std::nullopt;
  auto out = at::convolution(x, weight * s, b, g.stride, g.padding, g.dilation, /*transposed=*/false,
                             std::vector<int64_t>(N, 0), groups)
                 .contiguous(conv_format(x, weight));
  return single ? out.squeeze(0) : out;
}

template <size_t N>
std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                 at::IntArrayRef stride, at::IntArrayRef padding,
                                                 at::IntArrayRef dilation, int64_t groups, OptionalName constraint,
                                                 at::ArrayRef<double> scale_power, OptionalScales scales,
                                                 std::array<bool, 3> mask) {
  const auto g = geometry<N>(stride, padding, dilation, groups);
  const auto s = choose_scales("conv", scales, constraint, 2, conv_rule<N>(input, weight, g, scale_power));
  auto expected = input.sizes().vec();
  for (size_t i = 0; i < N; ++i) {
    int64_t& size = expected[expected.size() - N + i];
    size =
        (size + 2 * g.padding[i] - (weight.size(2 + static_cast<int64_t>(i)) - 1) * g.dilation[i] - 1) / g.stride[i] +
        1;
  }
  expected[expected.size() - N - 1] = weight.size(0);
  check_gradient("conv", grad, expected);
  const bool single = input.dim() == static_cast<int64_t>(N) + 1;
  auto x = single ? input.unsqueeze(0) : input;
  auto gy = single ? grad.unsqueeze(0) : grad;
  const std::vector<int64_t> bias_sizes{weight.size(0)};
  auto [grad_input, grad_weight, grad_bias] =
      at::convolution_backward(gy, x, mask[0] ? weight * s[1] : weight, bias_sizes, g.stride, g.padding, g.dilation,
                               /*transposed=*/false, std::vector<int64_t>(N, 0), groups, mask);
  const auto format = conv_format(x, weight);
  if (mask[0]) grad_input = grad_input.contiguous(format);
  if (mask[0] && single) grad_input = grad_input.squeeze(0);
  if (mask[1]) grad_weight = scaled(grad_weight.contiguous(format), s[2]);
  if (mask[2]) grad_bias = scaled(grad_bias, s[2]);
  return {grad_input, grad_weight, grad_bias};
}

template <size_t N>
Tensor conv_meta(const Tensor& input, const Tensor& weight, const OptionalTensor&, at::IntArrayRef stride,
                 at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups, OptionalName, at::ArrayRef<double>,
                 OptionalScales) {
  const auto g = geometry<N>(stride, padding, dilation, groups);
  const auto dims = static_cast<int64_t>(N);
  std::vector<c10::SymInt> sizes;
  if (input.dim() == dims + 2) sizes.push_back(input.sym_size(0));
  sizes.push_back(weight.sym_size(0));
  for (size_t i = 0; i < N; ++i) {
    const auto d = static_cast<int64_t>(i);
    sizes.push_back((input.sym_size(d - dims) + 2 * g.padding[i] - (weight.sym_size(2 + d) - 1) * g.dilation[i] - 1) /
                        g.stride[i] +
                    1);
  }
  const auto format = input.dim() == dims + 2 ? conv_format(input, weight) : at::MemoryFormat::Contiguous;
  return at::empty_symint(sizes, input.options(), format);
}

template <size_t N>
std::tuple<Tensor, Tensor, Tensor> conv_backward_meta(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                      at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, int64_t,
                                                      OptionalName, at::ArrayRef<double>, OptionalScales,
                                                      std::array<bool, 3> mask) {
  const auto format =
      input.dim() == static_cast<int64_t>(N) + 2 ? conv_format(input, weight) : at::MemoryFormat::Contiguous;
  return {mask[0] ? at::empty_symint(input.sym_sizes(), input.options(), format) : Tensor(),
          mask[1] ? at::empty_symint(weight.sym_sizes(), weight.options(), format) : Tensor(),
          mask[2] ? weight.new_empty_symint({weight.sym_size(0)}) : Tensor()};
}

// "valid" pads nothing; "same" keeps the length, one more at the end where the padding is odd.
template <size_t N>
Tensor conv_named_padding(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                          std::string_view padding, at::IntArrayRef dilation, int64_t groups, OptionalName constraint,
                          at::ArrayRef<double> scale_power, OptionalScales scales) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(("plumb::conv" + std::to_string(N) + "d").c_str(), "")
                             .typed<decltype(conv<N>)>();
  auto x = input;
  std::vector<int64_t> before(N, 0);
  if (padding == "same") {
    const auto steps = spread<N>("stride", stride), spacing = spread<N>("dilation", dilation);
    std::vector<int64_t> extra(2 * N, 0);
    bool uneven = false;
    for (size_t i = 0; i < N; ++i) {
      if (steps[i] != 1) {
        throw Error(ErrorKind::InvalidArgument, "conv" + std::to_string(N) + "d: padding 'same' needs a stride of 1.");
      }
      const int64_t total = spacing[i] * (weight.size(2 + static_cast<int64_t>(i)) - 1);
      before[i] = total / 2;
      extra[2 * (N - 1 - i) + 1] = total % 2;
      uneven |= total % 2 != 0;
    }
    if (uneven) x = at::constant_pad_nd(input, extra);
  } else if (padding != "valid") {
    throw Error(ErrorKind::InvalidArgument, "conv" + std::to_string(N) + "d: padding '" + std::string(padding) +
                                                "' is neither 'valid' nor 'same'.");
  }
  return op.call(x, weight, bias, stride, before, dilation, groups, constraint, scale_power, scales);
}

template <size_t N>
std::vector<double> conv_scales(const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
                                at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                                at::ArrayRef<double> scale_power) {
  return conv_rule<N>(input, weight, geometry<N>(stride, padding, dilation, groups), scale_power);
}

template <size_t N>
void define_conv(torch::Library& m) {
  const std::string n = std::to_string(N), list = "int[" + n + "] ", name = "conv" + n + "d";
  const std::string tail =
      "int groups=1, *, str? constraint=\"to_output_scale\", float[] scale_power=[0.5, 0.5, 0.5], "
      "float[]? scales=None) -> Tensor";
  define(m,
         name + "(Tensor input, Tensor weight, Tensor? bias=None, " + list + "stride=1, " + list + "padding=0, " +
             list + "dilation=1, " + tail,
         conv<N>, conv_meta<N>, differentiable());
  define_composite(m,
                   name + ".padding(Tensor input, Tensor weight, Tensor? bias=None, " + list +
                       "stride=1, str padding=\"valid\", " + list + "dilation=1, " + tail,
                   conv_named_padding<N>);
  define(m,
         name + "_backward(Tensor grad, Tensor input, Tensor weight, " + list + "stride, " + list + "padding, " + list +
             "dilation, int groups, str? constraint, float[] scale_power, float[]? scales, bool[3] mask) -> "
             "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
         conv_backward<N>, conv_backward_meta<N>, differentiable_backward());
  define(m,
         name + "_scales(Tensor input, Tensor weight, " + list + "stride=1, " + list + "padding=0, " + list +
             "dilation=1, int groups=1, *, float[] scale_power=[0.5, 0.5, 0.5]) -> float[]",
         conv_scales<N>);
}

}  // namespace

const RegisterOperators ops_conv_rows{
    {"plumb::", "conv1d", {.contraction = Contraction::convolution(1)}},
    {"plumb::", "conv2d", {.contraction = Contraction::convolution(2)}},
    {"plumb::", "conv3d", {.contraction = Contraction::convolution(3)}},
    {"plumb::", "conv1d_scales conv2d_scales conv3d_scales"},
    {"plumb::", "conv1d_backward conv2d_backward conv3d_backward", {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define_conv<1>(m);
  define_conv<2>(m);
  define_conv<3>(m);
}

}  // namespace plumb
