// The kernels' own texts, run on this machine, against the CPU's operators.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/cuda/emulator_testing.h"
#include "plumb/cuda/kernels.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/blocks.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/dropout_noise.h"
#include "plumb/numerics/element.h"
#include "plumb/numerics/hash.h"
#include "plumb/numerics/operators.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/values_testing.h"
#include "plumb/pointwise/pointwise.h"

namespace plumb::cuda {
namespace {

using at::Tensor;
using values_testing::all_16_bit_values;
using values_testing::float_grid;
using values_testing::same_bits;

// CPU tensors take the CUDA kernels, run by the emulator, while one lives.
class CudaKernels : public ::testing::Test {
 protected:
  CudaKernels() { register_device_kernels(at::kCPU, &numerics_kernels()); }
  ~CudaKernels() override { register_device_kernels(at::kCPU, nullptr); }
  Emulator emulator;
};

std::vector<Tensor> rounding_values() {
  return {float_grid(), all_16_bit_values(at::kHalf), all_16_bit_values(at::kBFloat16)};
}

TEST_F(CudaKernels, RoundEveryValueToTheBitsOfTheCpu) {
  std::vector<FPFormat> formats;
  for (const char* text : values_testing::kFormats) {
    formats.push_back(FPFormat::parse(text));
    if (formats.back().mantissa_bits < 23) {
      formats.push_back(formats.back().with_rounding(Rounding::Stochastic));
      formats.push_back(formats.back().with_rounding(Rounding::Stochastic, 1));
    }
  }
  int checked = 0;
  emulated(emulator, [&] {
    for (const Tensor& x : rounding_values())
      for (const FPFormat& format : formats) {
        // A few values are enough to choose a kernel.
        const Tensor y = aten_kernels::quantise(emulator.compiled ? x : x.slice(0, 0, 256), format, 12345);
        if (!emulator.compiled) continue;
        ++checked;
        EXPECT_TRUE(same_bits(y, quantise(x, format, 12345))) << format.to_string() << " " << x.scalar_type();
      }
  });
  EXPECT_EQ(emulator.declined, 0);
  EXPECT_EQ(checked, int(3 * formats.size()));
}

TEST_F(CudaKernels, RoundAnyLengthStridesAndPlaceInMemory) {
  const Tensor base = at::randn({5000}), matrix = at::randn({37, 29});
  const FPFormat nearest = FPFormat::parse("E4M3-RN"), random = FPFormat::parse("E5M2-SR");
  const std::vector<Tensor> tensors = {base.slice(0, 0, 1),       base.slice(0, 0, 255),  base.slice(0, 1, 258),
                                       base.slice(0, 3, 4999),    base.slice(0, 0, 4096), matrix.t(),
                                       matrix.slice(1, 0, 29, 3), base.slice(0, 0, 0)};
  emulated(emulator, [&] {
    for (const auto& format : {nearest, random})
      for (const Tensor& x : tensors) {
        const Tensor y = aten_kernels::quantise(x, format, 7);
        EXPECT_TRUE(same_bits(y, quantise(x, format, 7))) << x.sizes();
        Tensor place = x.is_non_overlapping_and_dense() ? x.clone() : x.contiguous();
        if (place.numel() > 0 && aten_kernels::quantise_into(place, place, format, 7))
          EXPECT_TRUE(same_bits(place, quantise(x, format, 7))) << x.sizes();
      }
  });
  EXPECT_EQ(emulator.declined, 0);
}

TEST_F(CudaKernels, KeepByChanceWithTheBitsOfTheCpu) {
  const Tensor memory = at::empty({40000});
  emulated(emulator, [&] {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16})
      for (const int64_t n : {1, 255, 256, 4097, 30000})
        for (const int64_t skipped : {0, 3}) {  // where a vector store may begin, and where not
          const Tensor noise = memory.view(dtype).narrow(0, skipped, n);
          for (const double kept : {0.9, 0.5, 1e-12}) {
            aten_kernels::keep(noise, 1.7, kernel::last_word_of(kept), 12345);
            EXPECT_TRUE(same_bits(noise, dropout_noise(noise, kept, 1.7, 12345))) << dtype << " " << n << " " << kept;
          }
        }
  });
  EXPECT_EQ(emulator.declined, 0);
}

TEST_F(CudaKernels, HashToTheNumberOfTheCpu) {
  const Tensor memory = at::randn({300000});
  emulated(emulator, [&] {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16})
      for (const int64_t n : {0, 1, 127, 4097, 299999}) {
        const Tensor x = memory.narrow(0, 1, n).to(dtype), sum = aten_kernels::hash(x);
        EXPECT_EQ(static_cast<uint64_t>(sum.item<int64_t>()), hash_of(x)) << dtype << " " << n;
      }
  });
  EXPECT_EQ(emulator.declined, 0);
}

