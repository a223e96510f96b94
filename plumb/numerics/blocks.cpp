#include "plumb/numerics/blocks.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "plumb/core/error.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

constexpr double kScaleMax = 448;  // e4m3fn's

double largest_finite(kernel::Carrier carrier) {
  switch (carrier) {
    case kernel::kFloat64: return std::numeric_limits<double>::max();
    case kernel::kFloat16: return 65504.0;
    case kernel::kBFloat16: return 0x1.fep127;
    default: return std::numeric_limits<float>::max();
  }
}

kernel::BlockSpec block_spec(const FPFormat& format, kernel::Carrier carrier, kernel::Carrier computed) {
  kernel::BlockSpec spec;
  spec.size = format.block_size;
  spec.power_of_two = format.block_scale == BlockScale::PowerOfTwo;
  spec.element_exponent = format.max_exponent();
  spec.element_max = format.max_absolute_value();
  spec.largest = largest_finite(carrier);
  spec.scale_rounding = rounding_spec(FPFormat::parse("e4m3fn-RN"), computed);
  return spec;
}

double largest_magnitude(const at::Tensor& x, kernel::Carrier carrier) {
  const char* data = static_cast<const char*>(x.const_data_ptr());
  const size_t size = x.element_size();
  const auto run = kernel::kernels().largest[carrier];
  std::atomic<double> largest = 0;
  for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
    const double mine = run(data + begin * size, end - begin);
    double seen = largest;
    while (mine > seen && !largest.compare_exchange_weak(seen, mine)) {
    }
  });
  return largest;
}

// One number for the tensor, so that the block of its largest value has the largest scale.
double tensor_scale(const at::Tensor& x, const FPFormat& format, kernel::Carrier carrier) {
  if (format.block_scale != BlockScale::E4M3) return 1;
  const double largest = std::min(largest_magnitude(x, carrier), largest_finite(carrier));
  const double scale = largest / (format.max_absolute_value() * kScaleMax);
  return std::max(carrier == kernel::kFloat64 ? scale : double(float(scale)), 0x1p-126);
}

int64_t row_length(const at::Tensor& x) { return x.dim() == 0 ? 1 : x.size(-1); }

int64_t blocks_in(const at::Tensor& x, const FPFormat& format) {
  return (row_length(x) + format.block_size - 1) / format.block_size;
}

// x: contiguous, blocks along its last dimension. out, codes and scales: contiguous or undefined.
double run_blocks(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed, at::Tensor* out,
                  at::Tensor* codes, at::Tensor* scales) {
  const auto carrier = carrier_of(x.scalar_type(), "quantise");
  const auto computed = carrier == kernel::kFloat64 ? kernel::kFloat64 : kernel::kFloat32;
  const auto spec = rounding_spec(format.element(), computed);
  const auto block = block_spec(format, carrier, computed);
  const uint64_t stream = format.rounding != Rounding::Stochastic ? 0 : seed ? *seed : draw_seed();
  const double unit = tensor_scale(x, format, carrier);
  kernel::CodeSpec code_spec{};
  if (codes) code_spec = code_spec_of(format);
  const void* from = x.const_data_ptr();
  void* to = out ? out->mutable_data_ptr() : nullptr;
  uint8_t* elements = codes ? codes->mutable_data_ptr<uint8_t>() : nullptr;
  uint8_t* shared = scales ? scales->mutable_data_ptr<uint8_t>() : nullptr;
  const auto run = kernel::kernels().round_blocks[carrier];
  for_blocks(x.numel(), [&](int64_t begin, int64_t end) {
    run(from, to, begin, end, row_length(x), spec, block, unit, stream, &code_spec, elements, shared);
  });
  return unit;
}

void check_blocks(const at::Tensor& x, const FPFormat& format, int64_t dim, const char* what) {
  check_tensor(x, what);
  carrier_of(x.scalar_type(), what);
  if (!format.has_blocks())
    throw Error(ErrorKind::InvalidArgument,
                std::string(what) + ": the blocks of " + format.to_string() + " share no scale", "",
                "take a format such as mxfp8, or the function for plain formats");
  const int64_t dims = std::max<int64_t>(x.dim(), 1);
  if (dim < -dims || dim >= dims)
    throw Error(ErrorKind::InvalidArgument,
                std::string(what) + ": dim " + std::to_string(dim) + " of a tensor of " + std::to_string(x.dim()) +
                    " dimensions",
                "", "give one from " + std::to_string(-dims) + " to " + std::to_string(dims - 1));
}

at::Tensor blocks_last(const at::Tensor& x, int64_t dim) { return x.dim() < 2 ? x : x.movedim(dim, -1); }
at::Tensor blocks_back(const at::Tensor& x, int64_t dim) { return x.dim() < 2 ? x : x.movedim(-1, dim); }

}  // namespace

at::Tensor quantise_blocks(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed, int64_t dim) {
  check_blocks(x, format, dim, "quantise");
  at::NoGradGuard no_grad;
  const at::Tensor rows = blocks_last(x, dim).resolve_neg().contiguous();
  at::Tensor out = fresh_like(x, x.scalar_type());
  if (blocks_last(out, dim).is_contiguous()) {
    run_blocks(rows, format, seed, &out, nullptr, nullptr);
  } else {
    at::Tensor rounded = at::empty_like(rows);
    run_blocks(rows, format, seed, &rounded, nullptr, nullptr);
    out.copy_(blocks_back(rounded, dim));
  }
  return out;
}

BlockCodes encode_blocks(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed, int64_t dim) {
  check_blocks(x, format, dim, "encode_blocks");
  at::NoGradGuard no_grad;
  const at::Tensor rows = blocks_last(x, dim).resolve_neg().contiguous();
  BlockCodes result;
  at::Tensor codes = at::empty(rows.sizes(), rows.options().dtype(at::kByte));
  auto sizes = rows.sizes().vec();
  if (sizes.empty()) sizes.push_back(1);
  sizes.back() = blocks_in(rows, format);
  result.scales = at::empty(sizes, codes.options());
  result.tensor_scale = run_blocks(rows, format, seed, nullptr, &codes, &result.scales);
  result.codes = blocks_back(codes, dim);
  return result;
}

at::Tensor decode_blocks(const BlockCodes& codes, const FPFormat& format, at::ScalarType dtype, int64_t dim) {
  check_tensor(codes.codes, "decode_blocks");
  check_tensor(codes.scales, "decode_blocks");
  const auto carrier = carrier_of(dtype, "decode_blocks");
  const auto computed = carrier == kernel::kFloat64 ? at::kDouble : at::kFloat;
  at::NoGradGuard no_grad;
  const at::Tensor rows = blocks_last(codes.codes, dim);
  at::Tensor values = decode(rows.contiguous(), format.element(), computed);
  at::Tensor scales;
  if (format.block_scale == BlockScale::PowerOfTwo) {
    const at::Tensor exponents = codes.scales.to(at::kInt).sub_(127);
    scales = at::ldexp(at::ones(exponents.sizes(), values.options()), exponents);
  } else {
    scales = decode(codes.scales, FPFormat::parse("e4m3fn"), computed).mul_(codes.tensor_scale);
  }
  scales = scales.repeat_interleave(format.block_size, -1).narrow(-1, 0, row_length(rows));
  values = values.mul_(scales.view(values.sizes()));
  if (format.block_scale == BlockScale::E4M3) values.clamp_(-largest_finite(carrier), largest_finite(carrier));
  return blocks_back(values.to(dtype), dim);
}

}  // namespace plumb
