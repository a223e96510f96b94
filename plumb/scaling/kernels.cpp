#include "plumb/scaling/kernels.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <sstream>

#include "plumb/core/error.h"
#include "plumb/core/vectorized.h"
#include "plumb/scaling/constraint.h"
#include "plumb/scaling/differentiable.h"

namespace plumb {
namespace {

constexpr int64_t kGrain = 32768;

template <class T, class Acc>
PLUMB_VECTORIZED void weighted_sum_loop(const T* __restrict x, Acc a, const T* __restrict y, Acc b, T* __restrict out,
                                        int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(a * static_cast<Acc>(x[i]) + b * static_cast<Acc>(y[i]));
}

bool same_dense_layout(const at::Tensor& x, const at::Tensor& y) {
  return x.sizes() == y.sizes() && x.strides() == y.strides() && x.scalar_type() == y.scalar_type() &&
         x.is_non_overlapping_and_dense();
}

}  // namespace

std::vector<double> choose_scales(const char* op, const OptionalScales& given, const OptionalName& constraint,
                                  size_t constrained, std::vector<double> rule) {
  if (given) {
    if (given->size() != rule.size()) {
      throw Error(ErrorKind::InvalidArgument, std::string(op) + " takes " + std::to_string(rule.size()) +
                                                  " explicit scales, not " + std::to_string(given->size()) + ".");
    }
    return given->vec();
  }
  if (!constraint || constraint->empty()) return rule;
  auto tied = apply_constraint(constraint, {rule.begin(), rule.begin() + static_cast<int64_t>(constrained)});
  std::copy(tied.begin(), tied.end(), rule.begin());
  return rule;
}

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, double alpha) {
  if (recording(a) || recording(b)) return at::mm(a, b) * alpha;
  auto out = at::empty({a.size(0), b.size(1)}, a.options());
  return at::addmm_out(out, out, a, b, /*beta=*/0, alpha);
}

at::Tensor batched_gemm(const at::Tensor& a, const at::Tensor& b, double alpha) {
  if (recording(a) || recording(b)) return at::bmm(a, b) * alpha;
  auto out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
  return at::baddbmm_out(out, out, a, b, /*beta=*/0, alpha);
}

at::Tensor weighted_sum(const at::Tensor& x, double a, const at::Tensor& y, double b) {
  if (!plain(x) || !plain(y) || !x.is_cpu() || !y.is_cpu() || !same_dense_layout(x, y) ||
      !at::isFloatingType(x.scalar_type())) {
    return recording(x) || recording(y) ? x * a + y * b : at::mul(x, a).add(y, b);
  }
  auto out = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "plumb_weighted_sum", [&] {
    using Acc = at::opmath_type<scalar_t>;
    const auto* px = x.const_data_ptr<scalar_t>();
    const auto* py = y.const_data_ptr<scalar_t>();
    auto* po = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      weighted_sum_loop<scalar_t, Acc>(px + begin, static_cast<Acc>(a), py + begin, static_cast<Acc>(b), po + begin,
                                       end - begin);
    });
  });
  return out;
}

bool plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet special({DispatchKey::Python, DispatchKey::Functionalize, DispatchKey::FuncTorchBatched,
                                         DispatchKey::FuncTorchGradWrapper, DispatchKey::Negative,
                                         DispatchKey::Conjugate, DispatchKey::ZeroTensor});
  return tensor.layout() == at::kStrided && !tensor.key_set().has_any(special) && !recording(tensor) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

std::string shape_text(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sym_sizes();
  return text.str();
}

void check_gradient(const char* op, const at::Tensor& grad, at::IntArrayRef like) {
  if (grad.sizes() == like) return;
  bad_shape(op, "the gradient " + shape_text(grad) + " does not have the result's shape " + c10::str(like) + ".");
}

void check_dtype(const char* op, std::optional<at::ScalarType> dtype) {
  if (!dtype || (static_cast<int>(*dtype) >= 0 && *dtype < at::ScalarType::Undefined)) return;
  throw Error(ErrorKind::InvalidArgument,
              std::string(op) + ": " + std::to_string(static_cast<int>(*dtype)) + " is no dtype.");
}

void bad_shape(const char* op, const std::string& why) {
  throw Error(ErrorKind::TensorMismatch, std::string(op) + ": " + why);
}

int64_t leading(at::IntArrayRef sizes, size_t trailing) {
  int64_t n = 1;
  for (size_t i = 0; i + trailing < sizes.size(); ++i) n *= sizes[i];
  return n;
}

}  // namespace plumb
