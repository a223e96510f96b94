#include "plumb/capture/captured_model.h"

#include <ATen/autocast_mode.h>

#include <sstream>

namespace plumb {

std::string signature_of(const torch::nn::Module& model, const std::vector<at::Tensor>& inputs) {
  std::ostringstream key;
  for (const at::Tensor& x : inputs) {
    if (!x.defined()) {
      key << "undefined ";
      continue;
    }
    key << x.scalar_type() << x.sizes() << x.device() << (x.requires_grad() ? "g" : "-") << ' ';
  }
  for (const auto& m : model.modules()) {
    key << m->is_training();
    m->pretty_print(key);  // torch's layers print their options
  }
  for (const at::DeviceType d : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(d)) key << ' ' << d << at::autocast::get_autocast_dtype(d);
  }
  return key.str();
}

void check_same_tensors(const torch::nn::Module& model, const State& captured) {
  const auto refuse = [](const std::string& name) {
    throw Error(ErrorKind::InvalidState,
                "the model's '" + name + "' is another tensor than when it was captured: its graphs have the old one",
                name, "make a new CapturedModel, and an optimizer of its parameters(); or copy_() the values");
  };
  const State now = state_of(model);
  for (const Attr& attr : now) {
    const Attr* then = captured.find(attr.name);
    if (!then || !then->tensor.is_same(attr.tensor)) refuse(attr.name);
  }
  for (const Attr& attr : captured) {
    if (!now.contains(attr.name)) refuse(attr.name);
  }
}

void share_state(const GraphModule& from, GraphModule& to) {
  std::vector<std::pair<std::string, at::Tensor>> own;
  for (const Attr& attr : from.state()) {
    const Attr* other = attr.kind == AttrKind::Constant ? nullptr : to.state().find(attr.name);
    if (other && !other->tensor.is_same(attr.tensor)) own.emplace_back(attr.name, attr.tensor);
  }
  if (!own.empty()) to.set_state(own);
}

}  // namespace plumb
