#include "plumb/numerics/hash.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/kernels.h"

namespace plumb {
namespace {

using at::Tensor;

// As the header says it, a word at a time.
uint64_t by_the_book(const Tensor& x) {
  const Tensor dense = x.contiguous();
  const auto* bytes = static_cast<const uint8_t*>(dense.const_data_ptr());
  const size_t size = std::min<size_t>(x.element_size(), 4);
  uint64_t sum = 0, key = 1;
  for (int64_t i = 0; i < hashed_words(x); ++i, key *= kernel::kHashKey) {
    uint32_t word = 0;
    std::memcpy(&word, bytes + static_cast<size_t>(i) * size, size);
    sum += key * (word ^ word >> 16);
  }
  return sum;
}

std::vector<Tensor> tensors() {
  at::manual_seed(3);
  const Tensor x = at::randn({700, 900}), y = at::randn({5, 7, 33});
  return {x,
          x.t(),
          y,
          y.permute({2, 0, 1}),
          y.to(at::kDouble),
          y.to(at::kHalf),
          x.to(at::kBFloat16),
          x > 0,
          (x * 1000).to(at::kLong),
          y.slice(2, 1, 30, 3),
          at::randn({}),
          at::empty({0, 3}),
          at::full({1}, NAN),
          y.to(at::kFloat8_e4m3fn)};
}

TEST(Hash, IsTheSumThatItsHeaderSays) {
  for (const Tensor& x : tensors()) EXPECT_EQ(hash_of(x), by_the_book(x)) << x.sizes() << x.dtype();
}

TEST(Hash, IsTheSameWithEveryInstructionSetAndNumberOfThreads) {
  const kernel::KernelTable* tables[3];
  const int count = kernel::runnable_kernels(tables);
  for (const Tensor& x : tensors()) {
    const Tensor dense = x.contiguous();
    for (int i = 0; i < count; ++i) {
      const auto run = tables[i]->hash[std::min<size_t>(x.element_size(), 4) / 2];
      EXPECT_EQ(run(dense.const_data_ptr(), hashed_words(x)), hash_of(x)) << tables[i]->level;
    }
  }
  const int threads = at::get_num_threads();
  const Tensor large = at::randn({1 << 20});
  const uint64_t wanted = by_the_book(large);
  for (const int n : {1, 3}) {
    at::set_num_threads(n);
    EXPECT_EQ(hash_of(large), wanted) << n;
  }
  at::set_num_threads(threads);
}

TEST(Hash, IsTheSameInOperatorsOfAnyDevice) {
  for (const Tensor& x : tensors()) {
    EXPECT_EQ(static_cast<uint64_t>(aten_kernels::hash(x).item<int64_t>()), hash_of(x)) << x.sizes() << x.dtype();
    EXPECT_EQ(static_cast<uint64_t>(ops::tensor_hash(x).item<int64_t>()), hash_of(x));
  }
}

TEST(Hash, ChangesWithEveryBit) {
  const Tensor x = at::randn({3, 1000}), bits = x.view(at::kInt);
  const uint64_t before = hash_of(x);
  for (int64_t place = 0; place < 3000; place += 177) {
    for (int bit = 0; bit < 32; ++bit) {
      const Tensor word = bits.view(-1)[place];
      const auto flipped = static_cast<int32_t>(word.item<int32_t>() ^ (1u << bit));
      const auto old = word.item<int32_t>();
      word.fill_(flipped);
      EXPECT_NE(hash_of(x), before) << place << " " << bit;
      // The same bit of another word, too.
      const Tensor other = bits.view(-1)[(place + 1024) % 3000];
      const auto other_old = other.item<int32_t>();
      other.fill_(static_cast<int32_t>(other_old ^ (1u << bit)));
      EXPECT_NE(hash_of(x), before) << place << " " << bit;
      other.fill_(other_old);
      word.fill_(old);
    }
  }
  EXPECT_EQ(hash_of(x), before);
}

TEST(Hash, OfPartsAddsUpToThatOfTheWhole) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const Tensor x = at::randn({24, 5, 31}).to(dtype);
    uint64_t sum = 0;
    int64_t words = 0;
    for (const Tensor& part : x.split({5, 1, 18})) {
      sum += hash_after(hash_of(part), words);
      words += hashed_words(part);
    }
    EXPECT_EQ(sum, hash_of(x)) << dtype;
  }
}

}  // namespace
}  // namespace plumb
