#include "plumb/numerics/dropout_noise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

#include "plumb/core/error.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/element.h"
#include "plumb/numerics/values_testing.h"

namespace plumb {
namespace {

using values_testing::same_bits;
constexpr uint64_t kSeed = 0xfedcba9876543210;
const auto kTypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

// By torch's operators, from the words that stochastic rounding takes.
at::Tensor expected(int64_t n, double kept, double value, at::ScalarType dtype) {
  const at::Tensor words = aten_kernels::random_words(n, kSeed, at::kCPU);
  return words.lt(std::llround(kept * 0x1p32)).to(dtype) * at::scalar_tensor(value, dtype);
}

TEST(DropoutNoise, IsTheValueWhereThePhiloxWordOfThePlaceIsBelowTheProbability) {
  for (const auto dtype : kTypes)
    for (const int64_t n : {0, 1, 255, 256, 257, 5000, 300000})
      for (const double kept : {0.9, 0.5, 1.0 / 3}) {
        const at::Tensor noise = dropout_noise(at::empty({n}, dtype), kept, 1.7, kSeed);
        EXPECT_EQ(noise.scalar_type(), dtype);
        EXPECT_TRUE(same_bits(noise, expected(n, kept, 1.7, dtype))) << dtype << " " << n << " " << kept;
      }
}

TEST(DropoutNoise, HasTheSameBitsOnEveryLevelOfTheCpuAndInAtenOperators) {
  const kernel::KernelTable* tables[3];
  const int levels = kernel::runnable_kernels(tables);
  for (const auto dtype : kTypes) {
    const auto noise = dropout_noise(at::empty({40001}, dtype), 0.8, 1.1, kSeed);
    const at::Tensor one = at::full({}, 1.1, dtype), found = at::empty_like(noise);
    for (int i = 0; i < levels; ++i) {
      tables[i]->keep[carrier_of(dtype, "test")](found.mutable_data_ptr(), found.numel(), one.const_data_ptr(),
                                                 kernel::last_word_of(0.8), kSeed, 0);
      EXPECT_TRUE(same_bits(found, noise)) << tables[i]->level;
    }
    aten_kernels::keep(found, 1.1, kernel::last_word_of(0.8), kSeed);
    EXPECT_TRUE(same_bits(found, noise)) << dtype;
  }
}

TEST(DropoutNoise, DependsOnThePlaceInMemoryAlone) {
  const at::Tensor x = at::empty({37, 59});
  const at::Tensor straight = dropout_noise(x, 0.5, 2, 3), turned = dropout_noise(x.t(), 0.5, 2, 3);
  EXPECT_EQ(turned.strides(), x.t().strides());
  EXPECT_TRUE(same_bits(turned.t(), straight));
  EXPECT_TRUE(dropout_noise(x.slice(1, 0, 59, 2), 0.5, 2, 3).is_contiguous());
}

TEST(DropoutNoise, DoesNotDependOnTheNumberOfThreads) {
  const at::Tensor x = at::empty({500000});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = dropout_noise(x, 0.9, 1, kSeed);
  at::set_num_threads(3);
  const at::Tensor three = dropout_noise(x, 0.9, 1, kSeed);
  at::set_num_threads(threads);
  EXPECT_TRUE(same_bits(one, three));
  EXPECT_NEAR(one.mean().item<double>(), 0.9, 5 * std::sqrt(0.09 / 500000));
}

TEST(DropoutNoise, KnowsProbabilitiesNextToNoughtAndOne) {
  EXPECT_EQ(kernel::last_word_of(0), 0U) << "one word at least";
  EXPECT_EQ(kernel::last_word_of(1e-20), 0U);
  EXPECT_EQ(kernel::last_word_of(0x1p-32), 0U);
  EXPECT_EQ(kernel::last_word_of(0x1p-31), 1U);
  EXPECT_EQ(kernel::last_word_of(0.5), 0x7fffffffU);
  EXPECT_EQ(kernel::last_word_of(1 - 0x1p-32), 0xfffffffeU);
  EXPECT_EQ(kernel::last_word_of(1 - 0x1p-50), 0xffffffffU);
  EXPECT_EQ(kernel::last_word_of(1), 0xffffffffU);
}

TEST(DropoutNoise, RefusesOtherTypes) {
  for (const auto dtype : {at::kInt, at::kComplexFloat, at::kBool})
    EXPECT_THROW(dropout_noise(at::empty({4}, dtype), 0.5, 1, 0), Error) << dtype;
}

}  // namespace
}  // namespace plumb
