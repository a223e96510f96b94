#include "plumb/cuda/kernel_checks.h"

#include <ATen/ATen.h>

#include <cmath>

#include "plumb/core/str.h"
#include "plumb/cuda/self_check.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/hash.h"

namespace plumb::cuda {
namespace {

using at::Tensor;
using pointwise_parts::Tensors;

constexpr uint64_t kSeed = 0x5eed;

// Counts and extremes are the CPU's; sums are within a millionth.
std::string difference_of_metrics(const Tensor& gathered, const kernel::Partial& wanted, int64_t numel) {
  const Tensor host = gathered.cpu();
  const double* found = host.const_data_ptr<double>();
  const double mean_of_magnitudes = wanted.sum_abs / std::max<double>(1, wanted.count);
  const auto apart = [](double a, double b, double of) { return !(std::abs(a - b) <= 1e-6 * of); };
  const double exact[] = {wanted.count,
                          NAN,
                          NAN,
                          NAN,
                          wanted.abs_max,
                          wanted.abs_min,
                          double(wanted.nans),
                          double(wanted.positive_infinities),
                          double(wanted.negative_infinities),
                          double(wanted.zeros)};
  for (int i = 0; i < 10; ++i) {
    if (!std::isnan(exact[i]) && found[i] != exact[i])
      return str("number ", i, " of the metrics is ", found[i], " instead of ", exact[i]);
  }
  if (apart(found[1], wanted.mean, mean_of_magnitudes) || apart(found[2], wanted.m2, wanted.m2) ||
      apart(found[3], wanted.sum_abs, wanted.sum_abs))
    return str("sums of the metrics are ", found[1], ", ", found[2], ", ", found[3], " instead of ", wanted.mean, ", ",
               wanted.m2, ", ", wanted.sum_abs);
  for (int i = 0; wanted.histogram && i < kernel::kHistogramBins; ++i) {
    if (found[10 + i] != double(wanted.histogram[i]))
      return str("bin ", i, " of the histogram is ", found[10 + i], " instead of ", double(wanted.histogram[i]));
  }
  return "";
}

double bound_of(at::ScalarType dtype) { return dtype == at::kFloat ? 4e-6 : dtype == at::kHalf ? 4e-3 : 3e-2; }

Tensors on_host(const Tensors& tensors) {
  Tensors host;
  for (const Tensor& t : tensors) host.push_back(t.defined() ? t.cpu() : t);
  return host;
}

// Memory for a result, aligned as `like`. It is filled with a number: memory just freed may hold the right values, and
// a kernel that writes nothing would pass.
Tensor result_like(const Tensor& like, const at::TensorOptions& options = {}) {
  return at::full_like(like, 90, options);
}

Tensors inputs_for(const PointwiseProgram& program, const Tensor& like, bool aligned) {
  Tensors inputs;
  for (int64_t i = 0; i < program.num_inputs; ++i)
    inputs.push_back(plain_values(like.scalar_type(), like.device(), aligned, uint64_t(i)));
  return inputs;
}

std::string first_of(const Tensors& found, const Tensors& wanted) {
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined()) continue;
    if (auto apart = difference(found[i], wanted[i], bound_of(found[i].scalar_type())); !apart.empty()) return apart;
  }
  return "";
}

}  // namespace

