#include "plumb/exported/sym_expr.h"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace plumb {
namespace {

constexpr int kMaxExpressionDepth = 64;

// Printed as an operator between arguments: a sum or a product of one is printed as a call.
bool is_operator(const SymExpr& e, std::string_view name) {
  return e.kind() == SymExpr::Kind::Call && e.text() == name && e.args().size() > 1;
}

class Parser {
 public:
  Parser(std::string_view text, std::map<std::string, std::string>* spelling) : text_(text), spelling_(spelling) {}

  std::optional<SymExpr> parse() {
    auto e = sum(0);
    skip();
    if (at_ != text_.size()) return std::nullopt;
    return e;
  }

 private:
  using Result = std::optional<SymExpr>;

  void skip() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  bool eat(std::string_view token) {
    skip();
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }

  // Returns the characters from here on for which `is` holds.
  template <class Is>
  std::string_view take(const Is& is) {
    const size_t start = at_;
    while (at_ < text_.size() && is(text_[at_])) ++at_;
    return text_.substr(start, at_ - start);
  }
  static bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }
  static bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

  Result sum(int depth) {
    if (depth > kMaxExpressionDepth) return std::nullopt;
    Result first = product(depth + 1);
    if (!first) return std::nullopt;
    Chain terms("Add", std::move(*first));
    while (true) {
      const bool minus = eat("-");
      if (!minus && !eat("+")) return std::move(terms).call();
      Result right = product(depth + 1);
      if (!right) return std::nullopt;
      terms.append(minus ? SymExpr::call("Mul", {SymExpr::integer(-1), *right}) : std::move(*right));
    }
  }

  Result product(int depth) {
    Result first = power(depth + 1);
    if (!first) return std::nullopt;
    Chain factors("Mul", std::move(*first));
    while (true) {
      skip();
      if (text_.substr(at_).starts_with("**") || !eat("*")) return std::move(factors).call();
      Result right = power(depth + 1);
      if (!right) return std::nullopt;
      factors.append(std::move(*right));
    }
  }

  // a + b + c is one call of three arguments, in time linear in them.
  class Chain {
   public:
    Chain(const char* name, SymExpr first) : name_(name), first_(std::move(first)) {}
    void append(SymExpr next) {
      if (args_.empty()) {
        if (is_operator(first_, name_)) {
          args_ = first_.args();
        } else {
          args_.push_back(first_);
        }
      }
      args_.push_back(std::move(next));
    }
    SymExpr call() && { return args_.empty() ? std::move(first_) : SymExpr::call(name_, std::move(args_)); }

   private:
    const char* name_;
    SymExpr first_;
    std::vector<SymExpr> args_;
  };

  Result power(int depth) {
    if (depth > kMaxExpressionDepth) return std::nullopt;
    Result base = atom(depth + 1);
    if (!base || !eat("**")) return base;
    Result exponent = power(depth + 1);
    if (!exponent) return std::nullopt;
    return SymExpr::call("Pow", {*base, *exponent});
  }

  Result atom(int depth) {
    skip();
    if (at_ >= text_.size()) return std::nullopt;
    if (eat("(")) {
      Result inner = sum(depth + 1);
      return inner && eat(")") ? inner : std::nullopt;
    }
    const char c = text_[at_];
    const bool minus = c == '-';
    if (minus && (at_ + 1 >= text_.size() || !is_digit(text_[at_ + 1]))) {
      ++at_;
      Result inner = depth < kMaxExpressionDepth ? atom(depth + 1) : std::nullopt;
      if (!inner) return std::nullopt;
      return SymExpr::call("Mul", {SymExpr::integer(-1), *inner});
    }
    if (minus || is_digit(c)) return literal();
    if (!is_word(c)) return std::nullopt;
    const size_t start = at_;
    std::string name(take(is_word));
    if (!eat("(")) return SymExpr::symbol(std::move(name));
    if (name == "Symbol") return symbol(start);
    if (name == "Float") return number();
    std::vector<SymExpr> args;
    if (!eat(")")) {
      do {
        Result arg = sum(depth + 1);
        if (!arg) return std::nullopt;
        args.push_back(*arg);
      } while (eat(","));
      if (!eat(")")) return std::nullopt;
    }
    if (name == "Integer" && args.size() == 1 && args[0].kind() == SymExpr::Kind::Integer) return args[0];
    return SymExpr::call(std::move(name), std::move(args));
  }

  Result literal() {
    const size_t start = at_;
    if (text_[at_] == '-') ++at_;
    if (take(is_digit).empty()) return std::nullopt;
    if (at_ < text_.size() && text_[at_] == '.') {
      ++at_;
      while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                    ((text_[at_] == '-' || text_[at_] == '+') && text_[at_ - 1] == 'e')))
        ++at_;
      return SymExpr::number(std::string(text_.substr(start, at_ - start)));
    }
    int64_t value = 0;
    auto [end, error] = std::from_chars(text_.data() + start, text_.data() + at_, value);
    if (error != std::errc() || end != text_.data() + at_) return std::nullopt;
    return SymExpr::integer(value);
  }

  std::optional<std::string> quoted() {
    if (!eat("'")) return std::nullopt;
    std::string inside(take([](char c) { return c != '\''; }));
    return eat("'") ? std::optional(std::move(inside)) : std::nullopt;
  }

  // Parses the rest of Symbol('name', positive=True, ...): assumptions are kept in the spelling only.
  Result symbol(size_t start) {
    auto name = quoted();
    if (!name || name->empty() || is_digit(name->front()) || !std::ranges::all_of(*name, is_word)) return std::nullopt;
    while (eat(",")) {
      skip();
      take([](char c) { return is_word(c) || c == '='; });
    }
    if (!eat(")")) return std::nullopt;
    if (spelling_) spelling_->emplace(*name, std::string(text_.substr(start, at_ - start)));
    return SymExpr::symbol(std::move(*name));
  }

  Result number() {
    auto digits = quoted();
    if (!digits || digits->empty()) return std::nullopt;
    for (char c : *digits) {
      if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.' && c != '-' && c != '+') return std::nullopt;
    }
    take([](char c) { return c != ')'; });
    if (!eat(")")) return std::nullopt;
    return SymExpr::number(std::move(*digits));
  }

  std::string_view text_;
  std::map<std::string, std::string>* spelling_;
  size_t at_ = 0;
};

