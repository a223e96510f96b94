// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
#pragma once

#include <cstdint>

namespace plumb {

// A bijection of 64-bit numbers each bit of whose result depends on all of x.
inline std::uint64_t mix_bits(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Returns one number that depends on every bit of both.
inline std::uint64_t mix_seeds(std::uint64_t a, std::uint64_t b) { return mix_bits(a * 0x9E3779B97F4A7C15u + b); }

}  // namespace plumb
