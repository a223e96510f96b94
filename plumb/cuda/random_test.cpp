// Random calls of every kernel on tensors of any layout: the kernels' own texts, run on this machine, against the CPU's
// operators, and against themselves with blocks and threads in the opposite order.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "plumb/cuda/emulator_testing.h"
#include "plumb/cuda/kernels.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/blocks.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/values_testing.h"
#include "plumb/pointwise/parts.h"

namespace plumb::cuda {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using values_testing::same_bits;

struct Dice {
  std::mt19937 source;
  explicit Dice(int seed) : source(static_cast<unsigned>(seed)) {}
  int below(int n) { return static_cast<int>(source() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<int>(all.size()))];
  }
};

at::ScalarType random_type(Dice& dice) { return dice.of({at::kFloat, at::kHalf, at::kBFloat16}); }

std::vector<int64_t> random_sizes(Dice& dice) {
  std::vector<int64_t> sizes(static_cast<size_t>(dice.below(5)));
  int64_t numel = 1;
  for (int64_t& size : sizes) {
    size = dice.of<int64_t>({1, 1, 2, 3, 5, 8, 16, 31, 64, 129, 257, 1024});
    if (numel * size > 20000) size = 1;
    numel *= size;
  }
  if (!sizes.empty() && dice.one_in(12)) sizes[static_cast<size_t>(dice.below(static_cast<int>(sizes.size())))] = 0;
  return sizes;
}

Tensor random_values(Dice& dice, at::IntArrayRef sizes, at::ScalarType dtype) {
  Tensor x = at::randn(sizes) * std::exp2(dice.below(30) - 20);
  if (dice.one_in(2)) x = x * at::exp2(at::randint(-12, 12, sizes));
  for (const float special : {0.0f, -0.0f, INFINITY, -INFINITY, NAN}) {
    if (dice.one_in(4)) x = at::where(at::rand(sizes) < 0.05, special, x);
  }
  return x.to(dtype);
}

// In C order, but perhaps not where a vector load may begin.
Tensor in_c_order(Dice& dice, at::IntArrayRef sizes, at::ScalarType dtype) {
  const Tensor values = random_values(dice, sizes, dtype);
  const int64_t skipped = dice.one_in(2) ? 0 : 1 + dice.below(9);
  const Tensor memory = at::empty({values.numel() + skipped}, values.options());
  return memory.narrow(0, skipped, values.numel()).view(sizes).copy_(values);
}

Tensor random_tensor(Dice& dice, at::ScalarType dtype) {
  const auto sizes = random_sizes(dice);
  Tensor x = in_c_order(dice, sizes, dtype);
  const int64_t dims = x.dim();
  if (dims == 0 || dice.one_in(3)) return x;
  const int64_t dim = dice.below(static_cast<int>(dims)), other = dice.below(static_cast<int>(dims));
  switch (dice.below(5)) {
    case 0: return x.transpose(dim, other);
    case 1:
      return x.narrow(dim, 0, std::min<int64_t>(x.size(dim), 1)).expand(sizes[size_t(dim)] == 0 ? x.sizes() : sizes);
    case 2: return dims == 4 ? x.contiguous(at::MemoryFormat::ChannelsLast) : x.transpose(0, dims - 1);
    case 3: return x.slice(dim, 0, x.size(dim), 1 + dice.below(3));
    default: {  // far apart
      Tensor memory = at::empty({100003 * 3}, x.options());
      const Tensor there = memory.as_strided({3, 5}, {100003, 77 + dice.below(5)}, dice.below(7));
      return there.copy_(random_values(dice, {3, 5}, dtype));
    }
  }
}

struct Outcome {
  std::string what;
  Tensors found, wanted;   // bit for bit
  Tensors near, expected;  // within a millionth
};

FPFormat random_format(Dice& dice) {
  return FPFormat::parse(
      dice.of({"e4m3fn-RN", "e5m2-RN-inf", "E4M3-SR", "E3M0-RZ", "e4m3fnuz-RN", "e2m1fn-RN", "bf16-RN", "E5M2-SR3"}));
}

