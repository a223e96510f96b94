// What plumb::simulate_format does to a value and to its gradient, for operators that do more in the same pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "plumb/numerics/metrics.h"

namespace plumb {

// Measurements wanted on the way: of what comes in and of what goes out.
struct Measuring {
  TensorMetrics* before = nullptr;
  TensorMetrics* after = nullptr;
  MetricsOptions options = {};
};

// Called below autograd. "none": another tensor on x's memory.
at::Tensor simulate_forward(const at::Tensor& x, std::string_view fwd, std::optional<int64_t> seed, int64_t dim,
                            const Measuring& measuring = {});

// A gradient that nobody else holds is rounded where it lies.
at::Tensor simulate_backward(at::Tensor& gradient, std::string_view bwd, std::optional<int64_t> seed, int64_t dim,
                             const Measuring& measuring = {});

}  // namespace plumb
