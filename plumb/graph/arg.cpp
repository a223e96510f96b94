#include "plumb/graph/arg.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace plumb {
namespace {

bool same_bits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b) || (a != a && b != b);
}

}  // namespace

bool Arg::has_values() const { return is_value() || (is_list() && std::ranges::any_of(list(), &Arg::has_values)); }

bool operator==(const Arg& a, const Arg& b) {
  if (a.data_.index() != b.data_.index()) return false;
  if (a.is_value()) return a.value() == b.value();
  if (a.is_list()) return a.list() == b.list();
  return same_constant(a.constant(), b.constant());
}

bool same_constant(const c10::IValue& a, const c10::IValue& b) {
  if (a.isDouble() && b.isDouble()) return same_bits(a.toDouble(), b.toDouble());
  if (a.isComplexDouble() && b.isComplexDouble()) {
    auto x = a.toComplexDouble(), y = b.toComplexDouble();
    return same_bits(x.real(), y.real()) && same_bits(x.imag(), y.imag());
  }
  if (a.isList() && b.isList()) {
    return std::ranges::equal(a.toListRef(), b.toListRef(), same_constant);
  }
  if (a.isTensor() || b.isTensor()) return a.isTensor() && b.isTensor() && a.toTensor().is_same(b.toTensor());
  if (a.tagKind() != b.tagKind()) return false;
  return a == b;
}

}  // namespace plumb
