// What plumb's own kernels make of every value, as checksums that were written down once: the same on every CPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <string>

#include "plumb/core/checksum.h"
#include "plumb/numerics/blocks.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/dropout_noise.h"
#include "plumb/numerics/kernels.h"
#include "plumb/numerics/metrics.h"
#include "plumb/numerics/quantise.h"
#include "plumb/numerics/values_testing.h"

namespace plumb {
namespace {

using values_testing::kFormats;
constexpr uint64_t kBitsSeed = 0x0123456789abcdef;

// Any bits of 32 or 64, from a generator that the C++ standard fixes.
at::Tensor any_bits(at::ScalarType dtype, int64_t n) {
  std::mt19937_64 random(1);
  const at::Tensor bits = at::empty({n}, at::kLong);
  for (int64_t i = 0; i < n; ++i) bits.mutable_data_ptr<int64_t>()[i] = int64_t(random());
  return bits.view(dtype);
}

// Every value of 16 bits; of the wider types every turn of every exponent, and 100,000 values of any bits.
std::map<std::string, at::Tensor> values() {
  const at::Tensor grid = values_testing::float_grid();
  return {{"float16", values_testing::all_16_bit_values(at::kHalf)},
          {"bfloat16", values_testing::all_16_bit_values(at::kBFloat16)},
          {"float32", at::cat({grid, any_bits(at::kFloat, 50000)})},
          {"float64", at::cat({grid.to(at::kDouble), any_bits(at::kDouble, 100000)})}};
}

// Bits of everything added. Of a NaN it counts that it is one: CPUs choose its sign and payload.
class Bits {
 public:
  void add(const at::Tensor& t) {
    at::Tensor dense = t.contiguous();
    if (dense.is_floating_point()) dense = dense.masked_fill(dense.isnan(), std::numeric_limits<double>::quiet_NaN());
    sum_.add(dense.const_data_ptr(), dense.nbytes());
  }
  void add(double number) { add(at::scalar_tensor(number, at::kDouble)); }
  void add(int64_t number) { sum_.add(&number, sizeof number); }
  uint64_t value() const { return sum_.value; }

