#include "plumb/exported/sym_ops.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <torch/library.h>

#include <charconv>
#include <cmath>
#include <map>
#include <sstream>

#include "plumb/core/error.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/exported/sym_math.h"

namespace plumb {
namespace {

using c10::Scalar;

struct Name {
  const char* python;
  const char* op;  // without "plumb::" and overload
};
// The first row of an operator is the spelling it is written back with.
constexpr Name kNames[] = {
    {"_operator.add", "sym_add"},
    {"_operator.sub", "sym_sub"},
    {"_operator.mul", "sym_mul"},
    {"_operator.floordiv", "sym_floordiv"},
    {"_operator.truediv", "sym_truediv"},
    {"_operator.mod", "sym_mod"},
    {"_operator.pow", "sym_pow"},
    {"_operator.neg", "sym_neg"},
    {"_operator.pos", "sym_pos"},
    {"_operator.abs", "sym_abs"},
    {"_operator.eq", "sym_eq"},
    {"_operator.ne", "sym_ne"},
    {"_operator.lt", "sym_lt"},
    {"_operator.le", "sym_le"},
    {"_operator.gt", "sym_gt"},
    {"_operator.ge", "sym_ge"},
    {"_operator.and_", "sym_and"},
    {"_operator.or_", "sym_or"},
    {"_operator.lshift", "sym_lshift"},
    {"_operator.rshift", "sym_rshift"},
    {"_operator.not_", "sym_not"},
    {"torch.sym_not", "sym_not"},
    {"torch.sym_int", "sym_int"},
    {"torch.sym_float", "sym_float"},
    {"torch.sym_max", "sym_max"},
    {"torch.sym_min", "sym_min"},
    {"torch.sym_ite", "sym_ite"},
    {"torch.sym_sqrt", "sym_sqrt"},
    {"torch._sym_sqrt", "sym_sqrt"},
    {"torch.sym_sum", "sym_sum"},
    {"math.trunc", "sym_trunc"},
    {"math.floor", "sym_floor"},
    {"math.ceil", "sym_ceil"},
};

[[noreturn]] void undefined(const char* op) {
  throw Error(ErrorKind::ExecutionFailed, std::string("size arithmetic: ") + op + " has no 64-bit result here");
}

bool whole(const Scalar& a) { return a.isIntegral(/*includeBool=*/true); }

template <std::optional<int64_t> (*F)(int64_t, int64_t)>
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
std::optional<int64_t> bit_and(int64_t a, int64_t b) { return a & b; }
std::optional<int64_t> bit_or(int64_t a, int64_t b) { return a | b; }
std::optional<int64_t> larger(int64_t a, int64_t b) { return a > b ? a : b; }
std::optional<int64_t> smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <double (*F)(double, double)>
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
double py_pow(double a, double b) { return std::pow(a, b); }
double py_add(double a, double b) { return a + b; }
double py_sub(double a, double b) { return a - b; }
double py_mul(double a, double b) { return a * b; }
double py_max(double a, double b) { return b > a ? b : a; }
double py_min(double a, double b) { return b < a ? b : a; }

int compare(const Scalar& a, const Scalar& b) {  // 2: unordered
  if (whole(a) && whole(b)) return a.toLong() < b.toLong() ? -1 : a.toLong() > b.toLong();
  const double x = a.toDouble(), y = b.toDouble();
  return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;
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
  if (same && value) same = value->isBoolean() == expected->isBoolean() && compare(*value, *expected) == 0;
  if (!same) wrong_input(name, show(expected), show(value));
}
void check_text(std::string_view value, std::string_view expected, std::string_view name) {
  if (value != expected) wrong_input(name, "'" + std::string(expected) + "'", "'" + std::string(value) + "'");
}

// The sizes of inputs against the program's symbols. `spec`: lines "symbol NAME MIN MAX" ("-" for no bound) and
// "size INDEX DIM NAME-OF-INPUT EXPRESSION".
void check_sizes(at::TensorList inputs, std::string_view spec) {
  struct Range {
    std::optional<int64_t> min, max;
  };
  struct Size {
    int64_t have;
    std::string what, expr;
  };
  std::map<std::string, Range> ranges;
  std::vector<Size> sizes;
  std::istringstream lines{std::string(spec)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind, name, a, b;
    words >> kind;
    if (kind == "symbol") {
      words >> name >> a >> b;
      auto bound = [](const std::string& s) {
        int64_t v = 0;
        auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), v);
        return error == std::errc() && end == s.data() + s.size() ? std::optional(v) : std::nullopt;
      };
      ranges[name] = {bound(a), bound(b)};
    } else if (kind == "size") {
      size_t index = 0;
      int64_t dim = 0;
      words >> index >> dim >> name;
      std::getline(words >> std::ws, a);
      if (index >= inputs.size() || dim < 0 || dim >= inputs[index].dim()) continue;
      sizes.push_back({inputs[index].size(dim), "dimension " + std::to_string(dim) + " of input '" + name + "'", a});
    }
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
    const Range& range = ranges[e->text()];
    if (range.min && s.have < *range.min) mismatch(s, s.expr + " >= " + std::to_string(*range.min));
    if (range.max && s.have > *range.max) mismatch(s, s.expr + " <= " + std::to_string(*range.max));
  }
  for (const auto& [s, e] : derived) {
    auto value = e.evaluate(values);
    if (value && *value != s->have) mismatch(*s, s->expr + " = " + std::to_string(*value));
  }
}

