// The learning rate over a training's steps.
#pragma once

#include <cstdint>

#include "plumb/training/options.h"

namespace plumb {

// Returns the share of the peak rate at `step` (from 1) of options.steps. With w warm-up steps it is step / w in the
// first w (gradual warm-up, Goyal et al., arXiv 1706.02677, section 2.2), so that step w has the peak. After them, with
// t = (step - 1 - w) / (steps - w), which is 0 at the first step after warm-up and never 1, and f = final_rate:
//   constant  1
//   linear    1 - (1 - f) t
//   cosine    f + (1 - f) (1 + cos(pi t)) / 2      (SGDR, arXiv 1608.03983, equation 5, one cycle)
//   wsd       1, and in the last d steps 1 - (1 - f) (step - 1 - (steps - d)) / d; d: decay_steps, 0: a fifth of steps
//             (warm-up, stable, decay: MiniCPM, arXiv 2404.06395, section 4; the linear decay of arXiv 2405.18392)
// Exactly 1 wherever the rate is the peak.
double rate_share(const TrainOptions& options, int64_t step);

}  // namespace plumb
