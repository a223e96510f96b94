// A history as a training may write it.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "plumb/recording/history.h"

namespace plumb {

// Tensors of standard deviation 2^(fwd_exponent), gradients of 2^(bwd_exponent - step).
inline History made(int tensors, int steps, double fwd_exponent, double bwd_exponent,
                    const std::string& op = "aten::linear") {
  History history;
  for (int t = 0; t < tensors; ++t) {
    const std::string module = "layers." + std::to_string(t / 4);
    history.tensors.push_back(
        {module + ".y_" + std::to_string(t), module, t % 4 ? op : "aten::gelu", "float32", {64, 64}});
  }
  for (int s = 0; s < steps; ++s) {
    HistoryStep step{1 + 10 * s, {}};
    for (int t = 0; t < tensors; ++t) {
      for (const bool backward : {false, true}) {
        Metrics::Data d;
        d.std = std::exp2((backward ? bwd_exponent - s : fwd_exponent) - t * 0.001);
        d.mean_abs = d.std * 0.8, d.abs_max = d.std * 4, d.abs_min = d.std * 0x1p-12, d.numel = 4096;
        auto histogram = std::make_shared<ExponentHistogram>();
        const int top = static_cast<int>(std::floor(std::log2(d.abs_max)));
        for (int e = 0; e < 12; ++e)
          histogram->counts[static_cast<size_t>(std::max(1, 127 + top - e))] += 4096 >> (e + 1);
        histogram->counts[0] = 1;
        d.histogram = histogram;
        step.rows.push_back({static_cast<uint32_t>(t), backward, false, kAllStatistics, d});
      }
    }
    history.steps.push_back(std::move(step));
    history.scalars.push_back({1 + 10 * s, {{"loss", 5.0 / (s + 1)}}});
  }
  return history;
}

}  // namespace plumb
