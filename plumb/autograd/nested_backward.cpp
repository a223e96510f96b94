#include "plumb/autograd/nested_backward.h"

#include "plumb/core/error.h"
#include "plumb/graph/tree_spec.h"

namespace plumb {
namespace {

Tensors tensors_of(const std::vector<c10::IValue>& leaves) {
  Tensors tensors;
  for (const c10::IValue& leaf : leaves) tensors.push_back(leaf.isTensor() ? leaf.toTensor() : at::Tensor());
  return tensors;
}

}  // namespace

Tensors stage_backward_nested(const c10::IValue& outputs, const c10::IValue& output_grads, const Tensors& inputs) {
  TreeSpec out_spec, grad_spec;
  const Tensors flat = tensors_of(flatten(outputs, &out_spec));
  if (output_grads.isNone()) return stage_backward(flat, {}, inputs);
  const Tensors grads = tensors_of(flatten(output_grads, &grad_spec));
  if (!(out_spec == grad_spec)) {
    throw Error(ErrorKind::StructureMismatch,
                "the gradients are built as " + grad_spec.to_string() + ", the outputs as " + out_spec.to_string(), "",
                "the outputs' structure, with None where an output has no gradient");
  }
  return stage_backward(flat, grads, inputs);
}

}  // namespace plumb
