// Statistics of several tensors as if they were one.
#pragma once

#include <memory>

#include "plumb/numerics/metrics.h"

namespace plumb {

// Takes what measure() takes and computes what it computes, over the elements of every tensor added: maxima and minima
// of all, means weighted by numbers of elements, std from the moments, counts summed. One tensor has measure()'s own
// bits. Tensors on a device are measured there; metrics() waits for it, add() does not.
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
