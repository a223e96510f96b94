// The scales of recurrent layers, as plain arithmetic. The papers have none; they are derived as follows.
//
// Weights have unit variance, and a unit's preactivation sums over `in` inputs and `hidden` states, with factors that
// give it variance 1, of which a share comes from the states: one half, as in an add of two unit tensors, but one
// eighth in an LSTM. (Its states are numbers near 0.2 that a half would blow up fivefold. Its gradients then grow along
// the sequence, 34-fold over 96 steps in a simulation of 384 units; with an eighth they stay within a fifth of the
// rule.) Gates stay what they are, numbers between 0 and 1 that weigh memory: a gate times a factor would let the
// memory grow or die. The changes of a step to the mean squares of memory, state and gradients are one-dimensional
// Gaussian integrals, with values at different units and steps taken as independent. For states the fixed point counts,
// for gradients the mean over the steps. Only a bias, whose gradient is a plain sum over steps, sees that a candidate's
// gradients at neighboring steps are alike: memory passes half of them through.
#pragma once

#include <cstdint>

#include "plumb/operators/operator_facts.h"

namespace plumb::rules {

struct Recurrent {
  double hidden = 1;  // root of the mean square of a state h; the output is divided by it
  double cell = 1;    // root of the mean square of an LSTM's memory c
  // Gradients at the preactivations where they meet the input's and the state's weights: root of the mean square over
  // gates and steps, for a gradient of mean square 1 at every step's unscaled h.
  double grad_input_gates = 1;
  double grad_hidden_gates = 1;
  // Their root mean square summed over steps for a bias, relative to that of independent steps.
  double bias_ratio = 1;
  double state_share = 0.5;  // share of a preactivation's variance that comes from the states
  int gates = 1;
};

// `layer`: not None. steps >= 1.
Recurrent recurrent(RecurrentLayer layer, int64_t steps);

}  // namespace plumb::rules
