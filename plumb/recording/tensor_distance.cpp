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
  if (a.numel() == 0) return 0;
  const at::Tensor x = ordered_bits(a), y = ordered_bits(b);
  const at::Tensor apart = (x.to(at::kDouble) - y.to(at::kDouble)).abs();
  constexpr double kFar = 1e18;  // 64-bit integers overflow beyond, doubles are not exact below
  return at::where(apart < kFar, (x - y).abs().to(at::kDouble), apart).max().item<double>();
}

// Returns the norm of the difference over that of x. Infinities and NaNs that both have, of a mask say, count in
// neither.
double relative_distance(const at::Tensor& x, const at::Tensor& y, const at::Tensor& apart) {
  const at::Tensor difference = at::where(apart, x - y, 0.0), own = at::where(apart.logical_or(x.isfinite()), x, 0.0);
  if (!difference.any().item<bool>()) return 0;
  // Squares of doubles below 1e-154 are 0, of those above 1e154 infinite.
  const at::Tensor most = at::maximum(difference.abs().max(), own.abs().max());
  return ((difference / most).norm() / (own / most).norm()).item<double>();
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
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  const at::Tensor apart = same_type ? bits_of(a) != bits_of(b) : (x != y).logical_and((x == x).logical_or(y == y));
  const bool complex = a_given.is_complex() && b_given.is_complex();
  out.differing = (complex ? apart.any(-1) : apart).sum().item<int64_t>();
  out.relative = out.differing > 0 ? relative_distance(x, y, apart) : 0;
  if (same_type && a.is_floating_point() && a.element_size() >= 2) out.ulps = most_ulps(a, b);
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
