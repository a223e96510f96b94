#include "plumb/partition/move.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/partition/pipe.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

bool is_device(const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->castRaw<c10::OptionalType>()->getElementType();
  return type->kind() == c10::TypeKind::DeviceObjType;
}

bool takes_tensor(const Node& node) { return std::ranges::any_of(node.inputs(), &Value::is_tensor); }

}  // namespace

// Device arguments say where tracing happened. An operator that makes a tensor of nothing needs one even where it said
// none; one that has a tensor input follows that.
std::vector<std::string> rewrite_devices(Graph& graph, at::Device device) {
  std::vector<std::string> changed;
  for (Node* node : graph.nodes()) {
    if (node->is_call()) {
      const auto& arguments = node->schema().arguments();
      for (size_t i = 0; i < arguments.size(); ++i) {
        if (!is_device(arguments[i]) || !node->arg(i).is_constant()) continue;
        if (node->arg(i).is_none() && (takes_tensor(*node) || device.is_cpu())) continue;
        if (!node->arg(i).is_none() && node->arg(i).constant().toDevice() == device) continue;
        node->set_arg(i, c10::IValue(device));
        if (node->num_results()) changed.push_back(node->result(0)->name());
      }
    }
    for (Value* v : node->results()) {
      if (!v->meta() || v->meta()->device == device) continue;
      TensorMeta meta = *v->meta();
      meta.device = device;
      v->set_meta(std::move(meta));
    }
  }
  return changed;
}

void move_module(GraphModule& module, at::Device device, const std::string& what) {
  std::unordered_map<const c10::TensorImpl*, at::Tensor> moved;
  for (const Attr& attr : std::vector<Attr>(module.state().attrs())) {
    if (!attr.tensor.defined()) continue;
    at::Tensor& twin = moved[attr.tensor.unsafeGetTensorImpl()];
    if (!twin.defined()) {
      at::NoGradGuard no_grad;
      try {
        // From the meta device there is nothing to copy: the stage gets memory to load weights into.
        twin = attr.tensor.is_meta() && !device.is_meta()
                   ? at::empty_like(attr.tensor, attr.tensor.options().device(device))
                   : attr.tensor.to(device);
      } catch (const c10::Error& e) {
        throw Error(ErrorKind::ExecutionFailed, str(what, " cannot be moved to ", device.str(), ": '", attr.name,
                                                    "': ", e.what_without_backtrace()));
      }
      if (!twin.is_same(attr.tensor)) {
        twin = twin.detach().set_requires_grad(attr.tensor.requires_grad());
        copy_tag(attr.tensor, twin);
      }
    }
    module.state().set(attr.name, twin);
  }
  rewrite_devices(module.graph(), device);
  module.sync_module();
}

void Pipe::move_stage(int index, at::Device device) {
  check_stage(index);
  move_module(*stages_[index], device, str("stage ", index));
  auto relabel = [&](std::optional<TensorMeta>& meta) {
    if (meta) meta->device = device;
  };
  for (StageInputPort& in : table_.stages[index].inputs) relabel(in.meta);
  for (StageOutputPort& out : table_.stages[index].outputs) relabel(out.meta);
}

void Pipe::to(at::Device device) {
  for (int s = 0; s < num_stages(); ++s) move_stage(s, device);
  rewrite_devices(*whole_, device);
  for (Origin& origin : origins_) {
    if (origin.stage >= 0 || !origin.tensor.defined()) continue;
    const bool grad = origin.tensor.requires_grad();
    origin.tensor = origin.tensor.detach().to(device).set_requires_grad(grad);
  }
  for (auto& meta : input_metas_) {
    if (meta) meta->device = device;
  }
}

}  // namespace plumb
