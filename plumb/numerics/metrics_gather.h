// Pieces of a measurement, merged in their order. Not for other rooms.
#pragma once

#include <ATen/Parallel.h>

#include <memory>
#include <vector>

#include "plumb/numerics/kernels.h"
#include "plumb/numerics/metrics.h"

namespace plumb {

// Pieces have a fixed size, so that the sums do not depend on the number of threads.
class MetricsGatherer {
 public:
  static constexpr int64_t kPiece = 16 * kernel::kRandomBlock;

  MetricsGatherer(int64_t numel, const MetricsOptions& options) : numel_(numel), options_(options) {
    if (options.histogram) {
      only_counts_.fill(0);
      only_.histogram = only_counts_.data();
    }
    if (numel <= kPiece) return;
    const size_t n = size_t((numel + kPiece - 1) / kPiece);
    pieces_.resize(n);
    if (!options.histogram) return;
    counts_.resize(n);
    for (size_t i = 0; i < n; ++i) {
      counts_[i].fill(0);
      pieces_[i].histogram = counts_[i].data();
    }
  }
  MetricsGatherer(const MetricsGatherer&) = delete;

  kernel::Partial& piece(int64_t i) { return pieces_.empty() ? only_ : pieces_[size_t(i)]; }

  // The merged pieces; also where more may be merged into.
  kernel::Partial& merged() {
    for (const auto& piece : pieces_) merge(only_, piece);
    pieces_.clear();
    return only_;
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
  MetricsOptions options_;
  kernel::Partial only_;
  std::array<uint64_t, kernel::kHistogramBins> only_counts_;
  std::vector<kernel::Partial> pieces_;
  std::vector<std::array<uint64_t, kernel::kHistogramBins>> counts_;
};

}  // namespace plumb
