// Messages that say of values that they come on their own, through a device's backend.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <iterator>
#include <random>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/numerics/format.h"
#include "plumb/pipeline/transport/message.h"

namespace plumb {
namespace {

// Seals a forged message: its checksums are right.
void seal_both(at::Tensor& message) {
  char* const base = static_cast<char*>(message.data_ptr());
  wire::Prologue p;
  std::memcpy(&p, base, sizeof p);
  p.body_sum = crc32(base + sizeof p, message.numel() - static_cast<std::int64_t>(sizeof p));
  wire::seal(p);
  std::memcpy(base, &p, sizeof p);
}

// Headers of direct values say how much memory is made and how it is viewed. The meta device has room for every size.
TEST(Message, OfRandomTablesMakesDenseDirectValuesOrRefuses) {
  const FPFormat format = FPFormat::parse("e4m3fn");
  const std::vector<MessageValue> values{
      {at::rand({4, 6}).t(), true}, {}, {at::randn({8, 8}), false, &format}, {at::empty({0, 3})}, {at::arange(7)}};
  auto whole = at::empty({wire::message_bytes(values, 2, at::kCPU)}, at::kByte);
  wire::write_message(static_cast<char*>(whole.data_ptr()), {}, values, {4, 6}, at::kCPU);
  constexpr std::int64_t kOne = 1, kNumbers[] = {-1, 0, 1, 2, 3, 24, 64, 1 << 16, kOne << 31, kOne << 47, kOne << 62};
  std::mt19937 random(7);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random()) % n; };
  const std::int64_t table = sizeof(wire::Prologue), rest = whole.numel() - table;
  int refused = 0, taken = 0;
  for (int i = 0; i < 20000; i++) {
    auto lie = whole.clone();
    char* const base = static_cast<char*>(lie.data_ptr()) + table;
    for (std::int64_t edits = 1 + below(3); edits > 0; edits--) {
      if (below(2) == 0) {
        base[below(rest)] = static_cast<char>(random());
      } else {
        std::memcpy(base + below(rest / 8) * 8, &kNumbers[below(std::size(kNumbers))], 8);
      }
    }
    seal_both(lie);
    try {
      const auto made = wire::make_direct_values(lie, c10::Device(at::kMeta));
      for (const auto& m : made) EXPECT_TRUE(m.numel() > 0 && m.is_non_overlapping_and_dense());
      for (const auto& v : wire::read_message(lie, std::nullopt, &format, made).values) {
        if (v.tensor.defined()) v.tensor.clone();
      }
      taken++;
    } catch (const Error& e) {
      refused++;
      EXPECT_EQ(e.kind(), ErrorKind::Communication) << e.what();
    }
  }
  EXPECT_GT(refused, 2000);
  EXPECT_GT(taken, 2000);
}

}  // namespace
}  // namespace plumb
