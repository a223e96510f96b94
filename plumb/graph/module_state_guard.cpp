#include "plumb/graph/module_state_guard.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <unordered_set>

#include "plumb/graph/aliases.h"
#include "plumb/tensors/node_seeds.h"

namespace plumb {
namespace {

bool has_memory_of(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.is_alias_of(b) && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// Returns false, too, for dtypes that torch cannot compare.
bool have_equal_contents(const at::Tensor& a, const at::Tensor& b) {
  try {
    return a.equal(b);
  } catch (const c10::Error&) {
    return false;
  }
}

int64_t version_of(const at::Tensor& t) { return t.defined() && !t.is_inference() ? t._version() : 0; }

}  // namespace

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
    if (attr.kind == AttrKind::Parameter && attr.tensor.is_leaf())
      grads_.push_back({attr.tensor, attr.tensor.grad(), version_of(attr.tensor.grad())});
    keep_generator(attr.tensor.device());
  }
  for (const auto& v : inputs) {
    if (v.isTensor() && v.toTensor().defined()) keep_generator(v.toTensor().device());
  }
}

void ModuleStateGuard::keep_generator(const at::Device& device) {
  if (device.is_meta()) return;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  if (std::any_of(generators_.begin(), generators_.end(),
                  [&](const Drawn& kept) { return kept.generator == generator; }))
    return;
  std::lock_guard<std::mutex> lock(generator.mutex());
  generators_.push_back({generator, generator.get_state(), generator.current_seed()});
}

ModuleStateGuard::~ModuleStateGuard() {
  put_contents_back();
  for (auto& [parameter, grad, version] : grads_) {
    if (may_write_gradient(parameter) && !parameter.grad().is_same(grad)) parameter.mutable_grad() = grad;
  }
  put_generators_back();
}

void ModuleStateGuard::put_contents_back() {
  at::NoGradGuard no_grad;
  for (auto& [index, kept] : contents_) {
    try {
      if (!has_memory_of(kept.tensor, kept.as_it_was)) kept.tensor.set_data(kept.as_it_was);
      // Backwards to come that have saved the tensor find the same contents: its version stays as well.
      if (kept.contents.defined()) kept.as_it_was.variable_data().copy_(kept.contents);
    } catch (const std::exception& error) {  // nothing may leave a destructor
      TORCH_WARN("a tensor of the module could not be put back as it was before the run: ", error.what());
    }
  }
}

void ModuleStateGuard::put_generators_back() {
  for (const auto& [generator, state, seed] : generators_) set_generator_state(generator, state);
}

std::vector<at::Generator> ModuleStateGuard::generators() const {
  std::vector<at::Generator> all;
  for (const Drawn& kept : generators_) all.push_back(kept.generator);
  return all;
}

at::Tensor ModuleStateGuard::find_changed_gradient() const {
  for (const auto& [parameter, grad, version] : grads_) {
    if (!may_write_gradient(parameter)) continue;
    const at::Tensor& now = parameter.grad();
    if (!now.is_same(grad) || version_of(now) != version) return parameter;
  }
  return {};
}

bool ModuleStateGuard::was_seeded() const {
  return std::any_of(generators_.begin(), generators_.end(), [](Drawn kept) {
    std::lock_guard<std::mutex> lock(kept.generator.mutex());
    return kept.generator.current_seed() != kept.seed;
  });
}

void ModuleStateGuard::watch(int index, const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  const bool subclass = tensor.key_set().has(c10::DispatchKey::Python);
  by_storage_[tensor.storage().unsafeGetStorageImpl()].push_back(
      {index, tensor, subclass ? at::Tensor() : tensor.tensor_data()});
}

void ModuleStateGuard::before_write(const at::Tensor& tensor) {
  auto it = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == by_storage_.end()) return;
  at::NoGradGuard no_grad;
  for (const Watched& watched : it->second) {
    if (was_written(watched.index)) continue;
    at::Tensor as_it_was = watched.as_it_was.defined() ? watched.as_it_was : watched.tensor.detach();
    contents_.emplace(watched.index, Kept{watched.tensor, as_it_was, as_it_was.clone()});
  }
}

bool ModuleStateGuard::was_not_written(const at::Tensor& tensor) {
  auto it = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == by_storage_.end()) return true;
  at::NoGradGuard no_grad;
  for (const Watched& watched : it->second) {
    const auto kept = contents_.find(watched.index);
    if (kept == contents_.end()) continue;
    if (!have_equal_contents(kept->second.as_it_was, kept->second.contents)) return false;
    contents_.erase(kept);
  }
  return true;
}

void ModuleStateGuard::keep_written(const Graph& graph, const State& state) {
  for (const Attr* attr : written_state(graph, state)) {
    if (attr->tensor.defined() && attr->tensor.has_storage()) before_write(attr->tensor);
  }
  for (const Attr& attr : state) {
    if (attr.kind == AttrKind::Buffer && attr.tensor.defined() && attr.tensor.has_storage()) before_write(attr.tensor);
  }
}

int ModuleStateGuard::find_moved() {
  int found = -1;
  for (const auto& [storage, all] : by_storage_) {
    for (const Watched& watched : all) {
      if (was_written(watched.index) || !watched.as_it_was.defined() ||
          has_memory_of(watched.tensor, watched.as_it_was))
        continue;
      contents_.emplace(watched.index, Kept{watched.tensor, watched.as_it_was, {}});
      if (found < 0 || watched.index < found) found = watched.index;
    }
  }
  return found;
}

}  // namespace plumb
