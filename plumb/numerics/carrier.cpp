#include "plumb/numerics/carrier.h"

#include <cmath>
#include <limits>

#include "plumb/core/error.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace plumb {
namespace {

struct CarrierRange {
  int mantissa_bits;
  double max;
};
constexpr CarrierRange kRanges[kernel::kCarriers] = {
    {23, std::numeric_limits<float>::max()}, {52, std::numeric_limits<double>::max()}, {10, 65504.0}, {7, 0x1.fep127}};

// The allocator maps blocks of this size on their own and gives them back whole, so the advice dies with them.
constexpr size_t kHugePageBytes = size_t(33) << 20;

}  // namespace

kernel::Carrier carrier_of(at::ScalarType dtype, const char* what) {
  switch (dtype) {
    case at::kFloat: return kernel::kFloat32;
    case at::kDouble: return kernel::kFloat64;
    case at::kHalf: return kernel::kFloat16;
    case at::kBFloat16: return kernel::kBFloat16;
    default:
      throw Error(ErrorKind::TensorMismatch, std::string(what) + " does not take tensors of " + c10::toString(dtype),
                  "", "give float32, float64, float16 or bfloat16");
  }
}

void check_tensor(const at::Tensor& x, const char* what) {
  if (!x.defined()) throw Error(ErrorKind::TensorMismatch, std::string(what) + " was given an undefined tensor");
  if (x.is_meta())
    throw Error(ErrorKind::TensorMismatch, std::string(what) + " was given a tensor on the meta device, without values",
                "", "give it values first, or call the operator of torch.ops.plumb");
  if (x.layout() != at::kStrided)
    throw Error(ErrorKind::TensorMismatch, std::string(what) + " was given a tensor that is not strided", "",
                "make it dense first (to_dense)");
  if (!has_own_memory(x))
    throw Error(
        ErrorKind::TensorMismatch,
        std::string(what) +
            " was given a tensor of a class of Python's whose values are in other tensors (DTensor and the like)",
        "", "give it a plain tensor: full_tensor() or to_local() of a DTensor");
}

bool has_own_memory(const at::Tensor& x) {
  if (!x.key_set().has(c10::DispatchKey::Python) || x.numel() == 0) return true;
  return x.has_storage() && x.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

kernel::RoundingSpec rounding_spec(const FPFormat& given, kernel::Carrier carrier) {
  // Refuses bits that a program has set out of range itself.
  const FPFormat format = given.with_rounding(given.rounding, given.srbits);
  kernel::RoundingSpec spec;
  switch (format.rounding) {
    case Rounding::Nearest: spec.mode = kernel::RoundingSpec::Nearest; break;
    case Rounding::Stochastic: spec.mode = kernel::RoundingSpec::Stochastic; break;
    case Rounding::TowardZero: spec.mode = kernel::RoundingSpec::TowardZero; break;
  }
  spec.exponent_bits = format.exponent_bits;
  spec.mantissa_bits = format.mantissa_bits;
  spec.bias = format.bias();
  spec.random_bits = format.srbits;
  spec.saturate = format.saturate;
  spec.negative_zero = format.has_negative_zero();
  const CarrierRange& range = kRanges[carrier];
  double max = std::min(format.max_absolute_value(), range.max);
  int kept = std::min(format.mantissa_bits, range.mantissa_bits), exponent;
  double fraction = std::frexp(max, &exponent);
  spec.max = std::ldexp(std::floor(std::ldexp(fraction, kept + 1)), exponent - kept - 1);
  spec.overflow = format.saturate         ? spec.max
                  : format.has_infinity() ? std::numeric_limits<double>::infinity()
                                          : std::numeric_limits<double>::quiet_NaN();
  return spec;
}

kernel::Carrier computed_in(kernel::Carrier carrier) {
  return carrier == kernel::kFloat64 ? kernel::kFloat64 : kernel::kFloat32;
}

kernel::BlockSpec block_spec(const FPFormat& format, kernel::Carrier carrier) {
  if (format.block_size < 1)
    throw Error(ErrorKind::InvalidArgument, "a number format has blocks of " + std::to_string(format.block_size), "",
                "take a format by its name, FPFormat::parse(\"mxfp8\"), which knows its blocks");
  const FPFormat scales = FPFormat::parse("e4m3fn-RN");
  kernel::BlockSpec spec;
  spec.size = format.block_size;
  spec.power_of_two = format.block_scale == BlockScale::PowerOfTwo;
  spec.element_exponent = format.max_exponent();
  spec.element_max = format.max_absolute_value();
  spec.scale_max = scales.max_absolute_value();
  spec.largest = kRanges[carrier].max;
  spec.scale_rounding = rounding_spec(scales, computed_in(carrier));
  return spec;
}

bool is_dense(const at::Tensor& x) { return x.is_contiguous() || x.is_non_overlapping_and_dense(); }

at::Tensor fresh_like(const at::Tensor& x, at::ScalarType dtype) {
  at::Tensor result = at::empty_like(x, x.options().dtype(dtype));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (result.is_cpu() && result.nbytes() >= kHugePageBytes) {
    constexpr uintptr_t page = uintptr_t(2) << 20;
    uintptr_t begin = reinterpret_cast<uintptr_t>(result.mutable_data_ptr());
    uintptr_t from = (begin + page - 1) & ~(page - 1), to = (begin + result.nbytes()) & ~(page - 1);
    if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
  }
#endif
  return result;
}

}  // namespace plumb
