#include "plumb/scaling/fp8.h"

#include <ATen/ATen.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/numerics/operators.h"
#include "plumb/scaling/kernels.h"

namespace plumb {
namespace {

constexpr int64_t kUnit = 16;  // the units take dimensions that are multiples of it

int64_t filled(int64_t n) { return (n + kUnit - 1) / kUnit * kUnit; }

// Returns a matrix of codes, row by row in memory, its sizes filled up. The code 0 is zero in every format.
at::Tensor row_by_row(const at::Tensor& codes, int64_t rows, int64_t columns) {
  if (codes.size(0) == rows && codes.size(1) == columns) return codes.contiguous();
  return at::constant_pad_nd(codes, {0, columns - codes.size(1), 0, rows - codes.size(0)}).contiguous();
}

// Codes of weights, by the weight, while somebody asks to keep them. Nothing else tells that a weight is as it was:
// writes past autograd, through p.data or NumPy, leave its version alone.
class WeightCodes {
 public:
  at::Tensor find(const at::Tensor& weight, std::string_view format) {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(weight.unsafeGetTensorImpl());
    if (it == entries_.end() || it->second.weight.expired()) return {};
    const Entry& entry = it->second;
    const bool fits = entry.format == format && entry.version == weight._version() &&
                      entry.memory == weight.const_data_ptr() && entry.codes._version() == entry.codes_version &&
                      entry.codes.sizes() == weight.sizes() && entry.codes.device() == weight.device();
    return fits ? entry.codes : at::Tensor();
  }

  void add(const at::Tensor& weight, std::string_view format, const at::Tensor& codes) {
    std::lock_guard lock(mutex_);
    if (keepers_ == 0) return;
    entries_.insert_or_assign(weight.unsafeGetTensorImpl(), Entry{Weak(weight.getIntrusivePtr()),
                                                                  weight._version(),
                                                                  weight.const_data_ptr(),
                                                                  std::string(format),
                                                                  codes,
                                                                  codes._version(),
                                                                  {}});
  }

  // Returns the transposed copy of codes, kept where they are a weight's.
  at::Tensor transposed(const at::Tensor& codes) {
    const auto copy = [&] { return codes.t().contiguous(); };
    std::lock_guard lock(mutex_);
    for (auto& [weight, entry] : entries_) {
      if (!entry.codes.is_same(codes)) continue;
      if (!entry.transposed.defined()) entry.transposed = copy();
      return entry.transposed;
    }
    return copy();
  }

