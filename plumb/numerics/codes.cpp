#include "plumb/numerics/codes.h"

#include <ATen/ops/empty_like.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <tuple>

#include "plumb/core/error.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/quantise.h"

namespace plumb {

kernel::CodeSpec code_spec_of(const FPFormat& format) {
  if (format.bits() > 8)
    throw Error(ErrorKind::InvalidArgument,
                "format " + format.to_string() + " has " + std::to_string(format.bits()) + " bits, a code has 8", "",
                "choose a format of at most 8 bits");
  kernel::CodeSpec spec;
  spec.mantissa_bits = format.mantissa_bits;
  spec.bias = format.bias();
  spec.bits = format.bits();
  const int sign = 1 << (spec.bits - 1), top = ((1 << format.exponent_bits) - 1) << format.mantissa_bits;
  spec.infinity_code = format.has_infinity() ? top : 0;
  spec.negative_zero = true;
  spec.nan_is_signed = true;
  switch (format.encoding) {
    case Encoding::Ieee: spec.nan_code = top | (format.mantissa_bits ? 1 << (format.mantissa_bits - 1) : 0); break;
    case Encoding::Fn: spec.nan_code = sign - 1; break;
    case Encoding::Fnuz:
    case Encoding::Plain:
    case Encoding::Finite:
      spec.nan_is_signed = false;
      spec.negative_zero = spec.bits < 8 && format.has_negative_zero();
      spec.nan_code = spec.negative_zero ? 0xff : sign;
  }
  return spec;
}

namespace {

// x, or a copy of it whose memory is in the order of `like`.
at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& x) {
  return is_dense(x) && x.strides() == like.strides() ? x : at::empty_like(like, x.options()).copy_(x);
}

kernel::CodeSpec code_spec(const FPFormat& format) {
  if (format.has_blocks())
    throw Error(ErrorKind::InvalidArgument, "the codes of " + format.to_string() + " need their blocks' scales", "",
                "use encode_blocks and decode_blocks");
  return code_spec_of(format);
}

// Every code's value in every carrier.
struct ValueTables {
  std::array<float, 256> float32;
  std::array<double, 256> float64;
  std::array<at::Half, 256> float16;
  std::array<at::BFloat16, 256> bfloat16;

  const void* of(kernel::Carrier carrier) const {
    switch (carrier) {
      case kernel::kFloat32: return float32.data();
      case kernel::kFloat64: return float64.data();
      case kernel::kFloat16: return float16.data();
      default: return bfloat16.data();
    }
  }
};

// signed_zero: the code that a format without NaN borrows for it is negative zero.
const ValueTables& value_tables(const FPFormat& format, bool signed_zero = false) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, Encoding, bool>, ValueTables> tables;
  std::lock_guard<std::mutex> lock(mutex);
  auto [it, added] = tables.try_emplace({format.exponent_bits, format.mantissa_bits, format.encoding, signed_zero});
  if (added) {
    for (int code = 0; code < 256; ++code) {
      double value = decode_one(uint8_t(code), format);
      if (signed_zero && code == 1 << (format.bits() - 1)) value = -0.0;
      it->second.float64[code] = value;
      it->second.float32[code] = float(value);
      it->second.float16[code] = at::Half(float(value));
      it->second.bfloat16[code] = at::BFloat16(float(value));
    }
  }
  return it->second;
}

}  // namespace

double decode_one(uint8_t code, const FPFormat& format) {
  const auto spec = code_spec_of(format);
  const int sign_bit = 1 << (spec.bits - 1), magnitude = code & (sign_bit - 1);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (code >> spec.bits) return nan;
  const double sign = code & sign_bit ? -1.0 : 1.0;
  if (format.encoding == Encoding::Ieee) {
    if (magnitude > spec.infinity_code) return nan;
    if (magnitude == spec.infinity_code) return sign * std::numeric_limits<double>::infinity();
  } else if (spec.nan_is_signed ? magnitude == spec.nan_code : code == spec.nan_code) {
    return nan;
  }
  const int field = magnitude >> format.mantissa_bits, fraction = magnitude & ((1 << format.mantissa_bits) - 1);
  if (field == 0) return sign * std::ldexp(double(fraction), format.min_exponent() - format.mantissa_bits);
  return sign * std::ldexp(double(fraction + (1 << format.mantissa_bits)), field - spec.bias - format.mantissa_bits);
}

