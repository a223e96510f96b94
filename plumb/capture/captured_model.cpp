#include "plumb/capture/captured_model.h"

#include <sstream>

namespace plumb {

std::string signature_of(const torch::nn::Module& model, const std::vector<at::Tensor>& inputs) {
  std::ostringstream key;
  for (const at::Tensor& x : inputs)
    key << x.scalar_type() << x.sizes() << x.device() << (x.requires_grad() ? "g" : "-") << ' ';
  for (const auto& m : model.modules()) key << m->is_training();
  return key.str();
}

void share_state(const GraphModule& from, GraphModule& to) {
  std::vector<std::pair<std::string, at::Tensor>> own;
  for (const Attr& attr : from.state()) {
    if (attr.kind != AttrKind::Constant && to.state().contains(attr.name)) own.emplace_back(attr.name, attr.tensor);
  }
  to.set_state(own);
}

}  // namespace plumb
