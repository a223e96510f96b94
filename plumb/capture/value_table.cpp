#include "plumb/capture/value_table.h"

#include <ATen/ATen.h>

namespace plumb {

std::optional<ValueTable::Memory> ValueTable::memory_of(const at::Tensor& t) {
  if (!t.has_storage() || t.layout() != at::kStrided || t.is_nested()) return std::nullopt;
  return Memory{t.storage().unsafeGetStorageImpl(), t.storage_offset(), t.sizes().vec(), t.strides().vec(),
                t.scalar_type()};
}

int ValueTable::add(const at::Tensor& tensor, RecordedValue::Origin origin) {
  RecordedValue value;
  value.origin = origin;
  if (tensor.defined()) {
    value.meta = TensorMeta::of(tensor);
    value.requires_grad = tensor.requires_grad();
    value.grad_fn = tensor.grad_fn().get();
  }
  values_.push_back(std::move(value));
  return static_cast<int>(values_.size()) - 1;
}

void ValueTable::bind(const at::Tensor& tensor, int value) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (auto known = by_object_.find(impl); known != by_object_.end() && known->second.value != value)
    (*this)[value].object_before = known->second.value;
  by_object_.insert_or_assign(
      impl,
      ObjectEntry{value, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr())});
  if (auto memory = memory_of(tensor)) {
    auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
    by_storage_[storage.get()].push_back(value);
    if (auto known = by_memory_.find(*memory); known != by_memory_.end() && known->second.value != value)
      (*this)[value].memory_before = known->second.value;
    by_memory_.insert_or_assign(std::move(*memory),
                                MemoryEntry{value, c10::weak_intrusive_ptr<c10::StorageImpl>(storage)});
  }
}

int ValueTable::find_object(const at::Tensor& tensor) const {
  auto it = by_object_.find(tensor.unsafeGetTensorImpl());
  return it == by_object_.end() ? -1 : living(it->second.value, &RecordedValue::object_before);
}

int ValueTable::living(int value, int RecordedValue::*before) const {
  while (value >= 0 && (*this)[value].dead) value = (*this)[value].*before;
  return value;
}

ValueTable::Found ValueTable::find(const at::Tensor& tensor) const {
  if (const int value = find_object(tensor); value >= 0) return {value, false};
  if (auto memory = memory_of(tensor)) {
    auto it = by_memory_.find(*memory);
    const int value = it == by_memory_.end() ? -1 : living(it->second.value, &RecordedValue::memory_before);
    if (value >= 0) return {value, true};
  }
  return {};
}

void ValueTable::mark_written(const at::Tensor& tensor) {
  auto touched = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (touched == by_storage_.end()) return;
  for (int value : touched->second) (*this)[value].written = true;
  touched->second.clear();
}

void ValueTable::drop_results(size_t first) {
  for (size_t i = first; i < values_.size(); ++i) {
    if (values_[i].origin == RecordedValue::Result) values_[i].dead = true;
  }
}

}  // namespace plumb
