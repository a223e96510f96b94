#include "plumb/exported/sym_ops.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <torch/library.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <compare>
#include <sstream>

#include "plumb/core/error.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

using c10::Scalar;

// Python's functions, by what their names begin with; "plumb::sym_" takes its place in the operator's name.
struct Functions {
  std::string_view prefix, names;  // names: apart by spaces, one before the first and behind the last
};
constexpr Functions kFunctions[] = {
    {"_operator.", " add sub mul floordiv truediv mod pow neg pos abs eq ne lt le gt ge and_ or_ lshift rshift "},
    {"torch.sym_", " not int float max min ite sqrt sum "},
    {"math.", " trunc floor ceil "},
};

[[noreturn]] void undefined(const char* op) {
  throw Error(ErrorKind::ExecutionFailed, std::string("size arithmetic: ") + op + " has no 64-bit result here");
}

bool whole(const Scalar& a) { return a.isIntegral(/*includeBool=*/true); }

template <auto F>
int64_t ints(const Scalar& a, const Scalar& b) {
  if (!whole(a) || !whole(b)) undefined("an integer operator on a float");
  auto r = F(a.toLong(), b.toLong());
  if (!r) undefined("an integer operator");
  return *r;
}
std::optional<int64_t> lshift(int64_t a, int64_t b) {
  if (b < 0 || b > 62) return std::nullopt;
  return sym_math::mul(a, int64_t{1} << b);
}
std::optional<int64_t> rshift(int64_t a, int64_t b) {
  if (b < 0) return std::nullopt;
  return a >> std::min<int64_t>(b, 63);
}