TEST_F(CudaKernels, EncodeAndDecodeToTheBitsOfTheCpu) {
  emulated(emulator, [&] {
    for (const char* text : {"e4m3fn-RN", "e5m2-RN-inf", "e4m3fnuz-RN", "E4M3-RN", "e2m1fn-RN", "E2M1-SR", "e3m4-RN"}) {
      const FPFormat format = FPFormat::parse(text);
      for (const Tensor& x : rounding_values()) {
        const Tensor codes = aten_kernels::encode(x, format, 3);
        EXPECT_TRUE(same_bits(codes, encode(x, format, 3))) << text << " " << x.scalar_type();
      }
      const Tensor codes = at::arange(256, at::kInt).to(at::kByte).repeat({3}).slice(0, 0, 701);
      for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16})
        EXPECT_TRUE(same_bits(aten_kernels::decode(codes, format, dtype), decode(codes, format, dtype)))
            << text << " " << dtype;
    }
  });
  EXPECT_EQ(emulator.declined, 0);
}

TEST_F(CudaKernels, RoundBlocksToTheBitsOfTheCpu) {
  Tensor wild = at::randn({67, 96}) * at::exp(at::randn({67, 96}) * 8);
  wild.index_put_({0, 3}, INFINITY), wild.index_put_({1, 40}, NAN), wild.select(0, 2).zero_();
  const std::vector<Tensor> tensors = {wild, at::randn({9, 41}), at::randn({5}), at::full({}, 3.0f)};
  emulated(emulator, [&] {
    for (const char* text : {"mxfp8", "mxfp4", "mxfp6", "nvfp4", "mxfp8e5m2-SR"}) {
      const FPFormat format = FPFormat::parse(text);
      for (const Tensor& x : tensors)
        for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
          const Tensor values = x.to(dtype);
          const auto made = aten_kernels::round_blocks(values, format, 99, true);
          const auto codes = encode_blocks(values, format, 99);
          EXPECT_TRUE(same_bits(made.values, quantise_blocks(values, format, 99, -1))) << text << " " << dtype;
          EXPECT_TRUE(same_bits(made.codes, codes.codes)) << text << " " << dtype << x.sizes();
          EXPECT_TRUE(same_bits(made.scales, codes.scales)) << text << " " << dtype << x.sizes();
          EXPECT_EQ(made.unit.item<double>(), codes.tensor_scale.item<double>()) << text << " " << dtype;
        }
    }
  });
  EXPECT_EQ(emulator.declined, 0);
}

void expect_close(const TensorMetrics& found, const TensorMetrics& wanted, const std::string& what) {
  const auto near = [&](double a, double b) {
    EXPECT_TRUE((std::isnan(a) && std::isnan(b)) || a == b || std::abs(a - b) <= 1e-6 * std::abs(b)) << what << a << b;
  };
  near(found.mean_abs, wanted.mean_abs);
  near(found.std, wanted.std);
  EXPECT_TRUE((std::isnan(found.abs_mean) && std::isnan(wanted.abs_mean)) || found.abs_mean == wanted.abs_mean ||
              std::abs(found.abs_mean - wanted.abs_mean) <= 1e-6 * wanted.mean_abs)
      << what;
  EXPECT_TRUE(found.abs_max == wanted.abs_max || std::isnan(wanted.abs_max)) << what;
  EXPECT_TRUE(found.abs_min == wanted.abs_min || std::isnan(wanted.abs_min)) << what;
  EXPECT_EQ(found.nan_count, wanted.nan_count) << what;
  EXPECT_EQ(found.inf_count, wanted.inf_count) << what;
  EXPECT_EQ(found.zero_count, wanted.zero_count) << what;
  ASSERT_EQ(found.histogram.has_value(), wanted.histogram.has_value()) << what;
  if (wanted.histogram) EXPECT_EQ(found.histogram->counts, wanted.histogram->counts) << what;
}

TEST_F(CudaKernels, MeasureWithTheCountsOfTheCpuAndSumsWithinAMillionth) {
  Tensor special = at::randn({3000});
  special.slice(0, 0, 3000, 7).zero_(), special[5] = INFINITY, special[700] = -INFINITY;
  Tensor with_nan = special.clone();
  with_nan[2999] = NAN;
  const std::vector<Tensor> tensors = {at::randn({100000}),
                                       at::randn({1}),
                                       at::randn({4097}) + 1e4,
                                       at::randn({513}) * 1e-30,
                                       at::randn({777}) * 1e30,
                                       special,
                                       with_nan,
                                       at::full({300}, 1.5f),
                                       at::randn({50, 60}).t()};
  emulated(emulator, [&] {
    for (const Tensor& each : tensors)
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
        for (const bool histogram : {false, true}) {
          const Tensor x = each.to(dtype);
          const auto wanted = measure(x, {histogram});
          const std::string what = c10::str(x.sizes(), dtype, " ");
          expect_close(aten_kernels::metrics_of(aten_kernels::gather_metrics(x, histogram), x.numel()), wanted, what);
          expect_close(metrics_of_tensor(aten_kernels::tensor_metrics(x, histogram)), wanted, what);
        }
  });
  EXPECT_EQ(emulator.declined, 0);
}