FPFormat random_code_format(Dice& dice) {
  return FPFormat::parse(dice.of({"e4m3fn-RN", "e5m2-RN-inf", "E4M3-SR", "e2m1fn-RN", "e3m4-RN"}));
}

// Returns the fields but the mean, which may be all but zero: its digits are those of larger sums.
Tensor without_mean(const Tensor& metrics) {
  return at::cat({metrics.narrow(0, 0, 1), metrics.slice(0, 2)}).nan_to_num(-1, 1e300);
}

Outcome rounding_case(Dice& dice) {
  const Tensor x = random_tensor(dice, random_type(dice));
  const uint64_t seed = dice.source();
  Outcome o{c10::str(x.scalar_type(), x.sizes(), " strides ", x.strides(), " "), {}, {}, {}, {}};
  switch (dice.below(5)) {
    case 0: {
      const auto format = random_format(dice);
      o.what += "quantise " + format.to_string();
      o.found = {aten_kernels::quantise(x, format, seed)};
      o.wanted = {quantise(x, format, seed)};
      break;
    }
    case 1: {
      const auto format = random_code_format(dice);
      const auto dtype = random_type(dice);
      o.what += c10::str("codes ", format.to_string(), " to ", dtype);
      const Tensor codes = encode(x, format, seed);
      o.found = {aten_kernels::encode(x, format, seed), aten_kernels::decode(codes, format, dtype)};
      o.wanted = {codes, decode(codes, format, dtype)};
      break;
    }
    case 2: {
      const auto format = FPFormat::parse(dice.of({"mxfp8", "mxfp4", "nvfp4", "mxfp8e5m2-SR"}));
      o.what += "blocks " + format.to_string();
      const auto made = aten_kernels::round_blocks(x.contiguous(), format, seed, true);
      const auto codes = encode_blocks(x.contiguous(), format, seed);
      o.found = {made.values, made.codes, made.scales};
      o.wanted = {quantise_blocks(x.contiguous(), format, seed, -1), codes.codes, codes.scales};
      break;
    }
    case 3: {
      const bool histogram = dice.one_in(2);
      o.what += "metrics";
      o.near = {without_mean(aten_kernels::tensor_metrics(x, histogram))};
      o.expected = {without_mean(ops::tensor_metrics(x, histogram))};
      break;
    }
    default: {
      const auto format = random_format(dice);
      o.what += "quantise and measure " + format.to_string();
      Tensor before, after;
      o.found = {aten_kernels::quantise_and_gather(x, format, seed, true, &before, &after)};
      o.wanted = {quantise(x, format, seed)};
      // Counts, largest and smallest.
      o.found.push_back(at::cat({before.slice(0, 4), after.slice(0, 4)}));
      register_device_kernels(at::kCPU, nullptr);
      o.wanted.push_back(at::cat({aten_kernels::gather_metrics(x, true).slice(0, 4),
                                  aten_kernels::gather_metrics(o.wanted[0], true).slice(0, 4)}));
      register_device_kernels(at::kCPU, &numerics_kernels());
    }
  }
  return o;
}

// A step of a program and those that it stands on; its place as an argument.
std::string random_step(Dice& dice, int depth, std::string& steps, int& count, int& inputs) {
  if (depth == 0 || (count > 0 && dice.one_in(4))) return "#" + std::to_string(inputs++);
  const std::string a = random_step(dice, depth - 1, steps, count, inputs);
  // (relu of -0 is -0 by torch on a CPU, 0 on a GPU.)
  const std::string name = dice.of({"add", "sub", "mul", "div", "neg", "scale"});
  std::string text = name + (dice.one_in(5) ? "! " : " ") + a;
  if (name == "scale") {
    text += dice.of({" 0.5 2", " 1.5 0.25", " 3 1"});
  } else if (name != "neg") {
    text += " " + (dice.one_in(3) ? std::string(dice.of({"0.5", "4", "-0.25"}))
                                  : random_step(dice, depth - 1, steps, count, inputs));
  }
  steps += (count > 0 ? "; " : "") + text;
  return "$" + std::to_string(count++);
}

