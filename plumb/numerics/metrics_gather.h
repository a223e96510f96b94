// Pieces of a measurement, merged in their order. Not for other rooms.
#pragma once

#include <ATen/Parallel.h>

#include <vector>

#include "plumb/numerics/kernels.h"
#include "plumb/numerics/metrics.h"

namespace plumb {

// The squares of very large and very small float64 values are no float64 values. The mean, m2 and sum_abs of a Partial
// of such values are in units of unit_of(abs_max); of all others the unit is 1.
constexpr double kLargeUnit = 0x1p864, kSmallUnit = 0x1p-864, kLeastLarge = 0x1p432, kLeastOrdinary = 0x1p-432;
inline double unit_of(double abs_max) {
  return abs_max >= kLeastLarge ? kLargeUnit : abs_max > 0 && abs_max < kLeastOrdinary ? kSmallUnit : 1;
}
// Replaces the sums in `p`, if its unit is not 1, by those in its unit of x's n float64 values, which a kernel has
// measured into it.
void measure_in_unit(const double* x, int64_t n, kernel::Partial& p);
// Merges partials of any units.
void merge_in_units(kernel::Partial& into, kernel::Partial from);

// Pieces have a fixed size, so that the sums do not depend on the number of threads.
class MetricsGatherer {
 public:
  static constexpr int64_t kPiece = 16 * kernel::kRandomBlock;

  MetricsGatherer(int64_t numel, const MetricsOptions& options)
      : numel_(numel),
        pieces_(size_t(std::max<int64_t>((numel + kPiece - 1) / kPiece, 1))),
        counts_(options.histogram ? pieces_.size() : 0) {
    for (size_t i = 0; i < counts_.size(); ++i) pieces_[i].histogram = counts_[i].data();
  }
  MetricsGatherer(const MetricsGatherer&) = delete;

  kernel::Partial& piece(int64_t i) { return pieces_[size_t(i)]; }
  // Must be called after a kernel has measured the piece's n values into piece(i).
  void measured(int64_t i, const void* values, int64_t n, kernel::Carrier carrier) {
    if (carrier == kernel::kFloat64) measure_in_unit(static_cast<const double*>(values), n, piece(i));
  }

  // The merged pieces. Once.
  const kernel::Partial& merged() {
    for (size_t i = 1; i < pieces_.size(); ++i) merge_in_units(pieces_[0], pieces_[i]);
    return pieces_[0];
  }

  TensorMetrics finish() { return finish_metrics(merged(), numel_); }

  // body(piece, begin, end) on torch's threads.
  template <class Body>
  static void for_pieces(int64_t numel, const Body& body) {
    if (numel <= kPiece) {
      if (numel > 0) body(int64_t(0), int64_t(0), numel);
      return;
    }
    at::parallel_for(0, (numel + kPiece - 1) / kPiece, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) body(i, i * kPiece, std::min(numel, (i + 1) * kPiece));
    });
  }

 private:
  int64_t numel_;
  std::vector<kernel::Partial> pieces_;
  std::vector<std::array<uint64_t, kernel::kHistogramBins>> counts_;
};

}  // namespace plumb
