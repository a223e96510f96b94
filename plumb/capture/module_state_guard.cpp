#include "plumb/capture/module_state_guard.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <unordered_set>

namespace plumb {

ModuleStateGuard::ModuleStateGuard(const State& state, const std::vector<c10::IValue>& inputs) {
  keep_generator(at::Device(at::kCPU));
  std::unordered_set<const c10::TensorImpl*> seen;
  int index = -1;
  for (const Attr& attr : state) {
    ++index;
    if (!attr.tensor.defined() || !seen.insert(attr.tensor.unsafeGetTensorImpl()).second) continue;
    watch(index, attr.tensor);
    // torch.func.functional_call puts tensors there that others compute: they keep no gradient, and warn who asks for
    // it.
    if (attr.kind == AttrKind::Parameter && attr.tensor.is_leaf()) grads_.emplace_back(attr.tensor, attr.tensor.grad());
    keep_generator(attr.tensor.device());
  }
  for (const auto& v : inputs) {
    if (v.isTensor() && v.toTensor().defined()) keep_generator(v.toTensor().device());
  }
}

void ModuleStateGuard::keep_generator(const at::Device& device) {
  if (device.is_meta()) return;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  if (std::any_of(generators_.begin(), generators_.end(), [&](const auto& kept) { return kept.first == generator; }))
    return;
  std::lock_guard<std::mutex> lock(generator.mutex());
  generators_.emplace_back(generator, generator.get_state());
}

ModuleStateGuard::~ModuleStateGuard() {
  at::NoGradGuard no_grad;
  for (auto& [index, kept] : contents_) kept.first.detach().copy_(kept.second);
  for (auto& [parameter, grad] : grads_) {
    if (!parameter.grad().is_same(grad)) parameter.mutable_grad() = grad;
  }
  for (auto& [generator, state] : generators_) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

void ModuleStateGuard::watch(int index, const at::Tensor& tensor) {
  if (tensor.has_storage()) by_storage_[tensor.storage().unsafeGetStorageImpl()].emplace_back(index, tensor);
}

void ModuleStateGuard::before_write(const at::Tensor& tensor) {
  auto it = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == by_storage_.end()) return;
  at::NoGradGuard no_grad;
  for (const auto& [index, watched] : it->second) {
    if (!was_written(index)) contents_.emplace(index, std::pair(watched, watched.detach().clone()));
  }
}

}  // namespace plumb
