#include "plumb/training/step/rates.h"

#include <algorithm>
#include <cmath>

namespace plumb {

double rate_share(const TrainOptions& o, int64_t step) {
  if (step < o.warmup) return static_cast<double>(step) / static_cast<double>(o.warmup);
  if (step <= o.warmup || o.rate == "constant") return 1;
  const auto falling = [&](double t) { return 1 - (1 - o.final_rate) * t; };
  if (o.rate == "wsd") {
    const int64_t decay = std::min(o.steps, o.decay_steps > 0 ? o.decay_steps : std::max<int64_t>(1, o.steps / 5));
    const int64_t done = step - 1 - (o.steps - decay);
    return done <= 0 ? 1 : falling(static_cast<double>(done) / static_cast<double>(decay));
  }
  const double t = static_cast<double>(step - 1 - o.warmup) / static_cast<double>(o.steps - o.warmup);
  if (o.rate == "linear" || t == 0) return falling(t);
  return o.final_rate + (1 - o.final_rate) * (1 + std::cos(M_PI * t)) / 2;
}

}  // namespace plumb
