#include "plumb/capture/stale_memory.h"

namespace plumb {
namespace {

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

Weak memory_of(const at::Tensor& tensor) { return tensor.storage().getWeakStorageImpl(); }

}  // namespace

void StaleMemory::add(const at::Tensor& tensor) {
  stale_.emplace(tensor.storage().unsafeGetStorageImpl(), memory_of(tensor));
}

void StaleMemory::add_twins(const at::Tensor& a, const at::Tensor& b) {
  twins_[a.storage().unsafeGetStorageImpl()].push_back(memory_of(b));
  twins_[b.storage().unsafeGetStorageImpl()].push_back(memory_of(a));
}

void StaleMemory::before_write(const at::Tensor& tensor) {
  const auto it = twins_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == twins_.end()) return;
  for (const Weak& twin : it->second) stale_.emplace(twin._unsafe_get_target(), twin);
}

bool StaleMemory::contains(const at::Tensor& tensor) const {
  return !stale_.empty() && tensor.has_storage() && stale_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
}

}  // namespace plumb
