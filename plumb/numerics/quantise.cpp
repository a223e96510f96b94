#include "plumb/numerics/quantise.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <atomic>
#include <mutex>

#include "plumb/core/error.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/blocks.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/metrics_gather.h"

namespace plumb {
namespace {

uint64_t seed_for(const FPFormat& format, std::optional<uint64_t> seed) {
  if (format.rounding != Rounding::Stochastic) return 0;
  return seed ? *seed : draw_seed();
}

// Both tensors one run of memory in the same order, or the same tensor. False on a device without kernels of its own.
bool round_dense(const at::Tensor& x, const at::Tensor& out, const FPFormat& format, uint64_t seed) {
  auto carrier = carrier_of(x.scalar_type(), "quantise");
  const auto spec = rounding_spec(format, carrier);
  if (x.numel() == 0) return true;
  if (!x.is_cpu()) return aten_kernels::quantise_into(out, x, format, seed);
  const auto run = kernel::kernels().round[carrier];
  const size_t size = x.element_size();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
    run(from + begin * size, to + begin * size, end - begin, spec, seed, begin / kernel::kRandomBlock, nullptr,
        nullptr);
  });
  return true;
}

// A new tensor for x's values rounded, and x in the same order of memory: itself, or a copy in the new tensor.
struct Fresh {
  at::Tensor out, source;
};
Fresh fresh_for(const at::Tensor& x) {
  at::Tensor out = fresh_like(x, x.scalar_type());
  if (!x.is_neg() && is_dense(x) && out.strides() == x.strides()) return {out, x};
  return {out, out.copy_(x)};
}

// Autograd must notice that memory it may have saved has changed.
void bump_version(const at::Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

uint64_t draw_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

at::Tensor quantise(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed, int64_t dim) {
  if (format.has_blocks()) return quantise_blocks(x, format, seed, dim);
  check_tensor(x, "quantise");
  carrier_of(x.scalar_type(), "quantise");
  at::NoGradGuard no_grad;
  const uint64_t stream = seed_for(format, seed);
  if (!x.is_cpu()) return aten_kernels::quantise(x, format, stream);
  const auto [out, source] = fresh_for(x);
  round_dense(source, out, format, stream);
  return out;
}

std::pair<at::Tensor, at::Tensor> quantise_and_pack(const at::Tensor& x, const FPFormat& format,
                                                    std::optional<uint64_t> seed) {
  check_tensor(x, "quantise");
  const auto carrier = carrier_of(x.scalar_type(), "quantise");
  at::NoGradGuard no_grad;
  if (!x.is_cpu()) {
    at::Tensor rounded = aten_kernels::quantise(x, format, seed_for(format, seed));
    return {rounded, pack_codes(rounded.as_strided({rounded.numel()}, {1}), format)};
  }
  const auto [out, source] = fresh_for(x);
  at::Tensor codes = at::empty({x.numel()}, x.options().dtype(at::kByte).requires_grad(false));
  const auto spec = rounding_spec(format, carrier);
  const auto code_spec = saved_code_spec(format);
  const uint64_t stream = seed_for(format, seed);
  const auto run = kernel::kernels().round_and_pack[carrier];
  const size_t size = x.element_size();
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  uint8_t* bytes = codes.mutable_data_ptr<uint8_t>();
  std::atomic<bool> fit = true;
  for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
    if (!run(from + begin * size, to + begin * size, bytes + begin, end - begin, spec, code_spec, stream,
             begin / kernel::kRandomBlock))
      fit = false;
  });
  return {out, fit ? codes : at::Tensor()};
}

