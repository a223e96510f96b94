// Size expressions ("2*s0 + 1"): read from torch.export's spelling, printed for people, written back, evaluated.
#pragma once

#include <cstdint>
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