 private:
  Checksum sum_{.bits = 64};
};

void add_metrics(Bits& bits, const TensorMetrics& m) {
  bits.add(m.abs_max), bits.add(m.abs_min);
  for (const int64_t count : {m.numel, m.nan_count, m.inf_count, m.zero_count}) bits.add(count);
  for (const int64_t count : m.histogram->counts) bits.add(count);
}

using Sums = std::map<std::string, uint64_t>;

Sums sums_of(const std::string& dtype, const at::Tensor& x) {
  Bits nearest, chance, codes, blocks, metrics, sums, noise;
  for (const char* text : kFormats) {
    const FPFormat format = FPFormat::parse(text);
    if (format.mantissa_bits == 23) continue;  // nothing is left to chance
    const FPFormat by_chance = format.with_rounding(Rounding::Stochastic);
    nearest.add(quantise(x, format));
    chance.add(quantise(x, by_chance, kBitsSeed));
    if (format.bits() > 8) continue;
    const at::Tensor bytes = encode(x, format), by_chance_bytes = encode(x, by_chance, kBitsSeed);
    for (const at::Tensor& each : {bytes, by_chance_bytes})
      codes.add(each), codes.add(decode(each, format, x.scalar_type()));
  }
  for (const char* text : {"mxfp8e4m3", "mxfp8e5m2", "mxfp6e2m3", "mxfp6e3m2", "mxfp4", "nvfp4"}) {
    const FPFormat format = FPFormat::parse(text);
    blocks.add(quantise(x, format));
    const BlockCodes found = encode_blocks(x, format.with_rounding(Rounding::Stochastic), kBitsSeed);
    blocks.add(found.codes), blocks.add(found.scales), blocks.add(found.tensor_scale);
  }
  // Sums are the baseline's: CPUs with wide vectors take them in another order.
  const at::Tensor small = x.masked_select(x.abs() < 1000);
  add_metrics(metrics, measure(x, {.histogram = true}));
  add_metrics(metrics, measure(small, {.histogram = true}));
  const kernel::KernelTable* tables[3];
  kernel::runnable_kernels(tables);
  kernel::Partial partial;
  tables[0]->measure[carrier_of(small.scalar_type(), "test")](small.const_data_ptr(), small.numel(), partial);
  const TensorMetrics m = finish_metrics(partial, small.numel());
  sums.add(m.mean_abs), sums.add(m.abs_mean), sums.add(m.std);
  for (const double kept : {0.9, 1.0 / 3}) noise.add(dropout_noise(x, kept, 1.7, kBitsSeed));
  return {{dtype + " rounded", nearest.value()},
          {dtype + " rounded by chance", chance.value()},
          {dtype + " codes", codes.value()},
          {dtype + " blocks", blocks.value()},
          {dtype + " metrics", metrics.value()},
          {dtype + " sums of metrics", sums.value()},
          {dtype + " noise of dropout", noise.value()},
          {dtype + " crc32", crc32(x.const_data_ptr(), x.nbytes())},
          {dtype + " crc32c", crc32c(x.const_data_ptr(), x.nbytes())},
          {dtype + " crc64", crc64(x.const_data_ptr(), x.nbytes())}};
}

const Sums kWritten = {
    {"bfloat16 blocks", 0xacd98a5b809ee19e},
    {"bfloat16 codes", 0x6005b74484a20355},
    {"bfloat16 crc32", 0x11b8cf09},
    {"bfloat16 crc32c", 0x3ac03ade},
    {"bfloat16 crc64", 0xd581484c0042c4d6},
    {"bfloat16 metrics", 0xf629555ad648bea9},
    {"bfloat16 noise of dropout", 0xa1b38bfe199fc1b9},
    {"bfloat16 rounded", 0xa5dee3efe6959697},
    {"bfloat16 rounded by chance", 0x34a1631ecf91fc13},
    {"bfloat16 sums of metrics", 0x22840b68c704997a},
    {"float16 blocks", 0x499f8a44a796fa01},
    {"float16 codes", 0x29f1623d3dd6ba61},
    {"float16 crc32", 0x11b8cf09},
    {"float16 crc32c", 0x3ac03ade},
    {"float16 crc64", 0xd581484c0042c4d6},
    {"float16 metrics", 0x62429b31d5d293ff},
    {"float16 noise of dropout", 0x6df4406be0c498ef},
    {"float16 rounded", 0x3a15a1d625965572},
    {"float16 rounded by chance", 0x7e007eeb3126b407},
    {"float16 sums of metrics", 0xc607b61a8cae5261},
    {"float32 blocks", 0x3b9a5bea9cef56c4},
    {"float32 codes", 0x605f01890867407e},
    {"float32 crc32", 0x73735c6f},
    {"float32 crc32c", 0x99dc959a},
    {"float32 crc64", 0x6c92e37982a007c1},
    {"float32 metrics", 0x9d6261156f294e24},
    {"float32 noise of dropout", 0xb4ac16a578a276cf},
    {"float32 rounded", 0xd49d21cc60ef8fa1},
    {"float32 rounded by chance", 0x5ff4cfbedd11740a},
    {"float32 sums of metrics", 0x64c3193d20a0fb72},
    {"float64 blocks", 0x4f1c17f89c31bd0},
    {"float64 codes", 0x66dce3e6c33f5640},
    {"float64 crc32", 0xe9a5a2f2},
    {"float64 crc32c", 0x7708bd23},
    {"float64 crc64", 0x34e25df66a45e3f0},
    {"float64 metrics", 0x6b5bd6454610e52a},
    {"float64 noise of dropout", 0xdd7d1d0e4ddcfa94},
    {"float64 rounded", 0x43202198b19a66f5},
    {"float64 rounded by chance", 0x30f307fb62a3146},
    {"float64 sums of metrics", 0xa65388f251a04ca},
};

TEST(KernelBits, AreThoseOfEveryOtherCpu) {
  Sums found;
  for (const auto& [dtype, x] : values()) found.merge(sums_of(dtype, x));
  std::ostringstream text;
  for (const auto& [name, sum] : found) text << "    {\"" << name << "\", 0x" << std::hex << sum << "},\n";
  EXPECT_EQ(found, kWritten) << "found:\n" << text.str();
}

}  // namespace
}  // namespace plumb