template <auto F>
double floats(const Scalar& a, const Scalar& b) {
  return F(a.toDouble(), b.toDouble());
}
double py_mod(double a, double b) {
  if (b == 0) undefined("modulo by zero");
  const double r = std::fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
double py_floordiv(double a, double b) {
  if (b == 0) undefined("division by zero");
  return std::floor(a / b);
}
double py_truediv(double a, double b) {
  if (b == 0) undefined("division by zero");
  return a / b;
}

std::partial_ordering order(const Scalar& a, const Scalar& b) {
  if (whole(a) && whole(b)) return a.toLong() <=> b.toLong();
  return a.toDouble() <=> b.toDouble();
}
template <bool (*Holds)(std::partial_ordering)>
bool compared(const Scalar& a, const Scalar& b) {
  return Holds(order(a, b));
}

int64_t rounded(double v) {
  if (!(std::abs(v) < 9.2e18)) undefined("rounding to an integer");
  return static_cast<int64_t>(v);
}
template <double (*F)(double)>
int64_t to_int(const Scalar& a) {
  return whole(a) ? a.toLong() : rounded(F(a.toDouble()));
}
int64_t negate(const Scalar& a) {
  auto r = sym_math::sub(0, a.toLong());
  if (!r) undefined("negation");
  return *r;
}

// Inputs of a program with constants among them: the program was made for just these values.
std::string show(const std::optional<Scalar>& v) {
  if (!v) return "None";
  if (v->isBoolean()) return v->toBool() ? "True" : "False";
  std::ostringstream out;
  out << *v;
  return out.str();
}
[[noreturn]] void wrong_input(std::string_view name, const std::string& expected, const std::string& got) {
  throw Error(ErrorKind::GuardFailed,
              "input '" + std::string(name) + "' is fixed to " + expected + " in this program, got " + got, "",
              "export or capture the model again for that value");
}
void check_number(const std::optional<Scalar>& value, const std::optional<Scalar>& expected, std::string_view name) {
  bool same = value.has_value() == expected.has_value();
  if (same && value) same = value->isBoolean() == expected->isBoolean() && std::is_eq(order(*value, *expected));
  if (!same) wrong_input(name, show(expected), show(value));
}
void check_text(std::string_view value, std::string_view expected, std::string_view name) {
  if (value != expected) wrong_input(name, "'" + std::string(expected) + "'", "'" + std::string(value) + "'");
}

// The sizes of inputs against the program's symbols. `spec`: lines "symbol NAME MIN MAX" ("-" for no bound) and
// "size INDEX DIM NAME-OF-INPUT EXPRESSION".
void check_sizes(at::TensorList inputs, std::string_view spec) {
  struct Size {
    int64_t have;
    std::string what, expr;
  };
  const std::map<std::string, SizeRange> ranges = ranges_in(spec);
  std::vector<Size> sizes;
  std::istringstream lines{std::string(spec)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind, name, expr;
    size_t index = 0;
    int64_t dim = 0;
    if (!(words >> kind) || kind != "size") continue;
    words >> index >> dim >> name;
    std::getline(words >> std::ws, expr);
    if (index >= inputs.size() || dim < 0 || dim >= inputs[index].dim()) continue;
    sizes.push_back({inputs[index].size(dim), "dimension " + std::to_string(dim) + " of input '" + name + "'", expr});
  }
  std::map<std::string, int64_t> values;
  auto mismatch = [](const Size& s, const std::string& should) {
    throw Error(ErrorKind::TensorMismatch, s.what + " is " + std::to_string(s.have) + ", the program needs " + should,
                "", "give inputs whose sizes fit the exported dynamic shapes, or export again");
  };
  std::vector<std::pair<const Size*, SymExpr>> derived;
  for (const Size& s : sizes) {
    auto e = SymExpr::parse(s.expr);
    if (!e) continue;
    if (e->kind() != SymExpr::Kind::Symbol) {
      derived.emplace_back(&s, *e);
      continue;
    }
    auto [known, fresh] = values.emplace(e->text(), s.have);
    if (known->second != s.have) mismatch(s, s.expr + " = " + std::to_string(known->second));
    const auto bounded = ranges.find(e->text());
    const SizeRange range = bounded == ranges.end() ? SizeRange() : bounded->second;
    if (range.min && s.have < *range.min) mismatch(s, s.expr + " >= " + std::to_string(*range.min));
    if (range.max && s.have > *range.max) mismatch(s, s.expr + " <= " + std::to_string(*range.max));
  }
  for (const auto& [s, e] : derived) {
    auto value = e.evaluate(values);
    if (value && *value != s->have) mismatch(*s, s->expr + " = " + std::to_string(*value));
  }
}

const RegisterOperators sym_ops_rows{
    {"plumb::",
     "check_input check_sizes sym_abs sym_add sym_and sym_ceil sym_eq sym_float sym_floor sym_floordiv sym_ge sym_gt "
     "sym_int sym_ite sym_le sym_lshift sym_lt sym_max sym_min sym_mod sym_mul sym_ne sym_neg sym_not sym_or sym_pos "
     "sym_pow sym_rshift sym_sqrt sym_sub sym_sum sym_truediv sym_trunc"},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  auto binary = [&](const char* name, auto int_fn, auto float_fn) {
    m.def((std::string(name) + ".int(Scalar a, Scalar b) -> int").c_str(), int_fn);
    m.def((std::string(name) + ".float(Scalar a, Scalar b) -> float").c_str(), float_fn);
  };
  binary("sym_add", &ints<sym_math::add>, &floats<[](double a, double b) { return a + b; }>);
  binary("sym_sub", &ints<sym_math::sub>, &floats<[](double a, double b) { return a - b; }>);
  binary("sym_mul", &ints<sym_math::mul>, &floats<[](double a, double b) { return a * b; }>);
  binary("sym_floordiv", &ints<sym_math::floordiv>, &floats<py_floordiv>);
  binary("sym_mod", &ints<sym_math::mod>, &floats<py_mod>);
  binary("sym_pow", &ints<sym_math::pow>, &floats<[](double a, double b) { return std::pow(a, b); }>);
  binary("sym_max", &ints<sym_math::max>, &floats<[](double a, double b) { return std::max(a, b); }>);
  binary("sym_min", &ints<sym_math::min>, &floats<[](double a, double b) { return std::min(a, b); }>);
  m.def("sym_truediv.float(Scalar a, Scalar b) -> float", &floats<py_truediv>);
  m.def("sym_lshift.int(Scalar a, Scalar b) -> int", &ints<lshift>);
  m.def("sym_rshift.int(Scalar a, Scalar b) -> int", &ints<rshift>);
  m.def("sym_and.int(Scalar a, Scalar b) -> int", &ints<[](int64_t a, int64_t b) { return std::optional(a & b); }>);
  m.def("sym_or.int(Scalar a, Scalar b) -> int", &ints<[](int64_t a, int64_t b) { return std::optional(a | b); }>);
  m.def("sym_and.bool(bool a, bool b) -> bool", [](bool a, bool b) { return a && b; });
  m.def("sym_or.bool(bool a, bool b) -> bool", [](bool a, bool b) { return a || b; });
  m.def("sym_not.bool(bool a) -> bool", [](bool a) { return !a; });
  m.def("sym_eq.bool(Scalar a, Scalar b) -> bool", &compared<std::is_eq>);
  m.def("sym_ne.bool(Scalar a, Scalar b) -> bool", &compared<std::is_neq>);
  m.def("sym_lt.bool(Scalar a, Scalar b) -> bool", &compared<std::is_lt>);
  m.def("sym_gt.bool(Scalar a, Scalar b) -> bool", &compared<std::is_gt>);
  m.def("sym_le.bool(Scalar a, Scalar b) -> bool", &compared<std::is_lteq>);
  m.def("sym_ge.bool(Scalar a, Scalar b) -> bool", &compared<std::is_gteq>);
  m.def("sym_neg.int(Scalar a) -> int", &negate);
  m.def("sym_neg.float(Scalar a) -> float", [](const Scalar& a) { return -a.toDouble(); });
  m.def("sym_pos.int(Scalar a) -> int", [](const Scalar& a) { return a.toLong(); });
  m.def("sym_pos.float(Scalar a) -> float", [](const Scalar& a) { return a.toDouble(); });
  m.def("sym_abs.int(Scalar a) -> int", [](const Scalar& a) { return a.toLong() < 0 ? negate(a) : a.toLong(); });
  m.def("sym_abs.float(Scalar a) -> float", [](const Scalar& a) { return std::abs(a.toDouble()); });
  m.def("sym_int.int(Scalar a) -> int", &to_int<std::trunc>);
  m.def("sym_trunc.int(Scalar a) -> int", &to_int<std::trunc>);
  m.def("sym_floor.int(Scalar a) -> int", &to_int<std::floor>);
  m.def("sym_ceil.int(Scalar a) -> int", &to_int<std::ceil>);
  m.def("sym_float.float(Scalar a) -> float", [](const Scalar& a) { return a.toDouble(); });
  m.def("sym_sqrt.float(Scalar a) -> float", [](const Scalar& a) { return std::sqrt(a.toDouble()); });
  m.def("sym_ite.int(bool b, Scalar t, Scalar f) -> int",
        [](bool b, const Scalar& t, const Scalar& f) { return b ? t.toLong() : f.toLong(); });
  m.def("sym_ite.float(bool b, Scalar t, Scalar f) -> float",
        [](bool b, const Scalar& t, const Scalar& f) { return b ? t.toDouble() : f.toDouble(); });
  m.def("sym_ite.bool(bool b, bool t, bool f) -> bool", [](bool b, bool t, bool f) { return b ? t : f; });
  m.def("sym_sum.int(int[] args) -> int", [](at::IntArrayRef args) {
    int64_t total = 0;
    for (int64_t a : args) {
      auto next = sym_math::add(total, a);
      if (!next) undefined("a sum");
      total = *next;
    }
    return total;
  });
  m.def("check_input(Scalar? value, Scalar? expected, str name) -> ()", &check_number);
  m.def("check_input.str(str value, str expected, str name) -> ()", &check_text);
  m.def("check_sizes(Tensor[] inputs, str spec) -> ()", &check_sizes);
}

constexpr const char* kOverloads[] = {"", ".int", ".float", ".bool", ""};  // in the order of ValueType

}  // namespace

