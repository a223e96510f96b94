#include "plumb/numerics/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/define_operator.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/tangent.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {

const FPFormat& cached_format(std::string_view text) {
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  static std::shared_mutex mutex;
  static std::unordered_map<std::string, FPFormat, Hash, std::equal_to<>> formats;
  {
    std::shared_lock lock(mutex);
    if (auto it = formats.find(text); it != formats.end()) return it->second;
  }
  FPFormat format = FPFormat::parse(text);
  std::unique_lock lock(mutex);
  return formats.emplace(std::string(text), format).first->second;
}

TensorMetrics metrics_of_tensor(const at::Tensor& values) {
  constexpr int64_t fields = 9, with_histogram = fields + 256;
  if (values.dim() != 1 || values.scalar_type() != at::kDouble ||
      (values.numel() != fields && values.numel() != with_histogram))
    throw Error(ErrorKind::TensorMismatch, "this tensor was not written by plumb::tensor_metrics", "",
                "give its float64 result of 9 or 265 values");
  const at::Tensor flat = values.cpu().contiguous();
  const double* v = flat.const_data_ptr<double>();
  TensorMetrics m;
  m.mean_abs = v[0], m.abs_mean = v[1], m.std = v[2], m.abs_max = v[3], m.abs_min = v[4];
  m.numel = int64_t(v[5]), m.nan_count = int64_t(v[6]), m.inf_count = int64_t(v[7]), m.zero_count = int64_t(v[8]);
  if (values.numel() == with_histogram) {
    m.histogram.emplace();
    for (int i = 0; i < 256; ++i) m.histogram->counts[i] = int64_t(v[fields + i]);
  }
  return m;
}

namespace {

FPFormat chosen_format(std::string_view format, std::string_view rounding, int64_t srbits) {
  const FPFormat& named = cached_format(format);
  if (rounding.empty() && srbits == 0) return named;
  const Rounding chosen = rounding.empty() ? named.rounding : parse_rounding(rounding);
  const int kept = chosen == named.rounding ? named.srbits : 0;
  return named.with_rounding(chosen, srbits != 0 ? int(srbits) : kept);
}

// --- any device

at::Tensor quantise_kernel(const at::Tensor& x, std::string_view format, std::string_view rounding, int64_t srbits,
                           std::optional<int64_t> seed, int64_t dim) {
  return quantise(x, chosen_format(format, rounding, srbits), as_seed(seed), dim);
}

at::Tensor encode_kernel(const at::Tensor& x, std::string_view format, std::optional<int64_t> seed) {
  return encode(x, cached_format(format), as_seed(seed));
}

at::Tensor decode_kernel(const at::Tensor& codes, std::string_view format, at::ScalarType dtype) {
  return decode(codes, cached_format(format), dtype);
}

at::Tensor tensor_metrics_kernel(const at::Tensor& x, bool histogram) {
  check_measurable(x);
  if (!x.is_cpu()) {
    at::NoGradGuard no_grad;
    return aten_kernels::tensor_metrics(x, histogram);
  }
  const TensorMetrics m = measure(x, {histogram});
  at::Tensor values = at::empty({histogram ? 265 : 9}, at::kDouble);
  double* v = values.mutable_data_ptr<double>();
  v[0] = m.mean_abs, v[1] = m.abs_mean, v[2] = m.std, v[3] = m.abs_max, v[4] = m.abs_min;
  v[5] = double(m.numel), v[6] = double(m.nan_count), v[7] = double(m.inf_count), v[8] = double(m.zero_count);
  if (histogram)
    for (int i = 0; i < 256; ++i) v[9 + i] = double(m.histogram->counts[i]);
  return values;
}

// --- Meta

at::Tensor quantise_meta(const at::Tensor& x, std::string_view format, std::string_view rounding, int64_t srbits,
                         std::optional<int64_t>, int64_t) {
  chosen_format(format, rounding, srbits);
  carrier_of(x.scalar_type(), "quantise");
  return at::empty_like(x);
}

at::Tensor encode_meta(const at::Tensor& x, std::string_view format, std::optional<int64_t>) {
  cached_format(format);
  carrier_of(x.scalar_type(), "encode");
  return at::empty_like(x, x.options().dtype(at::kByte));
}

at::Tensor decode_meta(const at::Tensor& codes, std::string_view format, at::ScalarType dtype) {
  cached_format(format);
  carrier_of(dtype, "decode");
  return at::empty_like(codes, codes.options().dtype(dtype));
}

at::Tensor tensor_metrics_meta(const at::Tensor& x, bool histogram) {
  return at::empty({histogram ? 265 : 9}, x.options().dtype(at::kDouble));
}

// --- Autograd

struct StraightThrough : torch::autograd::Function<StraightThrough> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, std::string format,
                            std::string rounding, int64_t srbits, std::optional<int64_t> seed, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::quantise(x, format, rounding, srbits, seed, dim);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], {}, {}, {}, {}, {}};
  }
};

at::Tensor quantise_autograd(const at::Tensor& x, std::string_view format, std::string_view rounding, int64_t srbits,
                             std::optional<int64_t> seed, int64_t dim) {
  require_plain_autograd("plumb::quantise", x);
  if (at::GradMode::is_enabled() && x.requires_grad())
    return StraightThrough::apply(x, std::string(format), std::string(rounding), srbits, seed, dim);
  at::AutoDispatchBelowADInplaceOrView below;
  return ops::quantise(x, format, rounding, srbits, seed, dim);
}

}  // namespace

namespace ops {

at::Tensor quantise(const at::Tensor& x, std::string_view format, std::string_view rounding, int64_t srbits,
                    std::optional<int64_t> seed, int64_t dim) {
  return call_operator<"quantise">(x, format, rounding, srbits, seed, dim);
}

at::Tensor encode(const at::Tensor& x, std::string_view format, std::optional<int64_t> seed) {
  return call_operator<"encode">(x, format, seed);
}

at::Tensor decode(const at::Tensor& codes, std::string_view format, at::ScalarType dtype) {
  return call_operator<"decode">(codes, format, dtype);
}

at::Tensor tensor_metrics(const at::Tensor& x, bool histogram) { return call_operator<"tensor_metrics">(x, histogram); }

}  // namespace ops

const RegisterOperators numerics_rows{
    {"plumb::", "encode decode tensor_metrics tensor_hash"},
    {"plumb::", "quantise", {.passes_through = true}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  // Random when stochastic and without a seed: torch.compile must neither merge nor replay such calls.
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};
  const std::vector<at::Tag> fixed = {at::Tag::pt2_compliant_tag};
  define(m, "quantise(Tensor x, str format, str rounding=\"\", int srbits=0, int? seed=None, int dim=-1) -> Tensor",
         random, quantise_kernel, quantise_meta, quantise_autograd);
  define(m, "encode(Tensor x, str format, int? seed=None) -> Tensor", random, encode_kernel, encode_meta,
         without_history());
  define(m, "decode(Tensor codes, str format, ScalarType dtype=float) -> Tensor", fixed, decode_kernel, decode_meta,
         without_history());
  define(m, "tensor_metrics(Tensor x, bool histogram=False) -> Tensor", fixed, tensor_metrics_kernel,
         tensor_metrics_meta, without_history());
}

}  // namespace plumb
