// Metrics of aten_kernels.h.
#include <ATen/ATen.h>

#include <vector>

#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/device_kernels.h"
#include "plumb/numerics/metrics_gather.h"

namespace plumb::aten_kernels {
namespace {

using at::Tensor;

// Returns unit_of() of a largest magnitude on its device.
Tensor units_of(const Tensor& abs_max) {
  const Tensor ordinary = at::where(abs_max.lt(kLeastOrdinary).logical_and(abs_max > 0),
                                    at::full_like(abs_max, kSmallUnit), at::ones_like(abs_max));
  return at::where(abs_max.ge(kLeastLarge), at::full_like(abs_max, kLargeUnit), ordinary);
}

Tensor exponent_counts(const Tensor& x) {
  Tensor bin;
  if (at::isFloatingType(x.scalar_type()) && x.scalar_type() != at::kDouble) {
    bin = x.to(at::kFloat).view(at::kInt).bitwise_right_shift(23).bitwise_and(0xff);
  } else {
    const Tensor field = x.to(at::kDouble).view(at::kLong).bitwise_right_shift(52).bitwise_and(0x7ff);
    bin = at::where(field == 0x7ff, at::Scalar(255), (field - 896).clamp(0, 254));  // float's bias for double's
  }
  bin = bin.reshape({-1}).to(at::kLong);
  return at::zeros({kernel::kHistogramBins}, bin.options()).scatter_add_(0, bin, at::ones_like(bin)).to(at::kDouble);
}

}  // namespace

Tensor gather_metrics(const Tensor& x, bool histogram) {
  const auto options = x.options().dtype(at::kDouble).requires_grad(false);
  const int64_t bins = histogram ? kernel::kHistogramBins : 0;
  if (x.numel() == 0) {
    Tensor nothing = at::zeros({kFields + bins}, options);
    nothing.select(0, 5).fill_(kInfinity);
    return nothing;
  }
  if (const auto* own = device_kernels(x, x.scalar_type())) {
    const Tensor gathered = at::empty({kFields + bins}, options);
    if (own->pass({.x = in_memory_order(x), .histogram = histogram, .before = gathered})) return gathered;
  }
  const Tensor v = x.to(at::kDouble), finite = at::isfinite(v), zero = at::zeros({}, options);
  const auto number_of = [](const Tensor& condition) { return condition.sum().to(at::kDouble); };
  const Tensor magnitude = at::where(finite, v.abs(), zero), most = magnitude.max();
  Tensor kept = at::where(finite, v, zero);
  if (x.scalar_type() == at::kDouble) kept = kept * units_of(most).reciprocal();
  const Tensor count = number_of(finite), mean = kept.sum() / count.clamp_min(1);
  const Tensor apart = at::where(finite, kept - mean, zero);
  const Tensor least = at::where(finite, magnitude, at::Scalar(kInfinity)).min();
  Tensor fields = at::stack({count, mean, (apart * apart).sum(), kept.abs().sum(), most, least, number_of(at::isnan(v)),
                             number_of(v == kInfinity), number_of(v == -kInfinity), number_of(v == 0)});
  return histogram ? at::cat({fields, exponent_counts(x)}) : fields;
}

void merge_gathered(kernel::Partial& into, const Tensor& gathered) {
  const double* v = gathered.const_data_ptr<double>();
  uint64_t counts[kernel::kHistogramBins];
  kernel::Partial from;
  from.count = v[0], from.mean = v[1], from.m2 = v[2], from.sum_abs = v[3], from.abs_max = v[4], from.abs_min = v[5];
  from.nans = int64_t(v[6]), from.positive_infinities = int64_t(v[7]), from.negative_infinities = int64_t(v[8]);
  from.zeros = int64_t(v[9]);
  if (gathered.numel() > kFields) {
    for (int i = 0; i < kernel::kHistogramBins; ++i) counts[i] = uint64_t(v[kFields + i]);
    from.histogram = counts;
  }
  merge_in_units(into, from);
}

TensorMetrics metrics_of(const Tensor& gathered, int64_t numel) {
  kernel::Partial all;
  uint64_t counts[kernel::kHistogramBins] = {};
  if (gathered.numel() > kFields) all.histogram = counts;
  merge_gathered(all, gathered.cpu());
  return finish_metrics(all, numel);
}

// finish_metrics() in tensors.
Tensor tensor_metrics(const Tensor& x, bool histogram) {
  if (const auto* own = device_kernels(x, x.scalar_type())) {
    const Tensor metrics = at::empty({histogram ? 265 : 9}, x.options().dtype(at::kDouble).requires_grad(false));
    if (own->pass({.x = in_memory_order(x), .histogram = histogram, .metrics = metrics})) return metrics;
  }
  const Tensor gathered = gather_metrics(x, histogram), p = gathered.narrow(0, 0, kFields);
  const auto n = double(x.numel());
  const auto number = [&](double value) { return at::full({}, value, p.options()); };
  const Tensor nan = number(kNaN), infinity = number(kInfinity), nans = p[6], positive = p[7], negative = p[8];
  const Tensor infinities = positive + negative;
  const Tensor mean_abs = p[3] / n, mean = p[1].abs();
  const Tensor abs_mean = at::where((mean_abs - mean).abs() <= 1e-11 * mean_abs, mean_abs, mean);
  const Tensor std = n > 1 ? (p[2] / (n - 1)).sqrt() : nan;
  const Tensor of_infinities = at::where((positive > 0).logical_and(negative > 0), nan, infinity);
  Tensor means = at::stack({mean_abs, abs_mean, std});
  if (x.scalar_type() == at::kDouble) means = means * units_of(p[4]);
  Tensor values = at::cat({means, p.narrow(0, 4, 2)});
  values = at::where(infinities > 0, at::stack({infinity, of_infinities, nan, infinity, p[5]}), values);
  values = at::where(n == 0 ? at::ones_like(nans).to(at::kBool) : nans > 0, nan, values);
  const Tensor counts = at::stack({number(n), nans, infinities, p[9]});
  std::vector<Tensor> all = {values, counts};
  if (histogram) all.push_back(gathered.narrow(0, kFields, kernel::kHistogramBins));
  return at::cat(all);
}

}  // namespace plumb::aten_kernels
