// FP8 with scale factors, as others train with it: for plain models, and to compare unit scaling with. A matrix is cast
// to codes of code = round(value / scale), with a scale for the whole, for a row, or for blocks.
//
// Scale factors are as torchao 0.18 makes them (torchao/float8/float8_utils.py, prototype/blockwise_fp8_training,
// prototype/mx_formats/mx_tensor.py), its casts are these bit for bit (python/tests/test_fp8_recipes.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "plumb/numerics/format.h"

namespace plumb {

enum class Fp8Recipe {
  Tensorwise,  // one scale, from the largest value now
  Rowwise,     // one for each line along which a product sums, a power of two
  Blocks128,   // one for 128 neighbors along it; of weights for 128 x 128
  Mx,          // one for 32 neighbors, 2^floor(log2(largest) - log2(the format's largest)) (OCP MX 1.0, 6.3)
  MxUp,        // the same, 2^ceil(log2(largest / the format's largest)): nothing overflows
  Delayed,     // one for the whole, from the largest values of earlier casts: cast_delayed(), not cast_scaled()
};
// Parses "tensorwise", "rowwise", "blocks128", "mxfp8", "mxfp8-up", "delayed"; else Error(InvalidArgument).
Fp8Recipe parse_fp8_recipe(std::string_view text);
std::vector<std::string> fp8_recipes();

struct ScaledCodes {
  at::Tensor codes;   // uint8, the matrix's sizes
  at::Tensor scales;  // float32; () for one, else by line and block, the blocks' dimension last
  at::Tensor values;  // what the codes stand for, in the matrix's dtype
};
// matrix: 2-D, float32, bfloat16 or float16. dim: the dimension that a product sums over. weight: Blocks128 takes
// square blocks. The last block of a line may be shorter.
ScaledCodes cast_scaled(const at::Tensor& matrix, const FPFormat& format, Fp8Recipe recipe, int64_t dim, bool weight);

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
