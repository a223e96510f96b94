#include "plumb/numerics/metrics.h"

#include <algorithm>
#include <cmath>

#include "plumb/core/error.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/element.h"
#include "plumb/numerics/metrics_gather.h"

namespace plumb {
namespace {

constexpr int kBias = 127;

void measure_dense(const at::Tensor& x, kernel::Partial& into, const MetricsOptions& options) {
  const auto carrier = carrier_of(x.scalar_type(), "measure");
  const char* data = static_cast<const char*>(x.const_data_ptr());
  const size_t size = x.element_size();
  const auto run = kernel::kernels().measure[carrier];
  const int64_t numel = x.numel();
  if (numel <= MetricsGatherer::kPiece && carrier != kernel::kFloat64) {
    if (numel > 0) run(data, numel, into);
    return;
  }
  MetricsGatherer gatherer(numel, options);
  MetricsGatherer::for_pieces(numel, [&](int64_t piece, int64_t begin, int64_t end) {
    run(data + begin * size, end - begin, gatherer.piece(piece));
    gatherer.measured(piece, data + begin * size, end - begin, carrier);
  });
  merge_in_units(into, gatherer.merged());
}

bool is_carrier(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

// Other strides and dtypes go through a copy, a piece at a time.
void measure_any(const at::Tensor& x, kernel::Partial& into, const MetricsOptions& options) {
  if (x.numel() == 0) return;
  if (is_carrier(x.scalar_type()) && !x.is_neg() && is_dense(x)) {
    measure_dense(x, into, options);
    return;
  }
  if (x.numel() > MetricsGatherer::kPiece) {
    int64_t longest = 0;
    for (int64_t d = 1; d < x.dim(); ++d)
      if (x.size(d) > x.size(longest)) longest = d;
    if (int64_t half = x.size(longest) / 2; half > 0) {
      measure_any(x.narrow(longest, 0, half), into, options);
      measure_any(x.narrow(longest, half, x.size(longest) - half), into, options);
      return;
    }
  }
  const bool small_float = at::isFloatingType(x.scalar_type()) && !is_carrier(x.scalar_type());
  at::Tensor copy = x.to(is_carrier(x.scalar_type()) ? x.scalar_type()
                         : small_float               ? at::kFloat
                                                     : at::kDouble,
                         /*non_blocking=*/false, /*copy=*/false)
                        .resolve_neg()
                        .contiguous();
  measure_dense(copy, into, options);
}

// Values spread evenly over [2^e, 2^(e+1)): the share above (or below) a limit.
double share_above(int e, double limit) {
  double low = std::ldexp(1.0, e);
  return std::min(1.0, std::max(0.0, (2 * low - limit) / low));
}

const ExponentHistogram& need_histogram(const TensorMetrics& metrics) {
  if (!metrics.histogram)
    throw Error(ErrorKind::InvalidState, "these metrics have no exponent histogram", "",
                "measure with MetricsOptions{.histogram = true}");
  return *metrics.histogram;
}

template <class Weight>
double weighted_share(const TensorMetrics& metrics, const Weight& weight) {
  const auto& counts = need_histogram(metrics).counts;
  if (metrics.numel == 0) return 0;
  double sum = double(counts[0] - metrics.zero_count) * weight(-kBias);
  for (int bin = 1; bin < 255; ++bin)
    if (counts[bin]) sum += double(counts[bin]) * weight(bin - kBias);
  return sum / double(metrics.numel);
}

// Returns the factor of a format's elements: if blocks share scales, as if the whole tensor were one block.
double element_scale(const TensorMetrics& metrics, const FPFormat& format) {
  if (!format.has_blocks() || !(metrics.abs_max > 0) || !std::isfinite(metrics.abs_max)) return 1;
  if (format.block_scale == BlockScale::E4M3) return metrics.abs_max / format.max_absolute_value();
  return std::ldexp(1.0, std::ilogb(metrics.abs_max) - format.max_exponent());
}

// Values in [2^e, 2^(e+1)) that become zero.
double becomes_zero(const FPFormat& format, double scale, int e) {
  double smallest = format.min_absolute_subnormal() * scale, low = std::ldexp(1.0, e);
  switch (format.rounding) {
    case Rounding::Nearest: return 1 - share_above(e, smallest / 2);
    case Rounding::TowardZero: return 1 - share_above(e, smallest);
    case Rounding::Stochastic: return std::max(0.0, 1 - 1.5 * low / smallest);
  }
  return 0;
}

void change_unit(kernel::Partial& p, double from, double to) {
  const double factor = from / to;
  p.mean *= factor, p.m2 = p.m2 * factor * factor, p.sum_abs *= factor;
}

}  // namespace

void measure_in_unit(const double* x, int64_t n, kernel::Partial& p) {
  const double factor = 1 / unit_of(p.abs_max);
  if (factor == 1) return;
  kernel::Partial sums;
  std::array<double, 4096> scaled;
  for (int64_t i = 0; i < n; i += int64_t(scaled.size())) {
    const int64_t m = std::min(n - i, int64_t(scaled.size()));
    for (int64_t j = 0; j < m; ++j) scaled[size_t(j)] = x[i + j] * factor;
    kernel::kernels().measure[kernel::kFloat64](scaled.data(), m, sums);
  }
  p.mean = sums.mean, p.m2 = sums.m2, p.sum_abs = sums.sum_abs;
}

void merge_in_units(kernel::Partial& into, kernel::Partial from) {
  const double unit = unit_of(std::max(into.abs_max, from.abs_max));
  change_unit(into, unit_of(into.abs_max), unit);
  change_unit(from, unit_of(from.abs_max), unit);
  merge(into, from);
}

TensorMetrics finish_metrics(const kernel::Partial& p, int64_t numel) {
  TensorMetrics m;
  m.numel = numel;
  m.nan_count = p.nans;
  m.inf_count = p.positive_infinities + p.negative_infinities;
  m.zero_count = p.zeros;
  const auto [mean_abs, abs_mean, std, abs_max, abs_min] = kernel::finish(p, numel);
  const double unit = unit_of(p.abs_max);
  m.mean_abs = mean_abs * unit, m.abs_mean = abs_mean * unit, m.std = std * unit;
  m.abs_max = abs_max, m.abs_min = abs_min;
  if (p.histogram) {
    m.histogram.emplace();
    for (int i = 0; i < kernel::kHistogramBins; ++i) m.histogram->counts[i] = int64_t(p.histogram[i]);
  }
  return m;
}

double TensorMetrics::underflow_share(const FPFormat& format) const {
  const double scale = element_scale(*this, format);
  return weighted_share(*this, [&](int e) { return becomes_zero(format, scale, e); });
}

double TensorMetrics::subnormal_share(const FPFormat& format) const {
  const double scale = element_scale(*this, format), least = format.min_absolute_normal() * scale;
  return weighted_share(
      *this, [&](int e) { return std::max(0.0, 1 - share_above(e, least) - becomes_zero(format, scale, e)); });
}

double TensorMetrics::overflow_share(const FPFormat& format) const {
  double limit = format.max_absolute_value();
  if (format.rounding == Rounding::Nearest) limit += std::ldexp(0.5, format.max_exponent() - format.mantissa_bits);
  need_histogram(*this);
  if (format.has_blocks() || abs_max <= limit) return 0;  // shared scales follow the largest value
  return weighted_share(*this, [&](int e) { return share_above(e, limit); });
}

void check_measurable(const at::Tensor& x) {
  check_tensor(x, "measure");
  if (x.is_complex())
    throw Error(ErrorKind::TensorMismatch, "measure does not take complex tensors", "",
                "measure at::view_as_real(x), or x.abs()");
}

struct MetricsSum::State {
  MetricsOptions options;
  int64_t numel = 0;
  kernel::Partial partial;
  std::array<uint64_t, kernel::kHistogramBins> counts{};
  std::vector<at::Tensor> on_devices;  // gathered there, and not asked for yet
};

MetricsSum::MetricsSum(const MetricsOptions& options) : state_(std::make_unique<State>()) {
  state_->options = options;
  if (options.histogram) state_->partial.histogram = state_->counts.data();
}
MetricsSum::~MetricsSum() = default;
MetricsSum::MetricsSum(MetricsSum&&) noexcept = default;
MetricsSum& MetricsSum::operator=(MetricsSum&&) noexcept = default;

void MetricsSum::add(const at::Tensor& given) {
  at::NoGradGuard no_grad;
  if (given.defined() && given.is_sparse()) {
    const at::Tensor values = given.coalesce().values();
    add(values);
    add_zeros(given.numel() - values.numel());
    return;
  }
  check_measurable(given);
  const at::Tensor x = given._is_zerotensor() ? given.clone() : given;  // torch's zero tensors have no memory
  if (x.is_cpu())
    measure_any(x, state_->partial, state_->options);
  else
    state_->on_devices.push_back(aten_kernels::gather_metrics(x, state_->options.histogram));
  state_->numel += x.numel();
}

void MetricsSum::add_zeros(int64_t count) {
  if (!count) return;
  kernel::Partial zeros;
  zeros.count = double(count), zeros.zeros = count, zeros.abs_min = 0;
  merge_in_units(state_->partial, zeros);
  if (state_->options.histogram) state_->counts[0] += static_cast<uint64_t>(count);
  state_->numel += count;
}

void MetricsSum::add(const MetricsSum& other) {
  State& mine = *state_;
  if (!other.state_->options.histogram) mine.partial.histogram = nullptr, mine.options.histogram = false;
  merge_in_units(mine.partial, other.state_->partial);
  mine.on_devices.insert(mine.on_devices.end(), other.state_->on_devices.begin(), other.state_->on_devices.end());
  mine.numel += other.state_->numel;
}

TensorMetrics MetricsSum::metrics() const {
  if (state_->on_devices.empty()) return finish_metrics(state_->partial, state_->numel);
  kernel::Partial all = state_->partial;
  auto counts = state_->counts;
  if (all.histogram) all.histogram = counts.data();
  for (const at::Tensor& gathered : state_->on_devices) aten_kernels::merge_gathered(all, gathered.cpu());
  return finish_metrics(all, state_->numel);
}

TensorMetrics measure(const at::Tensor& x, const MetricsOptions& options) {
  MetricsSum one(options);
  one.add(x);
  return one.metrics();
}

}  // namespace plumb
