// A random order of the numbers below n, without a list of them.
#pragma once

#include <array>
#include <cstdint>

namespace plumb {

// A permutation of 0 ... n - 1 by a key, in constant memory: a Feistel network over the smallest even number of bits
// that holds n, applied again until the value is below n ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary
// Finite Domains, CT-RSA 2002, section 3). Six rounds; the round function is mix_bits(). Under four applications on
// average. The same on every machine.
class Permutation {
 public:
  // n from 1 to 2^62.
  Permutation(int64_t n, uint64_t key);
  // i from 0 to n - 1.
  int64_t operator()(int64_t i) const;

 private:
  uint64_t n_, mask_ = 0;
  int half_bits_ = 1;
  std::array<uint64_t, 6> keys_{};
};

}  // namespace plumb