std::map<std::string, SizeRange> ranges_in(std::string_view spec) {
  auto bound = [](const std::string& s) {
    int64_t v = 0;
    auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), v);
    return error == std::errc() && end == s.data() + s.size() ? std::optional(v) : std::nullopt;
  };
  std::map<std::string, SizeRange> ranges;
  std::istringstream lines{std::string(spec)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind, name, min, max;
    words >> kind >> name >> min >> max;
    if (kind == "symbol") ranges.emplace(name, SizeRange{bound(min), bound(max)});
  }
  return ranges;
}

std::optional<std::string> sym_operator(std::string_view python, ValueType result) {
  // Other spellings, which are read and not written: torch accepts torch.sym_not, not operator.not_, in a file.
  if (python == "_operator.not_") python = "torch.sym_not";
  if (python == "torch._sym_sqrt") python = "torch.sym_sqrt";
  for (const auto& [prefix, names] : kFunctions) {
    if (!python.starts_with(prefix)) continue;
    const std::string name(python.substr(prefix.size()));
    if (names.find(" " + name + " ") == names.npos) return std::nullopt;
    // and_ and or_ on sizes are logical or bitwise; the others have one type only.
    std::string op = "plumb::sym_" + name.substr(0, name.find('_')) + kOverloads[static_cast<size_t>(result)];
    return try_find_operator(op) ? std::optional(op) : std::nullopt;
  }
  return std::nullopt;
}

std::optional<std::string> python_function(std::string_view op) {
  constexpr std::string_view kSym = "plumb::sym_";
  if (!op.starts_with(kSym)) return std::nullopt;
  const std::string name(op.substr(kSym.size(), op.find('.') - kSym.size()));
  for (const auto& [prefix, names] : kFunctions) {
    for (const std::string& python : {name, name + "_"}) {
      if (names.find(" " + python + " ") != names.npos) return std::string(prefix) + python;
    }
  }
  return std::nullopt;
}

}  // namespace plumb