TEST_F(CudaKernels, RoundAndMeasureInOnePass) {
  const Tensor x = at::randn({12345}) * 20;
  const FPFormat format = FPFormat::parse("E3M2-SR");
  emulated(emulator, [&] {
    for (const bool histogram : {false, true}) {
      Tensor before, after;
      const int started = emulator.started;
      const Tensor y = aten_kernels::quantise_and_gather(x, format, 5, histogram, &before, &after);
      if (emulator.compiled) EXPECT_EQ(emulator.started - started, 3) << "a pass, and two ends of a measurement";
      EXPECT_TRUE(same_bits(y, quantise(x, format, 5)));
      expect_close(aten_kernels::metrics_of(before, x.numel()), measure(x, {histogram}), "before ");
      expect_close(aten_kernels::metrics_of(after, x.numel()), measure(y, {histogram}), "after ");
    }
  });
  EXPECT_EQ(emulator.declined, 0);
}

// Warnings of torch.
struct Warnings : c10::WarningHandler {
  std::vector<std::string> texts;
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
};

TEST(CudaKernelsWithoutAGpu, LeaveTheWorkToAtenAndSayWhyOnce) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "here they have a GPU";
  Warnings warnings;
  c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  register_device_kernels(at::kCPU, &numerics_kernels());
  const FPFormat format = FPFormat::parse("e4m3fn-SR");
  for (int i = 0; i < 3; ++i) {
    const Tensor x = at::randn({1000});
    EXPECT_TRUE(same_bits(aten_kernels::quantise(x, format, 8), quantise(x, format, 8)));
    Tensor place = x.clone();
    EXPECT_FALSE(aten_kernels::quantise_into(place, place, format, 8));
    EXPECT_TRUE(same_bits(place, x));
  }
  register_device_kernels(at::kCPU, nullptr);
  ASSERT_EQ(warnings.texts.size(), 1u);
  EXPECT_THAT(warnings.texts[0], ::testing::HasSubstr("CUDA kernels are not used"));
  // The driver, if torch is built for CUDA.
  EXPECT_THAT(warnings.texts[0],
              ::testing::AnyOf(::testing::HasSubstr("libtorch_cuda.so"), ::testing::HasSubstr("libcuda.so.1")));
}

// --- pointwise programs

Tensor run_program(const char* text, const std::vector<Tensor>& inputs, std::vector<Tensor>* gradients) {
  std::vector<Tensor> leaves;
  for (const Tensor& x : inputs) leaves.push_back(x.detach().clone().requires_grad_());
  const Tensor y = ops::pointwise(leaves, text);
  (y.to(at::kFloat) * at::linspace(-1, 2, y.numel()).view(y.sizes())).sum().backward();
  for (const Tensor& x : leaves) gradients->push_back(x.grad());
  return y.detach();
}

TEST(CudaPointwise, ComputesProgramsAndTheirGradients) {
  // Exact: the CPU's bits. Its square roots may be MKL's, which are not rounded exactly.
  struct Case {
    const char* program;
    int inputs;
    bool exact;
  };
  const std::vector<Case> cases = {
      {"add #0 #1; mul $0 #2; scale $1 0.5 0.25; neg $2", 3, true},
      {"sub #0 #1; relu! $0; add $1 2", 2, true},
      {"mul #0 0.75; div $0 4; sub $1 #1", 2, true},
      {"div #0 #1; neg $0", 2, true},
      {"div #0 #1; sqrt! $0", 2, false},
      {"sigmoid #0; mul $0 #1", 2, false},
      {"tanh #0; exp $0", 1, false},
      {"silu #0; mul! $0 #1; gelu $1; gelu_tanh $2", 2, false},
  };
  Emulator emulator;
  const auto run_all = [&](bool check) {
    for (const Case& c : cases)
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        torch::manual_seed(1);
        std::vector<Tensor> inputs, found, wanted;
        for (int i = 0; i < c.inputs; ++i) inputs.push_back((at::rand({1031}) + 0.1).to(dtype));
        pointwise_parts::register_pointwise_kernels(at::kCPU, &pointwise_kernels());
        const Tensor y = run_program(c.program, inputs, &found);
        pointwise_parts::register_pointwise_kernels(at::kCPU, nullptr);
        if (!check) continue;
        const Tensor expected = run_program(c.program, inputs, &wanted);
        const double tolerance = c.exact ? 0 : dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 4e-3 : 3e-2;
        EXPECT_TRUE(at::allclose(y, expected, tolerance, tolerance)) << c.program << " " << dtype;
        for (size_t i = 0; i < wanted.size(); ++i)
          EXPECT_TRUE(at::allclose(found[i], wanted[i], tolerance, tolerance)) << c.program << " " << dtype << " " << i;
      }
  };
  run_all(false);
  emulator.compile();
  run_all(true);
  EXPECT_EQ(emulator.declined, 0);
  EXPECT_GE(emulator.started, int(2 * 3 * cases.size()));
}

}  // namespace
}  // namespace plumb::cuda
