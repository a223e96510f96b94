// The operator plumb::simulate_format(x, fwd, bwd, seed, dim): x in format fwd, its gradient in format bwd. "none"
// leaves alone. dim: along which blocks share scales, in formats that have them. Matrix products of what it rounded
// keep one-byte codes for their backward (remember_quantised).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "plumb/numerics/format.h"
#include "plumb/numerics/metrics.h"

namespace plumb {

namespace ops {
// Through the dispatcher. Formats are texts that FPFormat::parse() takes, read once.
at::Tensor simulate_format(const at::Tensor& x, std::string_view fwd, std::string_view bwd,
                           std::optional<int64_t> seed = std::nullopt, int64_t dim = -1);
}  // namespace ops

// The operator's two passes, for operators that do more in the same pass over memory.

// Measurements wanted on the way: of what comes in and of what goes out.
struct Measuring {
  TensorMetrics* before = nullptr;
  TensorMetrics* after = nullptr;
  MetricsOptions options = {};
};

// Returns the seed that both passes are given, in the forward. Where a run seeds nodes by name (graph/node_seeds.h) one
// is drawn here for a backward that rounds stochastically: a seed drawn there would depend on which nodes ran before.
std::optional<int64_t> seed_of_passes(std::optional<int64_t> seed, std::string_view bwd);

// Called below autograd. "none": another tensor on x's memory.
at::Tensor simulate_forward(const at::Tensor& x, std::string_view fwd, std::optional<int64_t> seed, int64_t dim,
                            const Measuring& measuring = {});

// Rounds a gradient that has no other owner in place.
at::Tensor simulate_backward(at::Tensor& gradient, std::string_view bwd, std::optional<int64_t> seed, int64_t dim,
                             const Measuring& measuring = {});

// --- saved tensors as codes ---
//
// Keeps what a matrix product saves for its backward pass as one-byte codes, where its inputs hold nothing but values
// of a format of at most 8 bits: a quarter of the memory, and the backward pass sees the same bits.
//
// plumb::simulate_format remembers the codes of its results. A product that takes such a result is lent it, as in
// recompute.h, which takes the memory away again and has it filled from the codes while the product's node runs. That
// holds in a graph's run and in a CheapRecompute. Small tensors, tensors with NaN in a format without one (off
// the CPU every tensor in such a format), what was written since, and what hooks of the user's hold is left alone.

// Notes that `x`, fresh from a quantizer on this thread, holds values of `format` until its memory dies or is written.
void remember_quantised(const at::Tensor& x, const FPFormat& format);

// quantise() and remember_quantised(), the codes made in the same pass; undefined where codes are not for this tensor.
at::Tensor quantise_and_remember(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed);

}  // namespace plumb
