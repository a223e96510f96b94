// Scale factors of operators that slide a window over positions, and of relu.
#pragma once

#include "plumb/scaling/rules.h"

namespace plumb::rules {

// How a window meets its inputs; what padding adds is zero, and values near a border are used less often.
struct Taps {
  int64_t examples = 1, inputs = 1, outputs = 1, kernel = 1;  // positions and kernel sizes, all dimensions multiplied
  int64_t pairs = 1;                                          // (output position, kernel position) that meet an input
};
// One dimension's part of Taps, to be multiplied in.
void count_taps(Taps& taps, int64_t length, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation);

// [output, grad_input, grad_weight] of a convolution of any rank, borders counted.
Scales convolution_nd(int64_t out_channels, int64_t in_channels_per_group, int64_t groups, const Taps& taps,
                      const std::vector<double>& power);
// weight sizes are (in, out / groups, kernel ...); taps: of the convolution from the output's positions to the input's.
Scales transposed_convolution(int64_t in_channels, int64_t out_channels_per_group, int64_t groups, const Taps& taps,
                              const std::vector<double>& power);
// [output, grad_input]. An average of k values; the largest of k (a gradient goes to one input of each window).
Scales average_pool(const Taps& taps);
Scales max_pool(const Taps& taps);

// [output, grad_input].
Scales relu();

}  // namespace plumb::rules
