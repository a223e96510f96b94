// Size expressions ("2*s0 + 1"): read from torch.export's spelling, printed for people, written back, evaluated.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// An immutable expression over named symbols. Known calls: Add, Mul, Pow (printed as operators) and torch's FloorDiv,
// Mod, PythonMod, Max, Min, ...; any other call is carried unread.
class SymExpr {
 public:
  enum class Kind : uint8_t { Integer, Number, Symbol, Call };

  static SymExpr integer(int64_t value);
  static SymExpr number(std::string text);
  static SymExpr symbol(std::string name);
  static SymExpr call(std::string name, std::vector<SymExpr> args);
  // Reads both spellings: sympy's (`Add(Symbol('s0', positive=True, integer=True), Integer(1))`) and the infix one
  // (`s0 + 1`). Nothing if it is neither, or nested deeper than 64. `spelling`, if given, receives the text of every
  // Symbol(...) under its name.
  static std::optional<SymExpr> parse(std::string_view text, std::map<std::string, std::string>* spelling = nullptr);

  Kind kind() const { return kind_; }
  const std::string& text() const { return text_; }  // name of a symbol or call; digits of a number
  int64_t value() const { return value_; }
  const std::vector<SymExpr>& args() const { return *args_; }

  // "2*s0 + 1"
  std::string to_infix() const;
  // sympy's spelling; symbols as in `spelling`, otherwise positive integers (those named u0, u1, ...: integers).
  std::string to_sympy(const std::map<std::string, std::string>& spelling) const;
  // Returns nullopt if a symbol has no value, a call is unknown, or the arithmetic overflows.
  std::optional<int64_t> evaluate(const std::map<std::string, int64_t>& symbols) const;

 private:
  SymExpr(Kind kind, int64_t value, std::string text, std::vector<SymExpr> args);
  Kind kind_;
  int64_t value_;
  std::string text_;
  std::shared_ptr<const std::vector<SymExpr>> args_;
};

}  // namespace plumb

// Python's integer arithmetic on 64 bits: nullopt if Python would fail or the result does not fit.
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