  void keep() {
    std::lock_guard lock(mutex_);
    ++keepers_;
  }
  void release() {
    std::lock_guard lock(mutex_);
    if (--keepers_ == 0) entries_.clear();
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    Weak weight;
    int64_t version;
    const void* memory;
    std::string format;
    at::Tensor codes;
    int64_t codes_version;
    at::Tensor transposed;
  };
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  int keepers_ = 0;
};

WeightCodes& weight_codes() {
  static WeightCodes codes;
  return codes;
}

at::Tensor scaled_matrices(const at::Tensor& a, const FPFormat& format_a, const at::Tensor& b, const FPFormat& format_b,
                           const at::Tensor& alpha, const at::Tensor& one, at::ScalarType dtype) {
  const int64_t inner = filled(a.size(1)), columns = filled(b.size(1));
  const at::Tensor left = row_by_row(a, a.size(0), inner).view(fp8_dtype(format_a));
  const bool as_it_is = b.size(0) == inner && b.size(1) == columns;
  const at::Tensor right =
      as_it_is && !b.t().is_contiguous() ? weight_codes().transposed(b) : row_by_row(b.t(), columns, inner);
  at::Tensor out =
      at::_scaled_mm(left, right.view(fp8_dtype(format_b)).t(), alpha, one, std::nullopt, std::nullopt, dtype);
  return columns == b.size(1) ? out : out.slice(1, 0, b.size(1)).contiguous();
}

// Returns why torch multiplies no codes on this device: no such kernel, no such units, or a library with a setting
// against it. Empty if it does.
std::string obstacle_of(at::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<at::DeviceType, at::DeviceIndex>, std::string> known;
  std::lock_guard lock(mutex);
  auto [it, fresh] = known.try_emplace({device.type(), device.index()});
  if (!fresh) return it->second;
  // Nobody records or replaces this product.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks | c10::autograd_dispatch_keyset);
  try {
    const auto codes = at::zeros({kUnit, kUnit}, at::TensorOptions(device).dtype(at::kByte));
    const auto one = at::ones({}, at::TensorOptions(device).dtype(at::kFloat));
    const FPFormat &e4m3 = fp8_format("e4m3fn"), &e5m2 = fp8_format("e5m2");
    for (const auto& [left, right] : {std::pair(e4m3, e4m3), std::pair(e5m2, e4m3), std::pair(e4m3, e5m2)})
      scaled_matrices(codes, left, codes, right, one, one, at::kFloat);
  } catch (const c10::Error& e) {
    it->second = e.what_without_backtrace();
  } catch (const std::exception& e) {
    it->second = e.what();
  }
  it->second = it->second.substr(0, it->second.find('\n'));
  return it->second;
}

}  // namespace

Fp8Kernel parse_fp8_kernel(std::string_view text) {
  if (text == "auto") return Fp8Kernel::Auto;
  if (text == "scaled_mm") return Fp8Kernel::ScaledMM;
  if (text == "decoded") return Fp8Kernel::Decoded;
  throw Error(ErrorKind::InvalidArgument, "'" + std::string(text) + "' is no kernel for products of FP8", "",
              "auto, scaled_mm or decoded");
}

const FPFormat& fp8_format(std::string_view text) {
  const FPFormat& format = cached_format(text);
  if (const auto name = format.name(); name == "e4m3fn" || name == "e5m2") return format;
  throw Error(ErrorKind::InvalidArgument, "no unit multiplies the format " + std::string(text), "",
              "e4m3fn or e5m2; simulate_format takes every format");
}

at::ScalarType fp8_dtype(const FPFormat& format) {
  return format.exponent_bits == 4 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

bool uses_scaled_mm(Fp8Kernel kernel, at::Device device, at::ScalarType dtype) {
  if (kernel == Fp8Kernel::Decoded || dtype == at::kDouble) return false;
  if (kernel == Fp8Kernel::Auto) return (device.is_cuda() || device.is_xpu()) && obstacle_of(device).empty();
  if (const std::string why = obstacle_of(device); !why.empty())
    throw Error(ErrorKind::Unsupported,
                "kernel=\"scaled_mm\": torch cannot multiply FP8 on " + device.str() + ": " + why, "",
                "take kernel=\"auto\", or a device that can (ONEDNN_MAX_CPU_ISA also limits what a CPU can)");
  return true;
}

at::Tensor scaled_mm(const at::Tensor& a, const FPFormat& format_a, const at::Tensor& b, const FPFormat& format_b,
                     double alpha, at::ScalarType dtype) {
  const auto fit = [&] {
    if (!a.defined() || !b.defined() || a.dim() != b.dim() || (a.dim() != 2 && a.dim() != 3)) return false;
    return a.size(-1) == b.size(-2) && (a.dim() == 2 || a.size(0) == b.size(0));
  };
  if (!fit()) {
    const auto text = [](const at::Tensor& x) { return x.defined() ? c10::str(x.sizes()) : "undefined"; };
    throw Error(ErrorKind::TensorMismatch, "scaled_mm: codes " + text(a) + " and " + text(b) + " have no product", "",
                "two matrices, or equal batches of them: (..., rows, inner) and (..., inner, columns)");
  }
  const auto options = a.options().dtype(at::kFloat);
  const auto factor = at::full({}, alpha, options), one = at::ones({}, options);
  if (a.numel() == 0 || b.numel() == 0) {
    auto sizes = a.sizes().vec();
    sizes.back() = b.size(-1);
    return at::zeros(sizes, a.options().dtype(dtype));
  }
  if (a.dim() == 2) return scaled_matrices(a, format_a, b, format_b, factor, one, dtype);
  auto out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options().dtype(dtype));
  for (int64_t i = 0; i < a.size(0); ++i)
    out.select(0, i).copy_(scaled_matrices(a.select(0, i), format_a, b.select(0, i), format_b, factor, one, dtype));
  return out;
}

at::Tensor encode_weight(const at::Tensor& weight, std::string_view format) {
  const FPFormat& rounds_to = fp8_format(format);
  at::AutoDispatchBelowADInplaceOrView below;
  const bool may_keep = rounds_to.rounding != Rounding::Stochastic && plain(weight) && !weight.is_inference() &&
                        !c10::InferenceMode::is_enabled();
  if (!may_keep) return ops::encode(weight, format);
  at::Tensor codes = weight_codes().find(weight, format);
  if (codes.defined()) return codes;
  codes = ops::encode(weight, format);
  weight_codes().add(weight, format, codes);
  return codes;
}

KeepWeightCodes::KeepWeightCodes() { weight_codes().keep(); }
KeepWeightCodes::~KeepWeightCodes() { weight_codes().release(); }

}  // namespace plumb
