#include "plumb/numerics/blocks.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <atomic>

#include "plumb/core/error.h"
#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

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
  const auto block = block_spec(format, carrier);
  const double largest = std::min(largest_magnitude(x, carrier), block.largest);
  const double scale = largest / (block.element_max * block.scale_max);
  return std::max(carrier == kernel::kFloat64 ? scale : double(float(scale)), 0x1p-126);
}

int64_t row_length(const at::Tensor& x) { return x.dim() == 0 ? 1 : x.size(-1); }

int64_t blocks_in(const at::Tensor& x, const FPFormat& format) {
  return (row_length(x) + format.block_size - 1) / format.block_size;
}

uint64_t stream_of(const FPFormat& format, std::optional<uint64_t> seed) {
  return format.rounding != Rounding::Stochastic ? 0 : seed ? *seed : draw_seed();
}

// x: contiguous, on the CPU, blocks along its last dimension. out, codes and scales: contiguous or undefined.
double run_blocks(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed, at::Tensor* out,
                  at::Tensor* codes, at::Tensor* scales) {
  const auto carrier = carrier_of(x.scalar_type(), "quantise");
  const auto spec = rounding_spec(format.element(), computed_in(carrier));
  const auto block = block_spec(format, carrier);
  const uint64_t stream = stream_of(format, seed);
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
  if (!x.is_cpu()) {
    out.copy_(blocks_back(aten_kernels::round_blocks(rows, format, stream_of(format, seed), false).values, dim));
  } else if (blocks_last(out, dim).is_contiguous()) {
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
  if (!x.is_cpu()) {
    const auto made = aten_kernels::round_blocks(rows, format, stream_of(format, seed), true);
    return {blocks_back(made.codes, dim), made.scales, made.unit};
  }
  at::Tensor codes = at::empty(rows.sizes(), rows.options().dtype(at::kByte));
  auto sizes = rows.sizes().vec();
  if (sizes.empty()) sizes.push_back(1);
  sizes.back() = blocks_in(rows, format);
  result.scales = at::empty(sizes, codes.options());
  const double unit = run_blocks(rows, format, seed, nullptr, &codes, &result.scales);
  result.tensor_scale = at::scalar_tensor(unit, x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  result.codes = blocks_back(codes, dim);
  return result;
}

at::Tensor decode_blocks(const BlockCodes& codes, const FPFormat& format, at::ScalarType dtype, int64_t dim) {
  check_tensor(codes.codes, "decode_blocks");
  check_tensor(codes.scales, "decode_blocks");
  const auto carrier = carrier_of(dtype, "decode_blocks");
  const auto computed = computed_in(carrier) == kernel::kFloat64 ? at::kDouble : at::kFloat;
  at::NoGradGuard no_grad;
  const at::Tensor rows = blocks_last(codes.codes, dim);
  at::Tensor values = decode(rows.contiguous(), format.element(), computed);
  at::Tensor scales;
  if (format.block_scale == BlockScale::PowerOfTwo) {
    scales = aten_kernels::power_of_two(codes.scales.to(at::kInt).sub_(127), computed);
  } else {
    scales = decode(codes.scales, FPFormat::parse("e4m3fn"), computed).mul_(codes.tensor_scale.to(computed));
  }
  scales = scales.repeat_interleave(format.block_size, -1).narrow(-1, 0, row_length(rows));
  values = values.mul_(scales.view(values.sizes()));
  const double largest = block_spec(format, carrier).largest;
  if (format.block_scale == BlockScale::E4M3) values.clamp_(-largest, largest);
  return blocks_back(values.to(dtype), dim);
}

}  // namespace plumb
