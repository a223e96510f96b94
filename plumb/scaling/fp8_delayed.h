// Delayed scaling: the scale of a cast is known before its values are, from the largest values of earlier casts.
//
// A linear layer's state is a float32 tensor [3, 1 + length], rows for its input, its weight and the gradient of its
// output: the scale of the next cast, then the largest magnitudes of the last `length` casts, the newest first. Values
// are cast as code = round(value * scale). After a cast, as NVIDIA's Transformer Engine has it (recipe.DelayedScaling,
// amax_compute_algo "max", margin 0):
//
//   amax  = max(largest magnitudes)
//   scale = FP8_MAX / amax       the one before where amax is zero or not finite; float32's largest where it is
//   infinite
//
// The first cast has scale 1.
#pragma once

#include <ATen/core/Tensor.h>

#include "plumb/numerics/format.h"

namespace plumb {

enum class DelayedRow { Input, Weight, Gradient };

// Returns the state of a layer that has cast nothing. Throws Error(InvalidArgument) for length < 1.
at::Tensor delayed_state(int64_t length, at::Device device);

struct DelayedCodes {
  at::Tensor codes;    // uint8, x's sizes
  at::Tensor inverse;  // float32 []: 1 / scale
  // Returns the values that the codes stand for.
  at::Tensor values(const FPFormat& format, at::ScalarType dtype) const;
};
// update: the largest magnitude of x enters the state, which gives the next cast's scale, without waiting for x's
// device.
DelayedCodes cast_delayed(const at::Tensor& x, const FPFormat& format, const at::Tensor& state, DelayedRow row,
                          bool update);

}  // namespace plumb