TORCH_LIBRARY_FRAGMENT(plumb, m) {
  auto binary = [&](const char* name, auto int_fn, auto float_fn) {
    m.def((std::string(name) + ".int(Scalar a, Scalar b) -> int").c_str(), int_fn);
    m.def((std::string(name) + ".float(Scalar a, Scalar b) -> float").c_str(), float_fn);
  };
  binary("sym_add", &ints<sym_math::add>, &floats<py_add>);
  binary("sym_sub", &ints<sym_math::sub>, &floats<py_sub>);
  binary("sym_mul", &ints<sym_math::mul>, &floats<py_mul>);
  binary("sym_floordiv", &ints<sym_math::floordiv>, &floats<py_floordiv>);
  binary("sym_mod", &ints<sym_math::mod>, &floats<py_mod>);
  binary("sym_pow", &ints<sym_math::pow>, &floats<py_pow>);
  binary("sym_max", &ints<larger>, &floats<py_max>);
  binary("sym_min", &ints<smaller>, &floats<py_min>);
  m.def("sym_truediv.float(Scalar a, Scalar b) -> float", &floats<py_truediv>);
  m.def("sym_lshift.int(Scalar a, Scalar b) -> int", &ints<lshift>);
  m.def("sym_rshift.int(Scalar a, Scalar b) -> int", &ints<rshift>);
  m.def("sym_and.int(Scalar a, Scalar b) -> int", &ints<bit_and>);
  m.def("sym_or.int(Scalar a, Scalar b) -> int", &ints<bit_or>);
  m.def("sym_and.bool(bool a, bool b) -> bool", [](bool a, bool b) { return a && b; });
  m.def("sym_or.bool(bool a, bool b) -> bool", [](bool a, bool b) { return a || b; });
  m.def("sym_not.bool(bool a) -> bool", [](bool a) { return !a; });
  m.def("sym_eq.bool(Scalar a, Scalar b) -> bool", [](const Scalar& a, const Scalar& b) { return compare(a, b) == 0; });
  m.def("sym_ne.bool(Scalar a, Scalar b) -> bool", [](const Scalar& a, const Scalar& b) { return compare(a, b) != 0; });
  m.def("sym_lt.bool(Scalar a, Scalar b) -> bool",
        [](const Scalar& a, const Scalar& b) { return compare(a, b) == -1; });
  m.def("sym_gt.bool(Scalar a, Scalar b) -> bool", [](const Scalar& a, const Scalar& b) { return compare(a, b) == 1; });
  m.def("sym_le.bool(Scalar a, Scalar b) -> bool", [](const Scalar& a, const Scalar& b) { return compare(a, b) <= 0; });
  m.def("sym_ge.bool(Scalar a, Scalar b) -> bool", [](const Scalar& a, const Scalar& b) {
    const int c = compare(a, b);
    return c == 0 || c == 1;
  });
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

const char* overload(ValueType type) {
  switch (type) {
    case ValueType::Int: return ".int";
    case ValueType::Float: return ".float";
    case ValueType::Bool: return ".bool";
    default: return "";
  }
}

}  // namespace

std::optional<std::string> sym_operator(std::string_view python, ValueType result) {
  for (const Name& name : kNames) {
    if (python != name.python) continue;
    std::string op = std::string("plumb::") + name.op + overload(result);
    if (try_find_operator(op)) return op;
    // and_ and or_ on sizes are logical or bitwise; the others have one type only.
    return std::nullopt;
  }
  return std::nullopt;
}

std::optional<std::string> python_function(std::string_view op) {
  if (!op.starts_with("plumb::sym_")) return std::nullopt;
  op.remove_prefix(7);
  const std::string_view base = op.substr(0, op.find('.'));
  for (const Name& name : kNames) {
    // torch accepts torch.sym_not, not operator.not_, when it reads a file.
    if (base == name.op && std::string_view(name.python) != "_operator.not_") return name.python;
  }
  return std::nullopt;
}

}  // namespace plumb