std::string check_pass(const DeviceKernels& kernels, const PassTask& task, bool aligned) {
  PassTask hard = task;
  hard.seed = kSeed;
  hard.x = hard_values(task.x.scalar_type(), task.x.device(), aligned);
  if (task.codes && task.codes->nan_code < 0) hard.x.nan_to_num_(0, INFINITY, -INFINITY);
  if (task.y.defined()) hard.y = result_like(hard.x, task.y.options());
  for (auto member : {&PassTask::before, &PassTask::after, &PassTask::metrics})
    if ((task.*member).defined()) hard.*member = result_like(task.*member);
  if (!hard.before.defined() && hard.metrics.defined())
    hard.before = at::full({10 + (task.histogram ? kernel::kHistogramBins : 0)}, 90, hard.metrics.options());
  if (!kernels.pass(hard)) return "";

  const Tensor x = hard.x.cpu(), values = at::empty_like(x);
  const int64_t n = x.numel();
  const auto carrier = carrier_of(x.scalar_type(), "quantise");
  const kernel::KernelTable& cpu = kernel::kernels();
  uint64_t bins[2][kernel::kHistogramBins] = {};
  kernel::Partial before, after;
  if (task.histogram) before.histogram = bins[0], after.histogram = bins[1];
  cpu.round[carrier](x.const_data_ptr(), values.mutable_data_ptr(), n, task.rounding, kSeed, 0, &before, &after);
  std::string apart;
  if (hard.y.defined() && task.codes) {
    const Tensor codes = at::empty_like(x, x.options().dtype(at::kByte));
    cpu.round_and_pack[carrier](x.const_data_ptr(), nullptr, codes.mutable_data_ptr<uint8_t>(), n, task.rounding,
                                *task.codes, kSeed, 0);
    apart = difference(hard.y, codes);
  } else if (hard.y.defined()) {
    apart = difference(hard.y, values);
  }
  if (apart.empty() && hard.before.defined()) apart = difference_of_metrics(hard.before, before, n);
  if (apart.empty() && hard.after.defined()) apart = difference_of_metrics(hard.after, after, n);
  return apart;
}

std::string check_decode(const DeviceKernels& kernels, const Tensor& values, const std::array<float, 256>& table,
                         bool aligned) {
  const Tensor every = at::arange(701, at::kInt).to(at::kByte);
  const Tensor memory = at::full({702}, 90, values.options());
  const Tensor result = memory.narrow(0, aligned ? 0 : 1, 701);
  const Tensor space = at::empty({702}, values.options().dtype(at::kByte));
  const Tensor codes = space.narrow(0, aligned ? 0 : 1, 701).copy_(every);
  if (!kernels.decode(codes, result, table)) return "";
  const Tensor entries = at::tensor(at::ArrayRef<float>(table.data(), table.size())).to(values.scalar_type());
  return difference(result, entries.index_select(0, every.to(at::kLong)));
}

std::string check_round_blocks(const DeviceKernels& kernels, const BlocksTask& task, bool aligned) {
  const int64_t size = task.block.size, asked = task.x.dim() == 0 ? 1 : task.x.size(-1);
  const int64_t length = asked % size == 0 ? 2 * size : 2 * size + 5, blocks = (length + size - 1) / size;
  // Where one number for the tensor scales all blocks, the largest values would make zeros of the others.
  const auto dtype = task.x.scalar_type();
  const Tensor values = task.block.power_of_two ? hard_values(dtype, task.x.device(), aligned)
                                                : plain_values(dtype, task.x.device(), aligned, 0);
  const int64_t rows = values.numel() / length;
  BlocksTask hard = task;
  hard.seed = kSeed;
  hard.x = values.narrow(0, 0, rows * length).view({rows, length});
  if (task.values.defined()) hard.values = result_like(hard.x);
  if (task.codes.defined()) hard.codes = result_like(hard.x, task.codes.options());
  if (task.scales.defined()) hard.scales = at::full({rows, blocks}, 90, task.scales.options());
  if (task.unit.defined()) hard.unit = at::empty({}, task.unit.options());
  if (!kernels.round_blocks(hard)) return "";

  const Tensor x = hard.x.cpu(), y = at::empty_like(x);
  const Tensor codes = at::zeros_like(x, x.options().dtype(at::kByte));
  const Tensor scales = at::zeros({rows, blocks}, codes.options());
  const auto carrier = carrier_of(x.scalar_type(), "quantise");
  const kernel::KernelTable& cpu = kernel::kernels();
  double unit = 1;
  if (!task.block.power_of_two) {
    const double largest = std::min(cpu.largest[carrier](x.const_data_ptr(), x.numel()), task.block.largest);
    unit = std::max(double(float(largest / (task.block.element_max * task.block.scale_max))), 0x1p-126);
  }
  cpu.round_blocks[carrier](x.const_data_ptr(), y.mutable_data_ptr(), 0, x.numel(), length, task.rounding, task.block,
                            unit, kSeed, &task.code_spec,
                            hard.codes.defined() ? codes.mutable_data_ptr<uint8_t>() : nullptr,
                            scales.mutable_data_ptr<uint8_t>());
  std::string apart;
  if (hard.values.defined()) apart = difference(hard.values, y);
  if (apart.empty() && hard.codes.defined()) apart = difference(hard.codes, codes);
  if (apart.empty() && hard.scales.defined()) apart = difference(hard.scales, scales);
  return apart;
}