// Binding strength for brackets: sum 0, product 1, power 2, atom 3.
int strength(const SymExpr& e) {
  if (e.kind() == SymExpr::Kind::Integer) return e.value() < 0 ? 0 : 3;
  if (e.kind() == SymExpr::Kind::Number) return e.text().starts_with("-") ? 0 : 3;
  if (is_operator(e, "Add")) return 0;
  if (is_operator(e, "Mul")) return 1;
  if (is_operator(e, "Pow") && e.args().size() == 2) return 2;
  return 3;
}

std::string bracketed(const SymExpr& e, int least) {
  std::string text = e.to_infix();
  return strength(e) < least ? "(" + text + ")" : text;
}

}  // namespace

SymExpr::SymExpr(Kind kind, int64_t value, std::string text, std::vector<SymExpr> args)
    : kind_(kind),
      value_(value),
      text_(std::move(text)),
      args_(std::make_shared<const std::vector<SymExpr>>(std::move(args))) {}
SymExpr SymExpr::integer(int64_t value) { return {Kind::Integer, value, "", {}}; }
SymExpr SymExpr::number(std::string text) { return {Kind::Number, 0, std::move(text), {}}; }
SymExpr SymExpr::symbol(std::string name) { return {Kind::Symbol, 0, std::move(name), {}}; }
SymExpr SymExpr::call(std::string name, std::vector<SymExpr> args) {
  return {Kind::Call, 0, std::move(name), std::move(args)};
}

std::optional<SymExpr> SymExpr::parse(std::string_view text, std::map<std::string, std::string>* spelling) {
  return Parser(text, spelling).parse();
}

std::string SymExpr::to_infix() const {
  switch (kind_) {
    case Kind::Integer: return std::to_string(value_);
    case Kind::Number:
    case Kind::Symbol: return text_;
    case Kind::Call: break;
  }
  std::string out;
  const bool add = is_operator(*this, "Add");
  if (add || is_operator(*this, "Mul")) {
    for (size_t i = 0; i < args().size(); ++i) {
      // (a*b)*c is a*b*c, as it is read.
      const bool same = i == 0 && is_operator(args()[i], text_);
      out += (i ? (add ? " + " : "*") : "") + (same ? args()[i].to_infix() : bracketed(args()[i], add ? 1 : 2));
    }
    return out;
  }
  if (text_ == "Pow" && args().size() == 2) return bracketed(args()[0], 3) + "**" + bracketed(args()[1], 3);
  out = text_ + "(";
  for (size_t i = 0; i < args().size(); ++i) out += (i ? ", " : "") + args()[i].to_infix();
  return out + ")";
}

std::string SymExpr::to_sympy(const std::map<std::string, std::string>& spelling) const {
  switch (kind_) {
    case Kind::Integer: return "Integer(" + std::to_string(value_) + ")";
    case Kind::Number: return "Float('" + text_ + "', precision=53)";
    case Kind::Symbol: {
      auto known = spelling.find(text_);
      if (known != spelling.end()) return known->second;
      return "Symbol('" + text_ + (text_.starts_with("u") ? "', integer=True)" : "', positive=True, integer=True)");
    }
    case Kind::Call: break;
  }
  std::string out = text_ + "(";
  for (size_t i = 0; i < args().size(); ++i) out += (i ? ", " : "") + args()[i].to_sympy(spelling);
  return out + ")";
}

std::optional<int64_t> SymExpr::evaluate(const std::map<std::string, int64_t>& symbols) const {
  if (kind_ == Kind::Integer) return value_;
  if (kind_ == Kind::Number) return std::nullopt;
  if (kind_ == Kind::Symbol) {
    auto it = symbols.find(text_);
    return it == symbols.end() ? std::nullopt : std::optional(it->second);
  }
  std::vector<int64_t> v;
  for (const SymExpr& arg : args()) {
    auto value = arg.evaluate(symbols);
    if (!value) return std::nullopt;
    v.push_back(*value);
  }
  if (v.empty()) return std::nullopt;
  using Fold = std::optional<int64_t> (*)(int64_t, int64_t);
  Fold fold = nullptr;
  if (text_ == "Add") fold = sym_math::add;
  if (text_ == "Mul") fold = sym_math::mul;
  if (text_ == "Max") fold = sym_math::max;
  if (text_ == "Min") fold = sym_math::min;
  if (v.size() == 2) {
    if (text_ == "FloorDiv" || text_ == "CleanDiv") fold = sym_math::floordiv;
    if (text_ == "Mod" || text_ == "PythonMod") fold = sym_math::mod;
    if (text_ == "Pow" || text_ == "PowByNatural") fold = sym_math::pow;
  }
  if (!fold) return std::nullopt;
  int64_t value = v[0];
  for (size_t i = 1; i < v.size(); ++i) {
    auto next = fold(value, v[i]);
    if (!next) return std::nullopt;
    value = *next;
  }
  return value;
}

}  // namespace plumb
