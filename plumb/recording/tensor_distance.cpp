// How far apart two tensors are.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "plumb/core/text.h"
#include "plumb/recording/diff.h"

namespace plumb {
namespace {

// Returns the elements as a plain tensor on the CPU.
at::Tensor plain(const at::Tensor& given) {
  if (!given.defined())
    throw Error(ErrorKind::InvalidArgument, "an undefined tensor has no values", "",
                "compare tensors that have values");
  if (given.is_meta() || given.is_nested()) {
    throw Error(ErrorKind::InvalidArgument, given.is_meta() ? "a meta tensor has no values" : "a nested tensor", "",
                "compare tensors that have one size and values");
  }
  at::Tensor x = given.detach();
  if (x.layout() != at::kStrided) x = x.to_dense();
  if (x.is_quantized()) x = x.dequantize();  // integers alone do not say their scale
  x = x.resolve_conj().resolve_neg().cpu().contiguous();
  if (x.is_complex()) x = at::view_as_real(x);
  return x.scalar_type() == at::kFloat4_e2m1fn_x2 ? x.view(at::kByte) : x;
}

at::Tensor bits_of(const at::Tensor& x) {
  const auto size = x.element_size();
  return x.view(size == 8 ? at::kLong : size == 4 ? at::kInt : size == 2 ? at::kShort : at::kChar);
}

// Returns the bits of floating-point numbers as integers that are in the order of the numbers.
at::Tensor ordered_bits(const at::Tensor& x) {
  const at::Tensor bits = bits_of(x).to(at::kLong);
  const auto least = static_cast<int64_t>(uint64_t{1} << (8 * static_cast<unsigned>(x.element_size()) - 1));
  return at::where(bits < 0, (x.element_size() == 8 ? least : -least) - bits, bits);
}

double most_ulps(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = ordered_bits(a), y = ordered_bits(b);
  const at::Tensor apart = (x.to(at::kDouble) - y.to(at::kDouble)).abs();
  constexpr double kFar = 1e18;  // 64-bit integers overflow beyond, doubles are not exact below
  return at::where(apart < kFar, (x - y).abs().to(at::kDouble), apart).max().item<double>();
}

// Adds the norm of a part to that of the parts before it. Squares of doubles below 1e-154 are 0, of those above 1e154
// infinite.
void add_norm(long double& norm, const at::Tensor& part) {
  const double most = part.abs().max().item<double>();
  if (most != 0) norm = std::hypot(norm, static_cast<long double>(most) * (part / most).norm().item<double>());
}

}  // namespace

TensorDistance distance_between(const at::Tensor& a_given, const at::Tensor& b_given) {
  const at::NoGradGuard no_grad;
  const at::Tensor a = plain(a_given), b = plain(b_given);
  TensorDistance out;
  out.elements = a_given.numel();
  out.ulps = out.relative = NAN;
  if (a_given.scalar_type() != b_given.scalar_type())
    out.types = c10::str(a_given.scalar_type(), " and ", b_given.scalar_type());
  if (a.sizes() != b.sizes()) {
    out.other_sizes = true;
    out.differing = std::max<int64_t>({a_given.numel(), b_given.numel(), 1});
    return out;
  }
  const bool same_type = a.scalar_type() == b.scalar_type();
  const bool has_ulps = same_type && a.is_floating_point() && a.element_size() >= 2;
  const bool complex = a_given.is_complex() && b_given.is_complex();
  out.relative = 0;
  if (has_ulps) out.ulps = 0;
  if (same_type && at::equal(bits_of(a), bits_of(b))) return out;
  constexpr int64_t kPart = int64_t{1} << 24;  // doubles of all elements at once are many times a model's memory
  const at::Tensor all_a = a.view(-1), all_b = b.view(-1);
  long double difference = 0, own = 0;
  for (int64_t begin = 0; begin < all_a.numel(); begin += kPart) {
    const int64_t end = std::min(begin + kPart, all_a.numel());
    const at::Tensor part_a = all_a.slice(0, begin, end), part_b = all_b.slice(0, begin, end);
    const at::Tensor x = part_a.to(at::kDouble), y = part_b.to(at::kDouble);
    const at::Tensor apart =
        same_type ? bits_of(part_a) != bits_of(part_b) : (x != y).logical_and((x == x).logical_or(y == y));
    out.differing += (complex ? apart.view({-1, 2}).any(-1) : apart).sum().item<int64_t>();
    // Infinities and NaNs that both have, of a mask say, count in neither norm.
    add_norm(difference, at::where(apart, x - y, 0.0));
    add_norm(own, at::where(apart.logical_or(x.isfinite()), x, 0.0));
    if (has_ulps) out.ulps = std::max(out.ulps, most_ulps(part_a, part_b));
  }
  if (difference != 0) out.relative = static_cast<double>(difference / own);
  return out;
}

std::string TensorDistance::to_string() const {
  const std::string of_types = types.empty() ? "" : "types " + types + ", ";
  if (other_sizes) return of_types + "other sizes";
  if (differing == 0) return of_types + "equal";
  std::string text = of_types + c10::str(differing, " of ", elements, " elements");
  if (!std::isnan(ulps)) text += ", at most " + short_number(ulps) + " ulp";
  return std::isnan(relative) ? text : text + ", relative " + short_number(relative, 2);
}

}  // namespace plumb