at::Tensor encode(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed) {
  check_tensor(x, "encode");
  const auto carrier = carrier_of(x.scalar_type(), "encode");
  const auto codes_spec = code_spec(format);
  const auto spec = rounding_spec(format, carrier);
  const uint64_t stream = format.rounding != Rounding::Stochastic ? 0 : seed ? *seed : draw_seed();
  at::NoGradGuard no_grad;
  if (!x.is_cpu()) return aten_kernels::encode(x, format, stream);
  at::Tensor codes = fresh_like(x, at::kByte), source = in_order_of(codes, x.resolve_neg());
  const char* from = static_cast<const char*>(source.const_data_ptr());
  uint8_t* to = codes.mutable_data_ptr<uint8_t>();
  const size_t size = x.element_size();
  const auto run = kernel::kernels().round_and_pack[carrier];
  for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
    run(from + begin * size, nullptr, to + begin, end - begin, spec, codes_spec, stream, begin / kernel::kRandomBlock);
  });
  return codes;
}

namespace {

// Formats without a NaN have no code to spare for it.
bool lacks_nan(const FPFormat& format) {
  return format.encoding == Encoding::Plain || format.encoding == Encoding::Finite;
}

at::Tensor decode_by(const ValueTables& tables, const at::Tensor& codes, at::ScalarType dtype) {
  const auto carrier = carrier_of(dtype, "decode");
  at::NoGradGuard no_grad;
  at::Tensor values = fresh_like(codes, dtype), source = in_order_of(values, codes);
  const uint8_t* from = source.const_data_ptr<uint8_t>();
  char* to = static_cast<char*>(values.mutable_data_ptr());
  const size_t size = values.element_size();
  const void* table = tables.of(carrier);
  const auto run = kernel::kernels().decode[carrier];
  for_blocks(codes.numel(),
             [&](int64_t begin, int64_t end) { run(from + begin, to + begin * size, end - begin, table); });
  return values;
}

}  // namespace

at::Tensor decode(const at::Tensor& codes, const FPFormat& format, at::ScalarType dtype) {
  check_tensor(codes, "decode");
  if (codes.scalar_type() != at::kByte)
    throw Error(ErrorKind::TensorMismatch,
                std::string("decode takes codes as uint8, not ") + c10::toString(codes.scalar_type()), "",
                "give what encode returned");
  carrier_of(dtype, "decode");
  code_spec(format);
  if (!codes.is_cpu()) {
    at::NoGradGuard no_grad;
    return aten_kernels::decode(codes, format, dtype);
  }
  return decode_by(value_tables(format), codes, dtype);
}

kernel::CodeSpec saved_code_spec(const FPFormat& format) {
  auto spec = code_spec_of(format);
  if (lacks_nan(format)) {
    spec.negative_zero = true;
    spec.nan_code = -1;
  }
  return spec;
}

at::Tensor pack_codes(const at::Tensor& x, const FPFormat& format) {
  const auto carrier = carrier_of(x.scalar_type(), "pack_codes");
  const auto spec = saved_code_spec(format);
  at::NoGradGuard no_grad;
  // Whether there is a NaN a device would have to be asked.
  if (!x.is_cpu())
    return lacks_nan(format) ? at::Tensor() : aten_kernels::encode(x, format.with_rounding(Rounding::Nearest), 0);
  at::Tensor codes = fresh_like(x, at::kByte);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  uint8_t* to = codes.mutable_data_ptr<uint8_t>();
  const size_t size = x.element_size();
  const auto run = kernel::kernels().pack[carrier];
  std::atomic<bool> fits = true;
  for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
    if (!run(from + begin * size, to + begin, end - begin, spec)) fits = false;
  });
  return fits ? codes : at::Tensor();
}

at::Tensor unpack_codes(const at::Tensor& codes, const FPFormat& format, at::ScalarType dtype) {
  if (!codes.is_cpu()) return decode(codes, format, dtype);
  if (format.encoding == Encoding::Fnuz || !is_dense(codes))
    return decode_by(value_tables(format, lacks_nan(format)), codes, dtype);
  const auto carrier = carrier_of(dtype, "unpack_codes");
  constexpr int none = 256;
  auto spec = saved_code_spec(format);
  if (!format.has_infinity()) spec.infinity_code = none;
  if (lacks_nan(format)) spec.nan_code = none;
  if (format.has_infinity()) spec.nan_code = spec.infinity_code + 1;
  at::NoGradGuard no_grad;
  at::Tensor values = fresh_like(codes, dtype);
  const uint8_t* from = codes.const_data_ptr<uint8_t>();
  char* to = static_cast<char*>(values.mutable_data_ptr());
  const size_t size = values.element_size();
  const auto run = kernel::kernels().unpack[carrier];
  for_blocks(codes.numel(),
             [&](int64_t begin, int64_t end) { run(from + begin, to + begin * size, end - begin, spec); });
  return values;
}

}  // namespace plumb