at::Tensor& quantise_out(at::Tensor& out, const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed,
                         int64_t dim) {
  check_tensor(x, "quantise");
  check_tensor(out, "quantise");
  if (out.sizes() != x.sizes() || out.scalar_type() != x.scalar_type())
    throw Error(ErrorKind::TensorMismatch,
                "quantise: out is " + std::string(c10::toString(out.scalar_type())) + c10::str(out.sizes()) +
                    ", x is " + c10::toString(x.scalar_type()) + c10::str(x.sizes()),
                "", "give an out of the same sizes and dtype");
  at::NoGradGuard no_grad;
  if (out.is_same(x)) return quantise_(out, format, seed, dim);
  if (at::has_internal_overlap(out) == at::MemOverlap::Yes)
    throw Error(ErrorKind::TensorMismatch, "quantise: several of out's elements are one place in memory", "",
                "give an out with memory of its own");
  const uint64_t stream = seed_for(format, seed);
  const bool apart =
      !x.storage().is_alias_of(out.storage()) || at::get_overlap_status(x, out) == at::MemOverlapStatus::Full;
  if (out.device() == x.device() && !format.has_blocks() && apart && !x.is_neg() && !out.is_neg() && is_dense(x) &&
      is_dense(out) && out.strides() == x.strides() && round_dense(x, out, format, stream)) {
    bump_version(out);
  } else {
    out.copy_(quantise(x, format, stream, dim));
  }
  return out;
}

at::Tensor& quantise_(at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed, int64_t dim) {
  check_tensor(x, "quantise_");
  carrier_of(x.scalar_type(), "quantise_");
  at::NoGradGuard no_grad;
  const uint64_t stream = seed_for(format, seed);
  if (!format.has_blocks() && !x.is_neg() && is_dense(x) && round_dense(x, x, format, stream)) {
    bump_version(x);
  } else if (at::has_internal_overlap(x) == at::MemOverlap::Yes) {
    throw Error(ErrorKind::TensorMismatch, "quantise_: several of the tensor's elements are one place in memory", "",
                "clone() it first");
  } else {
    x.copy_(quantise(x, format, stream, dim));
  }
  return x;
}

at::Tensor quantise_and_measure(const at::Tensor& x, const FPFormat& format, TensorMetrics* before,
                                TensorMetrics* after, const MetricsOptions& options, std::optional<uint64_t> seed,
                                int64_t dim) {
  check_tensor(x, "quantise_and_measure");
  if (format.has_blocks()) {
    at::Tensor out = quantise(x, format, seed, dim);
    if (before) *before = measure(x, options);
    if (after) *after = measure(out, options);
    return out;
  }
  auto carrier = carrier_of(x.scalar_type(), "quantise_and_measure");
  at::NoGradGuard no_grad;
  if (!x.is_cpu()) {
    at::Tensor gathered_before, gathered_after;
    at::Tensor out =
        aten_kernels::quantise_and_gather(x, format, seed_for(format, seed), options.histogram,
                                          before ? &gathered_before : nullptr, after ? &gathered_after : nullptr);
    if (before) *before = aten_kernels::metrics_of(gathered_before, x.numel());
    if (after) *after = aten_kernels::metrics_of(gathered_after, x.numel());
    return out;
  }
  const auto [out, source] = fresh_for(x);
  const auto spec = rounding_spec(format, carrier);
  const uint64_t stream = seed_for(format, seed);
  const size_t size = x.element_size();
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const auto run = kernel::kernels().round[carrier];
  MetricsGatherer gather_before(x.numel(), before ? options : MetricsOptions{});
  MetricsGatherer gather_after(x.numel(), after ? options : MetricsOptions{});
  MetricsGatherer::for_pieces(x.numel(), [&](int64_t piece, int64_t begin, int64_t end) {
    run(from + begin * size, to + begin * size, end - begin, spec, stream, begin / kernel::kRandomBlock,
        before ? &gather_before.piece(piece) : nullptr, after ? &gather_after.piece(piece) : nullptr);
    if (before) gather_before.measured(piece, from + begin * size, end - begin, carrier);
    if (after) gather_after.measured(piece, to + begin * size, end - begin, carrier);
  });
  if (before) *before = gather_before.finish();
  if (after) *after = gather_after.finish();
  return out;
}

}  // namespace plumb
