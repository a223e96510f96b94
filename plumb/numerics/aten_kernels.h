// The room's kernels for any device: a device's own (device_kernels.h), else in ATen operators: right on every device,
// with the bits of the CPU's kernels (kernels.h), which CPU tensors take instead. They work on the bits of floats as
// integers and read no value on the host. What they take is checked by their callers: strided tensors of a carrier's
// dtype. Not for other rooms.
//
// They need float32 and int64 on the device, for float64 tensors and metrics float64 too; a device that flushes
// subnormal floats to zero loses those of formats with shared scales and no others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

#include "plumb/numerics/format.h"
#include "plumb/numerics/kernels.h"
#include "plumb/numerics/metrics.h"

namespace plumb::aten_kernels {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr int64_t kFields = 10;  // number of fields of kernel::Partial, without its histogram

// Returns x, or a copy whose memory is in the order that results have.
at::Tensor in_memory_order(const at::Tensor& x);

// The numbers that values 0 to n - 1 of a tensor are rounded with, in 0..2^32-1: int64 [n] (kernel_base.h says which).
at::Tensor random_words(int64_t n, uint64_t seed, at::Device device);

// Like quantise() in quantise.h; strides as at::empty_like's.
at::Tensor quantise(const at::Tensor& x, const FPFormat& format, uint64_t seed);

// Into `out`, which may be x: both dense, in the same order. False where the device has no kernels of its own
// (device_kernels.h): then nothing is written.
bool quantise_into(const at::Tensor& out, const at::Tensor& x, const FPFormat& format, uint64_t seed);
// quantise() and gather_metrics() of x and of the result, where they are asked for.
at::Tensor quantise_and_gather(const at::Tensor& x, const FPFormat& format, uint64_t seed, bool histogram,
                               at::Tensor* before, at::Tensor* after);

// Into `y`, dense: `value` where random_words() of its place is at most `last`, else 0.
void keep(const at::Tensor& y, double value, uint32_t last, uint64_t seed);

// Like encode() and decode() in codes.h.
at::Tensor encode(const at::Tensor& x, const FPFormat& format, uint64_t seed);
at::Tensor decode(const at::Tensor& codes, const FPFormat& format, at::ScalarType dtype);

struct Blocks {
  at::Tensor values;  // rounded values in x's sizes and dtype
  at::Tensor codes;   // uint8 [x's sizes], where they were asked for
  at::Tensor scales;  // uint8, the last size the number of blocks
  at::Tensor unit;    // float32 or float64 []: what the scales are in units of
};
// x: contiguous, blocks along its last dimension.
Blocks round_blocks(const at::Tensor& x, const FPFormat& format, uint64_t seed, bool with_codes);

// 2^exponent for exponents from -127 to 127, int32, as float32 or float64.
at::Tensor power_of_two(const at::Tensor& exponent, at::ScalarType dtype);

// Returns kernel::Partial's fields for x: float64 [kFields], in order, or [kFields + 256] with the histogram. Counts,
// largest and smallest are the CPU's; sums are taken in float64, in the device's order.
at::Tensor gather_metrics(const at::Tensor& x, bool histogram);
// Merges what gather_metrics() gave, on the CPU by now.
void merge_gathered(kernel::Partial& into, const at::Tensor& gathered);

// Returns hash_of() (hash.h) as int64 [] on x's device.
at::Tensor hash(const at::Tensor& x);

// Returns the metrics of one tensor; waits for its device.
TensorMetrics metrics_of(const at::Tensor& gathered, int64_t numel);

// Like plumb::tensor_metrics (operators.h).
at::Tensor tensor_metrics(const at::Tensor& x, bool histogram);

}  // namespace plumb::aten_kernels
