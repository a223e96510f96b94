// Statistics of a tensor in one pass over its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "plumb/numerics/format.h"

namespace plumb {

// How many elements have which binary exponent. Bin b (1..254) counts 2^(b-127) <= |x| < 2^(b-126); bin 0 zeros and
// what is below 2^-126, bin 255 NaN and infinities. float64 values beyond float32's range count in bins 0 and 254.
struct ExponentHistogram {
  std::array<int64_t, 256> counts{};
};

struct MetricsOptions {
  bool histogram = false;
};

// As torch computes them (t.abs().mean(), t.mean().abs(), t.std(), t.abs().max(), t.abs().min()), in double precision.
// A NaN anywhere makes the first five NaN, as in torch; infinities give what torch gives. std is the unbiased one
// (divides by n-1), NaN for fewer than two elements. All of an empty tensor's are NaN.
struct TensorMetrics {
  double mean_abs = 0, abs_mean = 0, std = 0, abs_max = 0, abs_min = 0;
  int64_t numel = 0;
  int64_t nan_count = 0, inf_count = 0, zero_count = 0;
  std::optional<ExponentHistogram> histogram;

  double zero_share() const { return numel ? double(zero_count) / double(numel) : 0.0; }

  // Shares of all elements, from the histogram (Error(InvalidState) without one). "What would this format do to it":
  //   underflow: nonzero values that become zero;
  //   overflow:  finite values beyond the largest (for nearest: that do not round to it);
  //   subnormal: nonzero values below min_absolute_normal that do not become zero: they lose digits.
  // Values count as spread evenly inside a bin where a limit cuts one; exact where limits are powers of two (underflow
  // of nearest and toward_zero, up to values exactly half the smallest), and where abs_max shows that nothing
  // overflows. For stochastic rounding: the expected share. If blocks share scales nothing overflows; the other two are
  // upper bounds, as if the tensor were one block.
  double underflow_share(const FPFormat& format) const;
  double overflow_share(const FPFormat& format) const;
  double subnormal_share(const FPFormat& format) const;
};

// Any dtype but complex, any strides, any number of elements, on any device that has float64; sparse COO tensors count
// with their zeros, as to_dense() of them would. Does not depend on the number of threads. Relative error of mean_abs
// and std below 1e-6, whatever the mean and the range. Waits for a device: ops::tensor_metrics and MetricsSum do not.
TensorMetrics measure(const at::Tensor& x, const MetricsOptions& options = {});

namespace kernel {
struct Partial;
}
// From what the kernels gathered.
TensorMetrics finish_metrics(const kernel::Partial& partial, int64_t numel);

// Statistics of several tensors as if they were one. Takes what measure() takes and computes what it computes, over the
// elements of every tensor added: maxima and minima of all, means weighted by numbers of elements, std from the
// moments, counts summed. One tensor has measure()'s own bits. Tensors on a device are measured there; metrics() waits
// for it, add() does not.
class MetricsSum {
 public:
  explicit MetricsSum(const MetricsOptions& options = {});
  ~MetricsSum();
  MetricsSum(MetricsSum&&) noexcept;
  MetricsSum& operator=(MetricsSum&&) noexcept;

  // Throws what measure() throws.
  void add(const at::Tensor& x);
  // A histogram is kept where both have one.
  void add(const MetricsSum& other);

  TensorMetrics metrics() const;

 private:
  void add_zeros(int64_t count);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace plumb