std::string check_keep(const DeviceKernels& kernels, const Tensor& values, bool aligned) {
  const Tensor y = plain_values(values.scalar_type(), values.device(), aligned, 0);
  constexpr double value = 1.25;
  constexpr uint32_t last = 0x9fffffff;
  if (!kernels.keep(y, value, last, kSeed)) return "";
  const Tensor wanted = at::empty_like(y, y.options().device(at::kCPU));
  const Tensor entry = at::full({}, value, wanted.options());
  kernel::kernels().keep[carrier_of(y.scalar_type(), "dropout")](wanted.mutable_data_ptr(), y.numel(),
                                                                 entry.const_data_ptr(), last, kSeed, 0);
  return difference(y, wanted);
}

std::string check_hash(const DeviceKernels& kernels, const Tensor& x) {
  const Tensor hard = hard_values(x.scalar_type(), x.device(), true);
  const Tensor sum = at::zeros({}, x.options().dtype(at::kLong));
  if (!kernels.hash(hard, sum)) return "";
  return difference(sum, at::full({}, static_cast<int64_t>(hash_of(hard.cpu())), at::kLong));
}

std::string check_pointwise_forward(const pointwise_parts::PointwiseKernels& kernels, const PointwiseProgram& program,
                                    const Tensor& like, const Tensors& kept, bool aligned) {
  const Tensors inputs = inputs_for(program, like, aligned);
  Tensors found{result_like(inputs[0])};
  for (const Tensor& t : kept) found.push_back(t.defined() ? result_like(inputs[0]) : Tensor());
  const Tensor result = found[0];
  if (!kernels.forward(program, inputs, result, Tensors(found.begin() + 1, found.end()))) return "";
  Tensors wanted = pointwise_parts::run_steps(program, on_host(inputs));
  wanted.insert(wanted.begin(), wanted.back());
  return first_of(found, wanted);
}

std::string check_pointwise_backward(const pointwise_parts::PointwiseKernels& kernels, const PointwiseProgram& program,
                                     const PointwiseNeeds& needs, const Tensor& like, const Tensors& results,
                                     bool aligned) {
  const Tensors all = inputs_for(program, like, aligned), computed = pointwise_parts::run_steps(program, on_host(all));
  Tensors inputs(all.size()), steps(program.steps.size()), found(results.size());
  std::vector<bool> wanted;
  for (size_t i = 0; i < all.size(); ++i)
    if (needs.inputs[i]) inputs[i] = all[i];
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!needs.kept[i]) continue;
    steps[i] = result_like(all[0]);
    steps[i].copy_(computed[i]);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    wanted.push_back(results[i].defined());
    if (wanted[i]) found[i] = result_like(all[0]);
  }
  const Tensor gradient = plain_values(like.scalar_type(), like.device(), aligned, 11);
  if (!kernels.backward(program, needs, gradient, inputs, steps, found)) return "";
  return first_of(
      found, pointwise_parts::backward_whole(program, needs, gradient.cpu(), on_host(inputs), on_host(steps), wanted));
}

}  // namespace plumb::cuda
