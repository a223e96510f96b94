// The statistics of a tensor by name, as in rule files, conditions and tables.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "plumb/numerics/metrics.h"

namespace plumb {

enum class StatisticKind : uint8_t {
  // The order is that of the bits of a history's rows (docs/history.md): it never changes.
  MeanAbs,
  AbsMean,
  Std,
  AbsMax,
  AbsMin,
  Numel,
  NanCount,
  InfCount,
  ZeroCount,
  Histogram,
  // Follow from the ones above.
  ZeroShare,
  Underflow,
  Overflow,
  Subnormal,
  // A record of its own (HistoryHash), and no number.
  Hash,
};

// "std", "histogram", "underflow(e5m2)": the shares of elements that a format turns to zero, cannot reach, or holds
// with fewer digits (TensorMetrics::underflow_share and so on).
struct Statistic {
  StatisticKind kind = StatisticKind::Std;
  std::optional<FPFormat> format = {};  // format of Underflow, Overflow and Subnormal

  // Throws Error(UnknownName) that lists the names.
  static Statistic parse(std::string_view text);
  std::string to_string() const;

  bool needs_histogram() const;
  // Returns the rows' bits it is computed from, which rules record with it: 1 << kind of the first ten; kHashBit.
  uint16_t bits() const;
  // Returns NaN for Histogram and Hash, which are no numbers.
  double of(const TensorMetrics& metrics) const;

  bool operator==(const Statistic&) const = default;
};

// All ten. A hash costs as much as they do, and is recorded where a rule names it.
inline constexpr uint16_t kAllStatistics = (1u << 10) - 1, kHashBit = 1u << 10;

}  // namespace plumb
