// The parts of plumb::pointwise: steps on whole tensors, and on blocks in cache. Not for other rooms.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "plumb/pointwise/pointwise.h"

namespace plumb::pointwise_parts {

using Tensors = std::vector<at::Tensor>;

// True if the gradient of this argument is the gradient of the step's result, unchanged.
inline bool passes_gradient_through(const PointwiseStep& step, int side) {
  return step.kind == PointwiseKind::Add || (step.kind == PointwiseKind::Sub && side == 0) ||
         (step.kind == PointwiseKind::Scale && step.backward == 1);
}

// Runs step by step with torch's operators, which autograd may watch. Returns every step's result, the last one's too.
Tensors run_steps(const PointwiseProgram& program, at::TensorList inputs);
at::Tensor run_whole(const PointwiseProgram& program, at::TensorList inputs);

// Returns gradients of the wanted inputs, by operators that autograd may watch. inputs and steps hold what was saved;
// results that are computed again are added to `steps`.
Tensors backward_whole(const PointwiseProgram& program, const PointwiseNeeds& needs, const at::Tensor& gradient,
                       const Tensors& inputs, Tensors steps, const std::vector<bool>& wanted);

// Runs all of a program in one kernel, for tensors of one kind of device, in C order. The room that has such kernels
// registers them. Both functions return false and write nothing if they cannot run. `kept`, `results`: may be
// undefined.
struct PointwiseKernels {
  bool (*forward)(const PointwiseProgram& program, at::TensorList inputs, const at::Tensor& result,
                  const Tensors& kept);
  bool (*backward)(const PointwiseProgram& program, const PointwiseNeeds& needs, const at::Tensor& gradient,
                   const Tensors& inputs, const Tensors& steps, const Tensors& results);
};
void register_pointwise_kernels(at::DeviceType kind, const PointwiseKernels* kernels);
// Returns the kernels for tensors like x, or null.
const PointwiseKernels* pointwise_kernels_for(const at::Tensor& x);

// Returns whether a tensor is dense in C order, on the CPU or where there are kernels for it: in other layouts torch
// picks other kernels, whose last bits differ.
bool blockable(const at::Tensor& x);

// `kept`: for each step undefined, or where its result goes as well. Inputs must be blockable.
at::Tensor run_in_blocks(const PointwiseProgram& program, at::TensorList inputs, const Tensors& kept);

// As backward_whole, with nothing that autograd sees. Saved tensors and the gradient must be blockable.
Tensors backward_in_blocks(const PointwiseProgram& program, const PointwiseNeeds& needs, const at::Tensor& gradient,
                           const Tensors& inputs, const Tensors& steps, const std::vector<bool>& wanted);

}  // namespace plumb::pointwise_parts
