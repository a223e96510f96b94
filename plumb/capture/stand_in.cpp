#include "plumb/capture/stand_in.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string_view>
#include <unordered_set>

namespace plumb::capture_detail {
namespace {

using FunctionPtr = decltype(torch::autograd::Edge::function);  // shared or intrusive, by torch's version

// What a stand-in claims to come from: nobody goes backward through a capture.
struct StandInNode : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
  std::string name() const override { return "plumb::StandIn"; }
};

template <typename Pointer>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<StandInNode>();
  } else {
    return c10::make_intrusive<StandInNode>();
  }
}

// Those whose strides do not depend on the device: attention and convolutions choose other layouts on the CPU.
bool is_matrix_product(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {"aten::linear", "aten::matmul", "aten::mm",
                                                             "aten::bmm",    "aten::addmm",  "aten::baddbmm"};
  return names.count(name) > 0;
}

bool is_plain(const at::Tensor& t) {
  return t.is_cpu() && t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized() &&
         !t.key_set().has(c10::DispatchKey::Python) && !t.key_set().has(c10::DispatchKey::FuncTorchBatched) &&
         !t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper);
}

}  // namespace

bool stand_in(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (!schema.overload_name().empty() || !is_matrix_product(schema.name())) return false;
  torch::jit::Stack shapes;
  for (const c10::IValue& v : torch::jit::last(*stack, schema.arguments().size())) {
    if (!v.isTensor() || !v.toTensor().defined()) {
      shapes.push_back(v);
      continue;
    }
    const at::Tensor& t = v.toTensor();
    if (!is_plain(t)) return false;
    at::Tensor shape = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
    shapes.emplace_back(shape.set_requires_grad(t.requires_grad()));
  }
  try {
    op.callBoxed(shapes);
  } catch (const c10::Error&) {
    return false;  // the call itself says better what is wrong
  }
  const at::Tensor& shape = shapes.back().toTensor();
  at::Tensor result =
      at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(at::kCPU).requires_grad(false)).zero_();
  if (shape.requires_grad()) {
    // No leaf: the model may go on in place.
    auto node = make_node<FunctionPtr>();
    const uint32_t slot = node->add_input_metadata(result);
    torch::autograd::impl::set_gradient_edge(result, {node, slot});
  }
  torch::jit::drop(*stack, schema.arguments().size());
  stack->emplace_back(std::move(result));
  return true;
}

bool has_sizes_from_values(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

}  // namespace plumb::capture_detail
