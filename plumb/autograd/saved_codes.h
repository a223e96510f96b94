// Keeps what a matrix product saves for its backward pass as one-byte codes, where its inputs hold nothing but values
// of a format of at most 8 bits: a quarter of the memory, and the backward pass sees the same bits.
//
// plumb::simulate_format does this by itself: quantising forward it remembers its results, marking the product's
// output it looks at what the product saved.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "plumb/numerics/format.h"

namespace torch::autograd {
class SavedVariable;
}

namespace plumb {

// An autograd node of this library shows what it saved.
class SavesTensors {
 public:
  virtual ~SavesTensors() = default;
  virtual void visit_saved(const std::function<void(torch::autograd::SavedVariable&)>& visit) = 0;
};

// `x`, fresh from a quantiser on this thread, holds values of `format`, as long as its memory lives and is not written.
void remember_quantised(const at::Tensor& x, const FPFormat& format);

// quantise() and remember_quantised(), the codes made in the same pass; undefined where codes are not for this tensor.
at::Tensor quantise_and_remember(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed);

// `result` comes from a product (torch's linear, matmul, bmm, attention or convolution, perhaps through views, or a
// SavesTensors): of what its node saved, the tensors remembered as quantised are replaced by their codes. Small
// tensors, tensors with NaN in a format without one, and those that the user's own hooks hold are left alone.
void save_as_codes(const at::Tensor& result);

}  // namespace plumb
