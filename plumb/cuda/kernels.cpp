// The numerics room's kernels for CUDA tensors (device_kernels.h).
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "plumb/cuda/blocks.cuh"
#include "plumb/cuda/dropout.cuh"
#include "plumb/cuda/hash.cuh"
#include "plumb/cuda/kernel_checks.h"
#include "plumb/cuda/kernel_texts.h"
#include "plumb/cuda/kernels.h"
#include "plumb/cuda/launch.h"
#include "plumb/cuda/pass.cuh"
#include "plumb/cuda/self_check.h"
#include "plumb/numerics/carrier.h"

namespace plumb::cuda {
namespace {

using at::Tensor;

void* data_of(const Tensor& x) { return x.defined() ? x.mutable_data_ptr() : nullptr; }

// Fixed by the number of values, so that sums are the same on every GPU.
int64_t blocks_for(int64_t threads) {
  constexpr int64_t most = 8 * 132;
  return std::clamp<int64_t>((threads + kThreadsOfBlock - 1) / kThreadsOfBlock, 1, most);
}

// Buffers of one side of a measurement until it is finished.
struct Gathering {
  Tensor parts, counts;

  Gathering(bool wanted, const Tensor& x, int64_t blocks, bool histogram) {
    if (!wanted) return;
    parts = at::empty({blocks * int64_t(sizeof(cuda_kernel::Gathered))}, x.options().dtype(at::kByte));
    if (histogram) counts = at::zeros({kernel::kHistogramBins}, x.options().dtype(at::kLong));
  }