Tensors run_program(const std::string& program, const Tensors& inputs, const Tensor& gradient, int wanted) {
  Tensors leaves, results;
  for (size_t i = 0; i < inputs.size(); i++)
    leaves.push_back(inputs[i].detach().requires_grad_(i == 0 || (wanted >> i & 1) != 0));
  results.push_back(ops::pointwise(leaves, program));
  results[0].backward(gradient);
  for (const Tensor& leaf : leaves)
    if (leaf.grad().defined()) results.push_back(leaf.grad());
  results[0] = results[0].detach();
  return results;
}

Outcome pointwise_case(Dice& dice) {
  std::string program;
  int count = 0, number = 0;
  random_step(dice, 1 + dice.below(3), program, count, number);
  const auto sizes = random_sizes(dice);
  const auto dtype = random_type(dice);
  Tensors inputs;
  for (int i = 0; i < number; i++) {
    inputs.push_back(in_c_order(dice, sizes, dtype));
    // Others than C order go step by step.
    if (dice.one_in(8) && sizes.size() > 1) inputs.back() = inputs.back().transpose(0, 1).contiguous().transpose(0, 1);
  }
  const Tensor gradient = in_c_order(dice, sizes, dtype);
  const int wanted = dice.below(256);
  Outcome o{c10::str(dtype, at::IntArrayRef(sizes), " ", program), {}, {}, {}, {}};
  pointwise_parts::register_pointwise_kernels(at::kCPU, &pointwise_kernels());
  o.found = run_program(program, inputs, gradient, wanted);
  pointwise_parts::register_pointwise_kernels(at::kCPU, nullptr);
  o.wanted = run_program(program, inputs, gradient, wanted);
  return o;
}

Outcome run_case(int seed) {
  Dice dice(seed);
  torch::manual_seed(seed);
  return dice.one_in(4) ? pointwise_case(dice) : rounding_case(dice);
}

bool near(const Tensor& found, const Tensor& wanted) {
  return found.sizes() == wanted.sizes() && at::allclose(found.to(at::kDouble), wanted.to(at::kDouble), 1e-6, 0);
}

int number_of(const char* name, int otherwise) {
  const char* given = std::getenv(name);
  return given ? std::stoi(given) : otherwise;
}

TEST(CudaRandomCalls, HaveTheCpusBitsInAnyLayoutWhateverTheOrderOfThreads) {
  const int first = number_of("PLUMB_TEST_SEED", 0), count = number_of("PLUMB_TEST_CASES", 150);
  Emulator emulator;
  register_device_kernels(at::kCPU, &numerics_kernels());
  int checked = 0;
  for (int seed = first; seed < first + count; seed++) {
    try {
      run_case(seed);
    } catch (const c10::Error&) {
      // Rows have no kernel yet.
    }
  }
  emulator.compile();
  for (int seed = first; seed < first + count; seed++) {
    emulator.run_backwards(false);
    const Outcome o = run_case(seed);
    emulator.run_backwards(true);
    const Outcome again = run_case(seed);
    const std::string what = std::to_string(seed) + ": " + o.what;
    for (size_t i = 0; i < o.found.size(); i++, checked++) {
      EXPECT_TRUE(same_bits(o.found[i], o.wanted[i])) << what << ", result " << i;
      EXPECT_TRUE(same_bits(again.found[i], o.found[i])) << what << ", backwards, result " << i;
    }
    for (size_t i = 0; i < o.near.size(); i++, checked++) {
      EXPECT_TRUE(near(o.near[i], o.expected[i])) << what << ", result " << i;
      EXPECT_TRUE(same_bits(again.near[i], o.near[i])) << what << ", backwards, result " << i;
    }
  }
  register_device_kernels(at::kCPU, nullptr);
  EXPECT_EQ(emulator.declined, 0);
  EXPECT_GT(checked, count);
}

}  // namespace
}  // namespace plumb::cuda
