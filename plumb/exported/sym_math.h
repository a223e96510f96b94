// Python's integer arithmetic on 64 bits: nullopt if Python would fail or the result does not fit.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

namespace plumb::sym_math {

inline std::optional<int64_t> add(int64_t a, int64_t b) {
  int64_t r;
  return __builtin_add_overflow(a, b, &r) ? std::nullopt : std::optional(r);
}
inline std::optional<int64_t> sub(int64_t a, int64_t b) {
  int64_t r;
  return __builtin_sub_overflow(a, b, &r) ? std::nullopt : std::optional(r);
}
inline std::optional<int64_t> mul(int64_t a, int64_t b) {
  int64_t r;
  return __builtin_mul_overflow(a, b, &r) ? std::nullopt : std::optional(r);
}
inline std::optional<int64_t> max(int64_t a, int64_t b) { return a > b ? a : b; }
inline std::optional<int64_t> min(int64_t a, int64_t b) { return a < b ? a : b; }
// Rounds down; the remainder has the divisor's sign.
inline std::optional<int64_t> floordiv(int64_t a, int64_t b) {
  if (b == 0 || (b == -1 && a == std::numeric_limits<int64_t>::min())) return std::nullopt;
  const int64_t q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}
inline std::optional<int64_t> mod(int64_t a, int64_t b) {
  if (b == 0) return std::nullopt;
  if (b == -1) return 0;
  const int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
inline std::optional<int64_t> pow(int64_t a, int64_t b) {
  if (b < 0) return std::nullopt;
  if (a == 0 || a == 1) return b == 0 ? 1 : a;
  if (a == -1) return b % 2 ? -1 : 1;
  int64_t r = 1;
  for (; b > 0; --b) {
    if (__builtin_mul_overflow(r, a, &r)) return std::nullopt;
  }
  return r;
}

}  // namespace plumb::sym_math