  void finish(c10::Device device, void* kernel, int64_t blocks, int64_t numel, const Tensor& gathered,
              const Tensor& metrics) const {
    void *from = data_of(parts), *bins = data_of(counts), *fields = data_of(gathered), *all = data_of(metrics);
    start(device, kernel, 1,
          {reinterpret_cast<void*>(&from), &blocks, reinterpret_cast<void*>(&bins), &numel,
           reinterpret_cast<void*>(&fields), reinterpret_cast<void*>(&all)});
  }
};

bool is_aligned(int pack) { return pack > 1; }

bool pass(const PassTask& task) {
  const Tensor& x = task.x;
  const bool before = task.before.defined() || task.metrics.defined(), after = task.after.defined();
  PassKernel kernel;
  kernel.carrier = carrier_of(x.scalar_type(), "quantise");
  kernel.pack = pack_of(x, {&x, &task.y});
  kernel.rounding = task.rounding;
  kernel.writes = task.y.defined();
  kernel.codes = task.codes;
  kernel.before = before, kernel.after = after;
  kernel.histogram = task.histogram && (before || after);
  const std::string text = text_of(kernel);
  void* const run = loaded(x.device(), text);
  void* const finish = before || after ? loaded(x.device(), finish_text()) : run;
  if (!run || !finish) return false;
  if (!is_right(x.device(), text, [&] { return check_pass(numerics_kernels(), task, is_aligned(kernel.pack)); }))
    return false;
  const int64_t n = x.numel(), blocks = blocks_for(cuda_kernel::quads_in<1>(n) / kernel.pack);
  const Gathering gather_before(before, x, blocks, task.histogram), gather_after(after, x, blocks, task.histogram);
  cuda_kernel::PassArguments arguments{x.const_data_ptr(),
                                       data_of(task.y),
                                       n,
                                       task.seed,
                                       kernel::RoundingConstants<float>(task.rounding),
                                       kernel::CodeConstants(task.codes ? *task.codes : no_codes()),
                                       static_cast<cuda_kernel::Gathered*>(data_of(gather_before.parts)),
                                       static_cast<cuda_kernel::Gathered*>(data_of(gather_after.parts)),
                                       static_cast<uint64_t*>(data_of(gather_before.counts)),
                                       static_cast<uint64_t*>(data_of(gather_after.counts))};
  start(x.device(), run, blocks, {&arguments});
  if (before) gather_before.finish(x.device(), finish, blocks, n, task.before, task.metrics);
  if (after) gather_after.finish(x.device(), finish, blocks, n, task.after, Tensor());
  return true;
}

bool decode(const Tensor& codes, const Tensor& values, const std::array<float, 256>& table) {
  const int pack = pack_of(values, {&codes, &values});
  const std::string text = decode_text(carrier_of(values.scalar_type(), "decode"), pack);
  void* const run = loaded(values.device(), text);
  if (!run || !is_right(values.device(), text,
                        [&] { return check_decode(numerics_kernels(), values, table, is_aligned(pack)); }))
    return false;
  cuda_kernel::DecodeArguments arguments{
      static_cast<const uint8_t*>(codes.const_data_ptr()), data_of(values), values.numel(), {}};
  std::copy(table.begin(), table.end(), arguments.values);
  start(values.device(), run, blocks_for(cuda_kernel::quads_in<1>(values.numel()) / pack), {&arguments});
  return true;
}

bool round_blocks(const BlocksTask& task) {
  const Tensor& x = task.x;
  const auto carrier = carrier_of(x.scalar_type(), "quantise");
  const int64_t n = x.numel(), length = x.dim() == 0 ? 1 : x.size(-1);
  const int pack = pack_of(x, {&x});
  const bool divides = !task.block.power_of_two;
  const std::string text = blocks_text(carrier, task.block, length, task.rounding);
  void* const run = loaded(x.device(), text);
  void* const find_largest = divides ? loaded(x.device(), largest_text(carrier, pack)) : run;
  if (!run || !find_largest) return false;
  if (!is_right(x.device(), text, [&] { return check_round_blocks(numerics_kernels(), task, is_aligned(pack)); }))
    return false;
  const int64_t in_row = (length + task.block.size - 1) / task.block.size;
  Tensor most;
  if (divides) {
    most = at::zeros({1}, x.options().dtype(at::kInt));
    cuda_kernel::LargestArguments arguments{x.const_data_ptr(), n, static_cast<uint32_t*>(data_of(most))};
    start(x.device(), find_largest, blocks_for(cuda_kernel::quads_in<1>(n) / pack), {&arguments});
  }
  cuda_kernel::BlocksArguments arguments{x.const_data_ptr(),
                                         data_of(task.values),
                                         static_cast<uint8_t*>(data_of(task.codes)),
                                         static_cast<uint8_t*>(data_of(task.scales)),
                                         static_cast<float*>(data_of(task.unit)),
                                         static_cast<const uint32_t*>(data_of(most)),
                                         n / length,
                                         length,
                                         task.seed,
                                         float(task.block.element_max * task.block.scale_max),
                                         divides ? float(task.block.largest) : __builtin_inff(),
                                         kernel::RoundingConstants<float>(task.rounding),
                                         kernel::CodeConstants(task.codes.defined() ? task.code_spec : no_codes()),
                                         kernel::Scaler<float>(task.block, 1)};
  start(x.device(), run, blocks_for(n / length * in_row), {&arguments});
  return true;
}

bool keep(const Tensor& values, double value, uint32_t last, uint64_t seed) {
  const int pack = pack_of(values, {&values});
  const std::string text = keep_text(carrier_of(values.scalar_type(), "dropout"), pack);
  void* const run = loaded(values.device(), text);
  if (!run ||
      !is_right(values.device(), text, [&] { return check_keep(numerics_kernels(), values, is_aligned(pack)); }))
    return false;
  cuda_kernel::KeepArguments arguments{data_of(values), values.numel(), seed, float(value), last};
  start(values.device(), run, blocks_for(cuda_kernel::quads_in<1>(values.numel()) / pack), {&arguments});
  return true;
}

bool hash(const Tensor& x, const Tensor& sum) {
  const std::string text = hash_text(carrier_of(x.scalar_type(), "hash"));
  void* const run = loaded(x.device(), text);
  if (!run || !is_right(x.device(), text, [&] { return check_hash(numerics_kernels(), x); })) return false;
  cuda_kernel::HashArguments arguments{x.const_data_ptr(), x.numel(), static_cast<uint64_t*>(data_of(sum))};
  start(x.device(), run, blocks_for(x.numel() / 4), {&arguments});
  return true;
}

constexpr DeviceKernels kKernels{pass, decode, round_blocks, keep, hash};
[[maybe_unused]] const bool kRegistered = (register_device_kernels(at::kCUDA, &kKernels), true);

}  // namespace

const DeviceKernels& numerics_kernels() { return kKernels; }

}  // namespace plumb::cuda
