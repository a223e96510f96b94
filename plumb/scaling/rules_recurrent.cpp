#include "plumb/scaling/rules_recurrent.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace plumb::rules {
namespace {

double squared(double x) { return x * x; }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Returns the mean of f(x) for a normal x of this variance. The trapezoidal rule is exact to the last digits here: all
// derivatives vanish at both ends.
template <class F>
double mean(const F& f, double variance) {
  constexpr int n = 256;
  constexpr double reach = 8.5, step = 2 * reach / n;
  double sum = 0;
  for (int i = 0; i <= n; ++i) {
    const double x = -reach + i * step;
    sum += f(x * std::sqrt(variance)) * std::exp(-x * x / 2);
  }
  return sum * step / std::sqrt(2 * std::numbers::pi);
}

double mean_tanh(double variance) {
  return mean([](double x) { return squared(std::tanh(x)); }, variance);
}
double mean_tanh_slope(double variance) {
  return mean([](double x) { return squared(1 - squared(std::tanh(x))); }, variance);
}
const double kGate = mean([](double x) { return squared(sigmoid(x)); }, 1);
const double kGateSlope = mean([](double x) { return squared(sigmoid(x) * (1 - sigmoid(x))); }, 1);

// Mean squares of the gradients at one step: what goes back to the state before through the weights, and the gates'.
struct Step {
  double input_gates, hidden_gates;  // summed over the gates
  double direct;                     // to the state before, past the weights
};

// The mean over the steps, going back from the last. step(gradient at h) may keep more (an LSTM's memory) for itself.
template <class F>
void go_back(Recurrent& r, int64_t steps, const F& step) {
  double back = 0, input = 0, hidden = 0;
  int64_t left = std::max<int64_t>(steps, 1);
  const double all = static_cast<double>(left);
  for (double before = -1; left > 0; --left) {
    const Step s = step(1 + back);
    // At the fixed point the rest of the steps are like this one.
    const double times = std::abs(s.input_gates - before) < 1e-12 * s.input_gates ? static_cast<double>(left) : 1;
    input += times * s.input_gates, hidden += times * s.hidden_gates;
    if (times > 1) break;
    before = s.input_gates;
    // The state's share comes by weights of variance share / (hidden h^2).
    back = s.direct + s.hidden_gates * r.state_share / squared(r.hidden);
  }
  r.grad_input_gates = std::sqrt(input / (all * r.gates));
  r.grad_hidden_gates = std::sqrt(hidden / (all * r.gates));
}

// A candidate's gradient at one step is memory's gradient times a gate and a slope of tanh, both positive, and memory's
// is passed on times a gate of mean 1/2. `part`: the candidate's share of the gates' mean squares.
double bias_ratio(double part, double variance, int64_t steps) {
  const double slope = mean([](double x) { return 1 - squared(std::tanh(x)); }, variance);
  double alike = 0.5 * (0.25 / kGate) * squared(slope) / mean_tanh_slope(variance), sum = 0;
  const auto n = static_cast<double>(std::max<int64_t>(steps, 1));
  for (double lag = 1; lag < n && lag < 60; ++lag, alike /= 2) sum += 2 * (1 - lag / n) * alike;
  return std::sqrt(1 + part * sum);
}

Recurrent lstm(int64_t steps) {
  Recurrent r;
  r.gates = 4;
  const double candidate = mean_tanh(1), memory = kGate * candidate / (1 - kGate);
  const double shown = mean_tanh(memory);
  r.cell = std::sqrt(memory);
  r.hidden = std::sqrt(kGate * shown);
  r.state_share = 0.125;
  double at_memory = 0, part = 0;
  go_back(r, steps, [&](double at_state) {
    at_memory = at_state * kGate * mean_tanh_slope(memory) + kGate * at_memory;
    const double n = at_memory * kGate * mean_tanh_slope(1);
    const double gates = at_state * shown * kGateSlope + at_memory * (memory + candidate) * kGateSlope + n;
    part = n / gates;
    return Step{gates, gates, 0};
  });
  r.bias_ratio = bias_ratio(part, 1, steps);
  return r;
}

Recurrent gru(int64_t steps) {
  Recurrent r;
  r.gates = 3;
  const double inside = 1 - r.state_share + r.state_share * kGate;  // the candidate sees a gated state
  const double candidate = mean_tanh(inside), state = kGate * candidate / (1 - kGate);
  r.hidden = std::sqrt(state);
  double part = 0;
  go_back(r, steps, [&](double at_state) {
    const double n = at_state * kGate * mean_tanh_slope(inside);
    const double reset = n * r.state_share * kGateSlope, update = at_state * (candidate + state) * kGateSlope;
    part = n / (reset + update + n);
    return Step{reset + update + n, reset + update + n * kGate, at_state * kGate};
  });
  r.bias_ratio = bias_ratio(part, inside, steps);
  return r;
}

Recurrent simple(bool relu, int64_t steps) {
  Recurrent r;
  r.hidden = std::sqrt(relu ? 0.5 : mean_tanh(1));
  const double slope = relu ? 0.5 : mean_tanh_slope(1);
  go_back(r, steps, [&](double at_state) { return Step{at_state * slope, at_state * slope, 0}; });
  return r;
}

}  // namespace

Recurrent recurrent(RecurrentLayer layer, int64_t steps) {
  switch (layer) {
    case RecurrentLayer::Lstm: return lstm(steps);
    case RecurrentLayer::Gru: return gru(steps);
    case RecurrentLayer::Tanh: return simple(false, steps);
    case RecurrentLayer::Relu: return simple(true, steps);
    case RecurrentLayer::None: break;
  }
  return {};
}

}  // namespace plumb::rules
