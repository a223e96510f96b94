// The vector kernels, one table for each CPU level, and the choice among them. No torch here.
#pragma once

#include <cstdint>

namespace plumb::kernel {

// Element types that kernels read and write; the index into the tables below.
enum Carrier { kFloat32, kFloat64, kFloat16, kBFloat16, kCarriers };

constexpr int kRandomGroup = 256;        // values that a group of random numbers serves (kernel_base.h)
constexpr int64_t kRandomBlock = 16384;  // values, in groups; splits go on its multiples
// Philox4x32's multipliers and key steps, and the last word of the counter, which sets plumb's numbers apart.
constexpr uint32_t kPhilox0 = 0xD2511F53, kPhilox1 = 0xCD9E8D57, kPhiloxKey0 = 0x9E3779B9, kPhiloxKey1 = 0xBB67AE85;
constexpr uint32_t kPhiloxDomain = 0x706c6d62;  // "plmb"
constexpr int kHistogramBins = 256;
constexpr uint64_t kHashKey = 0x9E3779B97F4A7C15;  // base of hash keys (hash.h): 5 mod 8, for the most distinct powers

// How to round to one format within one carrier: FPFormat, worked out in numbers.
struct RoundingSpec {
  enum Mode { Nearest, Stochastic, TowardZero };
  Mode mode;
  int exponent_bits, mantissa_bits;
  int bias;
  int random_bits;  // number of bits in stochastic rounding; 0: as many as the generator gives
  bool saturate;    // overflow == max
  bool negative_zero;
  double max;       // largest value that the format and the carrier both have
  double overflow;  // what larger values become: max, infinity or NaN
};

// How blocks of neighbors share a scale.
struct BlockSpec {
  int size;              // 32 where scales are powers of two, else 16
  bool power_of_two;     // else scales are rounded as scale_rounding says, in units of one number for the tensor
  int element_exponent;  // exponent of the element format's largest value
  double element_max, scale_max;  // largest element, largest scale in the tensor's unit
  double largest;                 // the carrier's largest finite value: what infinity counts as
  RoundingSpec scale_rounding;
};

// A format's one-byte codes.
struct CodeSpec {
  int mantissa_bits, bias, bits;
  int nan_code, infinity_code;  // without sign
  bool nan_is_signed;           // the sign is kept beside nan_code
  bool negative_zero;
};

// Sums that measuring gathers; merged in any order that the caller keeps fixed.
struct Partial {
  double count = 0;  // number of finite values
  double mean = 0, m2 = 0, sum_abs = 0;
  double abs_max = 0, abs_min = __builtin_inf();
  int64_t nans = 0, positive_infinities = 0, negative_infinities = 0, zeros = 0;
  // Null, or kHistogramBins counters by biased float32 exponent: 0 for zeros and |x| < 2^-126, 255 for infinity and
  // NaN.
  uint64_t* histogram = nullptr;
};

// Chan, Golub and LeVeque's merge of means and squared deviations.
static inline void merge_moments(Partial& into, double count, double mean, double m2) {
  if (count == 0) return;
  if (into.count == 0) {
    into.count = count, into.mean = mean, into.m2 = m2;  // a merge with nothing rounds nothing
    return;
  }
  double total = into.count + count, delta = mean - into.mean;
  into.mean += delta * count / total;
  into.m2 += m2 + delta * delta * into.count * count / total;
  into.count = total;
}

static inline void merge(Partial& into, const Partial& from) {
  merge_moments(into, from.count, from.mean, from.m2);
  into.sum_abs += from.sum_abs;
  if (from.abs_max > into.abs_max) into.abs_max = from.abs_max;
  if (from.abs_min < into.abs_min) into.abs_min = from.abs_min;
  into.nans += from.nans;
  into.positive_infinities += from.positive_infinities;
  into.negative_infinities += from.negative_infinities;
  into.zeros += from.zeros;
  if (into.histogram && from.histogram)
    for (int i = 0; i < kHistogramBins; ++i) into.histogram[i] += from.histogram[i];
}

struct KernelTable {
  const char* level;
  // y = x rounded; x == y is fine. Random numbers are those of the blocks of kRandomBlock values from first_block on.
  // before and after, where not null, measure x and y on the way.
  void (*round[kCarriers])(const void* x, void* y, int64_t n, const RoundingSpec&, uint64_t seed, int64_t first_block,
                           Partial* before, Partial* after);
  void (*measure[kCarriers])(const void* x, int64_t n, Partial&);
  // Values [begin, end) of rows of `length`, each row cut into blocks; begin is a multiple of kRandomBlock. Whole
  // blocks are read, beyond the range too. `spec` is the elements', in the type that is computed in. y may be x where
  // rows are whole numbers of blocks, or null; codes of elements (n) and scales (rows times blocks a row) may be null.
  void (*round_blocks[kCarriers])(const void* x, void* y, int64_t begin, int64_t end, int64_t length,
                                  const RoundingSpec& spec, const BlockSpec&, double tensor_scale, uint64_t seed,
                                  const CodeSpec*, uint8_t* codes, uint8_t* scales);
  // The largest magnitude but NaN; 0 of nothing.
  double (*largest[kCarriers])(const void* x, int64_t n);
  // Codes of values that are the format's already, signed zeros kept; false if one is NaN and the format has none.
  bool (*pack[kCarriers])(const void* x, uint8_t* codes, int64_t n, const CodeSpec&);
  // round and pack in one pass; y, which may be null, is complete even where codes are not.
  bool (*round_and_pack[kCarriers])(const void* x, void* y, uint8_t* codes, int64_t n, const RoundingSpec&,
                                    const CodeSpec&, uint64_t seed, int64_t first_block);
  // The other way, for codes whose magnitudes rise up to infinity_code and are NaN from nan_code on.
  void (*unpack[kCarriers])(const uint8_t* codes, void* y, int64_t n, const CodeSpec&);
  // values: 256 entries of the carrier.
  void (*decode[kCarriers])(const uint8_t* codes, void* y, int64_t n, const void* values);
  // y: `value` (an entry of the carrier) where the random word of its place is at most `last`, else 0.
  void (*keep[kCarriers])(void* y, int64_t n, const void* value, uint32_t last, uint64_t seed, int64_t first_block);
  // y = (x - mean) * rstd * weight + bias: rows of n values, a mean and a reciprocal deviation each.
  void (*normalize)(const float* x, float* y, int64_t rows, int64_t n, const float* mean, const float* rstd,
                    const float* weight, const float* bias);
  // Hashes of n words (hash.h) of 1, 2 and 4 bytes.
  uint64_t (*hash[3])(const void* words, int64_t n);
};

// The best table for this CPU; PLUMB_CPU=baseline|avx2|avx512 in the environment asks for a lower one.
const KernelTable& kernels();

// All that this CPU can run, best last. For tests and benchmarks.
int runnable_kernels(const KernelTable* (&tables)[3]);

}  // namespace plumb::kernel
