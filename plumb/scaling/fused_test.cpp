// Unit-scaled activations, softmax and RMS norm as single kernels of a device: the kernels' texts run on this machine.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/cuda/emulator_testing.h"
#include "plumb/cuda/kernels.h"
#include "plumb/cuda/rows.h"
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

// --- rows

// Whether the operators' kernels are those of this room, emulated, while one lives.
struct RowsHere {
  RowsHere() { cuda::use_rows_on(at::kCPU); }
  ~RowsHere() { cuda::use_rows_on(at::kCUDA); }
};

struct RowCase {
  const char* name;
  at::ScalarType weight;  // Undefined: none
  Tensor (*call)(const Tensor& x, const OptionalTensor& weight);
};
const std::vector<RowCase> kRowCases = {
    {"softmax", at::ScalarType::Undefined,
     [](const Tensor& x, const OptionalTensor&) { return functional::softmax(x, -1); }},
    {"softmax, mult", at::ScalarType::Undefined,
     [](const Tensor& x, const OptionalTensor&) { return functional::softmax(x, x.dim() - 1, {}, std::nullopt, 0.7); }},
    {"rms_norm", at::kFloat,
     [](const Tensor& x, const OptionalTensor& w) { return functional::rms_norm(x, {x.size(-1)}, w, 1e-6); }},
    {"rms_norm, weight of x's dtype", at::kBFloat16,
     [](const Tensor& x, const OptionalTensor& w) { return functional::rms_norm(x, {x.size(-1)}, w); }},
    {"rms_norm without a weight", at::ScalarType::Undefined,
     [](const Tensor& x, const OptionalTensor& w) { return functional::rms_norm(x, {x.size(-1)}, w); }},
    {"rms_norm of two dimensions", at::ScalarType::Undefined,
     [](const Tensor& x, const OptionalTensor& w) { return functional::rms_norm(x, x.sizes().slice(1), w); }},
};

// Whole vectors and not, more rows than a GPU has blocks for the weight's gradient, one value.
const std::vector<std::vector<int64_t>> kRowSizes = {{2, 5, 1024}, {600, 8}, {3, 149}, {2, 1}, {7, 4096}};

Outcome outcome_of_rows(const RowCase& row_case, at::IntArrayRef sizes, at::ScalarType dtype) {
  torch::manual_seed(4);
  const Tensor x = (at::randn(sizes) * 3).to(dtype).requires_grad_();
  OptionalTensor weight;
  if (row_case.weight != at::ScalarType::Undefined)
    weight = (at::rand({sizes.back()}) + 0.5).to(row_case.weight).requires_grad_();
  Outcome outcome{row_case.call(x, weight), {}};
  outcome.result.backward(at::randn(sizes).to(dtype));
  outcome.gradients = {x.grad()};
  if (weight) outcome.gradients.push_back(weight->grad());
  return outcome;
}

// Returns the largest difference over the largest value, which unit scaling makes about one.
double apart(const Tensor& found, const Tensor& wanted) {
  if (found.scalar_type() != wanted.scalar_type() || found.sizes() != wanted.sizes()) return 1e9;
  const auto a = found.to(at::kDouble), b = wanted.to(at::kDouble);
  return ((a - b).abs().max() / b.abs().max().clamp_min(0.1)).item<double>();
}

TEST(FusedRows, AreOneKernelForwardAndOneBackwardWithinSumsInAnotherOrder) {
  cuda::Emulator emulator;
  const auto run_all = [&](bool check) {
    for (const RowCase& row_case : kRowCases) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (const std::vector<int64_t>& sizes : kRowSizes) {
          int before = 0;
          const Outcome found = [&] {
            const RowsHere here;
            before = emulator.started;
            return outcome_of_rows(row_case, sizes, dtype);
          }();
          if (!check) continue;
          const std::string what = c10::str(row_case.name, " ", dtype, " ", sizes);
          EXPECT_EQ(emulator.started - before, 2) << what;
          const Outcome wanted = outcome_of_rows(row_case, sizes, dtype);
          EXPECT_EQ(emulator.started - before, 2) << what;
          // float16 and bfloat16 may differ by two last places, 2^-9 and 2^-6: in the result, and in values computed
          // from it.
          const double bound = dtype == at::kFloat ? 3e-6 : dtype == at::kHalf ? 0.002 : 0.0157;
          EXPECT_LE(apart(found.result, wanted.result), bound) << what;
          for (size_t i = 0; i < wanted.gradients.size(); ++i)
            EXPECT_LE(apart(found.gradients[i], wanted.gradients[i]), bound) << what << ", gradient " << i;
        }
      }
    }
  };
  run_all(false);
  emulator.compile();
  run_all(true);
  EXPECT_EQ(emulator.declined, 0);
}

TEST(FusedRows, OfSpecialValuesAreTorchs) {
  cuda::Emulator emulator;
  const float inf = INFINITY;
  const Tensor x =
      at::tensor({1.f, -inf, 2.f, -inf, -inf, -inf, 1.f, inf, 0.f, NAN, 1.f, 2.f, 88.f, -88.f, 3e38f}).view({5, 3});
  const auto run = [&](bool check) {
    const Tensor wanted = functional::softmax(x, -1);
    const RowsHere here;
    const Tensor found = functional::softmax(x, -1);
    if (check) EXPECT_TRUE(at::allclose(found, wanted, 1e-6, 1e-7, /*equal_nan=*/true)) << found << wanted;
  };
  run(false);
  emulator.compile();
  run(true);
  EXPECT_EQ(emulator.started, 1);
}

TEST(FusedRows, LeaveOtherLayoutsDimensionsAndWatchedGradientsToAten) {
  cuda::Emulator emulator;
  const RowsHere here;
  functional::softmax(at::randn({4, 6}).t(), -1);
  functional::softmax(at::randn({4, 6}), 0);
  functional::softmax(at::randn({4, 6}, at::kDouble), -1);
  functional::softmax(at::randn({4, 0}), -1);
  functional::softmax(at::randn({4, 6}).to(at::kHalf), -1, at::kFloat);
  functional::rms_norm(at::randn({4, 6}), {6}, at::ones({6}, at::kDouble));
  const Tensor x = at::randn({4, 6}).requires_grad_();
  const auto first = torch::autograd::grad({functional::rms_norm(x.t(), {4}).pow(2).sum()}, {x}, {},
                                           /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(torch::autograd::grad({first[0].square().sum()}, {x})[0].defined());
  EXPECT_EQ(emulator.declined, 0) << "a kernel was asked for";
  functional::softmax(at::randn({4, 6}), 1);
  EXPECT_EQ(emulator.declined, 1);
}

}  // namespace
}  // namespace plumb
