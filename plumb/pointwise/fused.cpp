#include "plumb/pointwise/fused.h"

#include <algorithm>

#include "plumb/pointwise/parts.h"

namespace plumb {
namespace {

bool fits_one_kernel(const at::Tensor& like, at::TensorList tensors) {
  return fuses_pointwise(like) && std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
           return pointwise_parts::blockable(t) && t.sizes() == like.sizes() && t.scalar_type() == like.scalar_type() &&
                  t.device() == like.device();
         });
}

}  // namespace

bool fuses_pointwise(const at::Tensor& x) { return pointwise_parts::pointwise_kernels_for(x) != nullptr; }

at::Tensor fused_pointwise(const PointwiseProgram& program, at::TensorList inputs) {
  if (!fits_one_kernel(inputs[0], inputs)) return {};
  return pointwise_parts::run_in_blocks(program, inputs, std::vector<at::Tensor>(program.steps.size()));
}

std::vector<at::Tensor> fused_pointwise_backward(const PointwiseProgram& program, const at::Tensor& gradient,
                                                 at::TensorList inputs, const std::vector<bool>& wanted) {
  if (!fits_one_kernel(gradient, gradient) || !fits_one_kernel(gradient, inputs))
    return std::vector<at::Tensor>(inputs.size());
  return pointwise_parts::backward_in_blocks(program, pointwise_needs(program, wanted), gradient, inputs.vec(),
                                             std::vector<at::Tensor>(program.steps.size()), wanted);
}

PointwiseProgram scaled_step(PointwiseKind kind, double before, double after, double back) {
  using Arg = PointwiseArg;
  PointwiseProgram program;
  program.num_inputs = 1;
  program.steps.push_back({PointwiseKind::Scale, {Arg::Input, 0}, {}, before, back});
  program.steps.push_back({kind, {Arg::Step, 0}, {}});
  program.steps.push_back({PointwiseKind::Scale, {Arg::Step, 1}, {}, after, 1});
  return program;
}

}  // namespace plumb
