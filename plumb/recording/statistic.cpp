#include "plumb/recording/statistic.h"

#include <array>

#include "plumb/core/error.h"

namespace plumb {
namespace {

constexpr std::array<std::string_view, 15> kNames = {"mean_abs",   "abs_mean",  "std",       "abs_max",    "abs_min",
                                                     "numel",      "nan_count", "inf_count", "zero_count", "histogram",
                                                     "zero_share", "underflow", "overflow",  "subnormal",  "hash"};

constexpr uint16_t bit(StatisticKind kind) { return static_cast<uint16_t>(1u << static_cast<unsigned>(kind)); }

bool takes_format(StatisticKind kind) { return kind >= StatisticKind::Underflow && kind != StatisticKind::Hash; }

}  // namespace

Statistic Statistic::parse(std::string_view text) {
  const size_t open = text.find('(');
  const std::string_view name = text.substr(0, open);
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name != kNames[i]) continue;
    Statistic out{static_cast<StatisticKind>(i)};
    const bool given = open != std::string_view::npos;
    if (given != takes_format(out.kind) || (given && text.back() != ')')) break;
    if (given) out.format = FPFormat::parse(text.substr(open + 1, text.size() - open - 2));
    return out;
  }
  throw Error(ErrorKind::UnknownName, "\"" + std::string(text) + "\" is no statistic", "",
              "mean_abs, abs_mean, std, abs_max, abs_min, numel, nan_count, inf_count, zero_count, zero_share, "
              "histogram, hash, underflow(FORMAT), overflow(FORMAT) or subnormal(FORMAT), as in underflow(e5m2)");
}

std::string Statistic::to_string() const {
  std::string out(kNames[static_cast<size_t>(kind)]);
  if (format) out += "(" + (format->rounding == Rounding::Nearest ? format->name() : format->to_string()) + ")";
  return out;
}

bool Statistic::needs_histogram() const { return kind == StatisticKind::Histogram || takes_format(kind); }

uint16_t Statistic::bits() const {
  if (kind == StatisticKind::Hash) return kHashBit;
  if (kind == StatisticKind::ZeroShare) return bit(StatisticKind::ZeroCount) | bit(StatisticKind::Numel);
  if (needs_histogram()) {
    // A histogram is there for what a format would do: shares are of all elements, the lowest bin holds zeros too, and
    // what overflows is known exactly from the largest.
    return bit(StatisticKind::Histogram) | bit(StatisticKind::Numel) | bit(StatisticKind::AbsMax) |
           bit(StatisticKind::AbsMin) | bit(StatisticKind::ZeroCount) | bit(StatisticKind::NanCount) |
           bit(StatisticKind::InfCount);
  }
  return bit(kind);
}

double Statistic::of(const TensorMetrics& m) const {
  switch (kind) {
    case StatisticKind::MeanAbs: return m.mean_abs;
    case StatisticKind::AbsMean: return m.abs_mean;
    case StatisticKind::Std: return m.std;
    case StatisticKind::AbsMax: return m.abs_max;
    case StatisticKind::AbsMin: return m.abs_min;
    case StatisticKind::Numel: return static_cast<double>(m.numel);
    case StatisticKind::NanCount: return static_cast<double>(m.nan_count);
    case StatisticKind::InfCount: return static_cast<double>(m.inf_count);
    case StatisticKind::ZeroCount: return static_cast<double>(m.zero_count);
    case StatisticKind::ZeroShare: return m.zero_share();
    case StatisticKind::Underflow: return m.underflow_share(*format);
    case StatisticKind::Overflow: return m.overflow_share(*format);
    case StatisticKind::Subnormal: return m.subnormal_share(*format);
    case StatisticKind::Histogram:
    case StatisticKind::Hash: break;
  }
  return std::nan("");
}

}  // namespace plumb
