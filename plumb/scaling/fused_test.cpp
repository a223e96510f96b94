// Unit-scaled activations as single kernels of a device: the kernels' texts run on this machine.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/cuda/emulator_testing.h"
#include "plumb/cuda/kernels.h"
#include "plumb/pointwise/parts.h"
#include "plumb/scaling/functional.h"

namespace plumb {
namespace {

using at::Tensor;

struct Activation {
  const char* name;
  int inputs;
  Tensor (*call)(const std::vector<Tensor>& inputs);
};
const std::vector<Activation> kActivations = {
    {"gelu", 1, [](const std::vector<Tensor>& x) { return functional::gelu(x[0]); }},
    {"gelu, mult", 1, [](const std::vector<Tensor>& x) { return functional::gelu(x[0], 1.7); }},
    {"gelu, tanh", 1,
     [](const std::vector<Tensor>& x) { return functional::gelu(x[0], 0.6, "to_output_scale", "tanh"); }},
    {"silu", 1, [](const std::vector<Tensor>& x) { return functional::silu(x[0]); }},
    {"silu, mult", 1, [](const std::vector<Tensor>& x) { return functional::silu(x[0], 1.7); }},
    {"silu_glu, mult", 2, [](const std::vector<Tensor>& x) { return functional::silu_glu(x[0], x[1], 0.6); }},
    {"silu_glu", 2, [](const std::vector<Tensor>& x) { return functional::silu_glu(x[0], x[1]); }},
};

struct Outcome {
  Tensor result;
  std::vector<Tensor> gradients;
};

Outcome outcome_of(const Activation& activation, at::ScalarType dtype) {
  torch::manual_seed(3);
  std::vector<Tensor> inputs;
  for (int i = 0; i < activation.inputs; ++i) inputs.push_back((at::randn({7, 149}) * 2).to(dtype).requires_grad_());
  Outcome outcome{activation.call(inputs), {}};
  outcome.result.backward(at::linspace(-1, 2, outcome.result.numel()).view(outcome.result.sizes()).to(dtype));
  for (const Tensor& x : inputs) outcome.gradients.push_back(x.grad());
  return outcome;
}

TEST(FusedActivations, AreOneKernelForwardAndOneBackward) {
  cuda::Emulator emulator;
  const auto types = {at::kFloat, at::kBFloat16, at::kHalf};
  const auto run_all = [&](bool check) {
    for (const Activation& activation : kActivations) {
      for (const auto dtype : types) {
        pointwise_parts::register_pointwise_kernels(at::kCPU, &cuda::pointwise_kernels());
        const int before = emulator.started;
        const Outcome found = outcome_of(activation, dtype);
        pointwise_parts::register_pointwise_kernels(at::kCPU, nullptr);
        if (!check) continue;
        const std::string what = std::string(activation.name) + " " + c10::toString(dtype);
        EXPECT_EQ(emulator.started - before, 2) << what;
        // The same roundings as torch's operators one by one, whose exp and erf differ in the last place.
        const Outcome wanted = outcome_of(activation, dtype);
        const double bound = dtype == at::kFloat ? 2e-6 : dtype == at::kHalf ? 4e-3 : 3e-2;
        EXPECT_TRUE(at::allclose(found.result, wanted.result, bound, bound)) << what;
        for (size_t i = 0; i < wanted.gradients.size(); ++i)
          EXPECT_TRUE(at::allclose(found.gradients[i], wanted.gradients[i], bound, bound)) << what << ", input " << i;
      }
    }
  };
  run_all(false);
  emulator.compile();
  run_all(true);
  EXPECT_EQ(emulator.declined, 0);
}

}  // namespace
}  // namespace plumb
