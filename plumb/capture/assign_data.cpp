// Assignments to `.data`, which no operator shows: they exchange the memory of a tensor under autograd's eyes.
#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/capture/session.h"
#include "plumb/operators/dispatch_keys.h"

namespace plumb {
namespace {

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage()) return false;
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.layout() == b.layout();
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.is_alias_of(b);
}

}  // namespace

// The backward of what was computed so far would find other values in the tensor.
bool Session::was_read_for_gradients(const at::Tensor& tensor) const {
  const int now = recorder.values.find_object(tensor);
  for (const Record& record : recorder.records) {
    if (!record.grad_enabled || record.op.schema().name() == "aten::detach") continue;
    const bool differentiable =
        std::ranges::any_of(record.results, [&](int value) { return recorder.values[value].requires_grad; });
    bool reads = false;
    for (const RecordedArg& arg : record.args) for_each_value(arg, [&](int value) { reads = reads || value == now; });
    if (differentiable && reads) return true;
  }
  return false;
}

void Session::assign_data(const at::Tensor& tensor, const at::Tensor& value) {
  {
    c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
    if (tensor.is_same(value) || (share_memory(tensor, value) && same_layout(tensor, value) &&
                                  tensor.storage_offset() == value.storage_offset()))
      return;
    const int target = recorder.look_up(tensor, "an assignment to .data");
    recorder.look_up(value, "an assignment to .data");
    const auto attribute = std::ranges::find_if(
        recorder.attributes, [&](const Attr& attr) { return attr.tensor.defined() && attr.tensor.is_same(tensor); });
    const std::string assigned = "the forward assigns to .data of ";
    if (attribute == recorder.attributes.end()) {
      recorder.refuse(assigned + "a tensor that is no parameter, buffer or attribute of the model",
                      "compute a new tensor, or write with copy_()");
    }
    const std::string name = "'" + attribute->name + "'";
    if (!same_layout(tensor, value)) {
      recorder.refuse(assigned + name + " a tensor of another shape, dtype, device or layout",
                      "keep these, as copy_() does");
    }
    const auto shared =
        std::ranges::find_if(recorder.attributes, [&](const Attr& attr) { return share_memory(attr.tensor, value); });
    const bool of_input =
        std::ranges::any_of(recorder.fed, [&](const at::Tensor& x) { return share_memory(x, value); });
    if (shared != recorder.attributes.end() || of_input) {
      recorder.refuse(assigned + name + " the memory of " + (of_input ? "an input" : "'" + shared->name + "'") +
                          ", which both would share from then on",
                      "copy the values: .data.copy_(...), or assign a clone()");
    }
    if (was_read_for_gradients(tensor)) {
      recorder.refuse(assigned + name + " after it was used for results that need a gradient",
                      "assign before the tensor is used, or use it under torch.no_grad()");
    }
    module_state_.before_write(tensor);
    recorder.stale.add(tensor);
    at::Tensor(tensor).set_data(value.detach().clone(at::MemoryFormat::Preserve));
    recorder.values.bind(tensor, target);
    recorder.note_here(name + ".data is assigned in the forward: the graph copies the values into its memory");
  }
  tensor.variable_data().copy_(value);  // seen like a call of the program
  recorder.stale.add_twins(tensor, value);
}

void Session::refuse_other_memory() {
  const int index = module_state_.find_moved();
  if (index < 0) return;
  recorder.refuse("the forward gives '" + recorder.attributes[static_cast<size_t>(index)].name +
                      "' other memory in a way that cannot be seen (set_data)",
                  "write the values with copy_()");
}

}  // namespace plumb
