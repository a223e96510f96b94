// The room's kernels for one kind of device: one pass over memory for what aten_kernels.h does in many, with the same
// bits. A room that has them registers them; tensors of that kind then come here first.
//
// Tensors are on the device, of float32, float16 or bfloat16 (others never come), have elements, and those of one call
// are dense in the same order. Each returns false and writes nothing where it cannot. None waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "plumb/numerics/kernels.h"

namespace plumb {

struct PassTask {
  at::Tensor x;
  at::Tensor y;  // x rounded, may be x itself; or, where there are `codes`, uint8; or undefined: x is only measured
  kernel::RoundingSpec rounding{};
  const kernel::CodeSpec* codes = nullptr;
  uint64_t seed = 0;
  bool histogram = false;
  // Undefined, or float64 to write to: what aten_kernels::gather_metrics() gives of x and of its values rounded, and
  // what tensor_metrics() gives of x.
  at::Tensor before, after, metrics;
};

struct BlocksTask {
  at::Tensor x;                   // contiguous, blocks along its last dimension
  at::Tensor values, codes;       // results of x's sizes, either may be undefined; values may be x
  at::Tensor scales;              // uint8, one a block; or undefined
  at::Tensor unit;                // float32 []
  kernel::RoundingSpec rounding;  // the elements', in float32
  kernel::BlockSpec block;
  kernel::CodeSpec code_spec{};
  uint64_t seed = 0;
};

struct DeviceKernels {
  bool (*pass)(const PassTask& task);
  bool (*decode)(const at::Tensor& codes, const at::Tensor& values, const std::array<float, 256>& table);
  bool (*round_blocks)(const BlocksTask& task);
  // values: `value` where the random word of its place is at most `last`, else 0.
  bool (*keep)(const at::Tensor& values, double value, uint32_t last, uint64_t seed);
  // sum: int64 [], the hash of x, which is contiguous (hash.h).
  bool (*hash)(const at::Tensor& x, const at::Tensor& sum);
};

// For the life of the process; before tensors of that kind come.
void register_device_kernels(at::DeviceType kind, const DeviceKernels* kernels);
// Those for x's kind and dtype; else null.
const DeviceKernels* device_kernels(const at::Tensor& x, at::ScalarType values);

}  // namespace plumb
