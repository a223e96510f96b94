// Keeps what a matrix product saves for its backward pass as one-byte codes, where its inputs hold nothing but values
// of a format of at most 8 bits: a quarter of the memory, and the backward pass sees the same bits.
//
// plumb::simulate_format remembers the codes of its results. A product that takes such a result is lent it, as in
// recompute.h, which takes the memory away again and has it filled from the codes while the product's node runs. That
// holds in a graph's run and in a CheapRecompute. Small tensors, tensors with NaN in a format without one (off
// the CPU every tensor in such a format), what was written since, and what hooks of the user's hold is left alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "plumb/numerics/format.h"

namespace plumb {

// Notes that `x`, fresh from a quantizer on this thread, holds values of `format` until its memory dies or is written.
void remember_quantised(const at::Tensor& x, const FPFormat& format);

// quantise() and remember_quantised(), the codes made in the same pass; undefined where codes are not for this tensor.
at::Tensor quantise_and_remember(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed);

}  // namespace plumb
