#include "plumb/scaling/differentiable.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "plumb/autograd/backward_checkpoints.h"
#include "plumb/autograd/node_handle.h"
#include "plumb/core/error.h"
#include "plumb/numerics/tangent.h"
#include "plumb/scaling/kernels.h"

namespace plumb {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;

struct Source {
  enum Kind { Grad, Tensor, Value, Size, Output, Mask } kind;
  size_t index = 0;
};

struct Plan {
  std::string node_name;
  std::optional<c10::OperatorHandle> forward, backward;
  std::vector<Source> sources;         // one for each argument of backward
  std::vector<size_t> differentiable;  // one for each return of backward: position in forward's arguments
  size_t outputs = 1;
};

[[noreturn]] void bad_schema(const std::string& op, const std::string& why) {
  throw Error(ErrorKind::Internal, "The schemas of " + op + " and its backward do not fit: " + why + ".");
}

Plan make_plan(const c10::OperatorHandle& op) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto& name = op.operator_name();
  const size_t colons = name.name.find("::");
  const std::string space = name.name.substr(0, colons + 2), base = name.name.substr(colons + 2);
  Plan plan;
  plan.node_name = space + base + "_backward";
  plan.forward = dispatcher.findSchema({space + "native_" + base, name.overload_name});
  if (!plan.forward) plan.forward = op;
  plan.backward = dispatcher.findSchema({plan.node_name, name.overload_name});
  if (!plan.backward) bad_schema(name.name, "there is no " + plan.node_name);
  const auto& arguments = op.schema().arguments();
  const auto& returns = plan.forward->schema().returns();
  plan.outputs = returns.size();
  auto find_argument = [&](std::string_view wanted) -> std::optional<size_t> {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == wanted) return i;
    }
    return std::nullopt;
  };
  auto is_tensor = [&](size_t i) { return arguments[i].type()->isSubtypeOf(*c10::OptionalType::ofTensor()); };
  for (const auto& argument : plan.backward->schema().arguments()) {
    const std::string& wanted = argument.name();
    if (wanted == "grad") {
      plan.sources.push_back({Source::Grad});
    } else if (wanted == "mask") {
      plan.sources.push_back({Source::Mask});
    } else if (auto i = find_argument(wanted)) {
      plan.sources.push_back({is_tensor(*i) ? Source::Tensor : Source::Value, *i});
    } else if (auto j = wanted.ends_with("_size") ? find_argument(wanted.substr(0, wanted.size() - 5)) : std::nullopt) {
      plan.sources.push_back({Source::Size, *j});
    } else {
      size_t k = 0;
      while (k < returns.size() && returns[k].name() != wanted) ++k;
      if (k == returns.size()) bad_schema(name.name, "nothing is called " + wanted);
      plan.sources.push_back({Source::Output, k});
    }
  }
  for (const auto& result : plan.backward->schema().returns()) {
    auto i = result.name().starts_with("grad_") ? find_argument(result.name().substr(5)) : std::nullopt;
    if (!i || !is_tensor(*i)) bad_schema(name.name, "return " + result.name() + " names no tensor argument");
    plan.differentiable.push_back(*i);
  }
  return plan;
}

const at::Tensor* tensor_of(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? &value.toTensor() : nullptr;
}

struct OperatorNode : Node, SavesTensors {
  const Plan* plan = nullptr;
  // For each source its saved form; tensors in `saved`, everything else in `values`.
  std::vector<c10::IValue> values;
  std::vector<SavedVariable> saved;
  bool released = false;

  std::string name() const override { return plan->node_name; }

  void visit_saved(const std::function<void(SavedVariable&)>& visit) override {
    for (size_t i = 0; i < saved.size(); ++i) {
      if (plan->sources[i].kind == Source::Tensor) visit(saved[i]);
    }
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list results(plan->differentiable.size());
    if (!grads[0].defined()) return results;
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    Stack stack;
    stack.reserve(plan->sources.size());
    for (size_t i = 0; i < plan->sources.size(); ++i) {
      switch (plan->sources[i].kind) {
        case Source::Grad: stack.emplace_back(std::move(grads[0])); break;
        case Source::Tensor: stack.emplace_back(saved[i].unpack()); break;
        case Source::Output: stack.emplace_back(saved[i].unpack(node_handle<Node>(this))); break;
        case Source::Value:
        case Source::Size: stack.push_back(values[i]); break;
        case Source::Mask: {
          c10::List<bool> mask;
          for (size_t k = 0; k < results.size(); ++k) mask.push_back(task_should_compute_output(k));
          stack.emplace_back(std::move(mask));
        }
      }
    }
    plan->backward->callBoxed(stack);
    for (size_t k = 0; k < results.size(); ++k) {
      if (stack[k].isTensor()) results[k] = std::move(stack[k]).toTensor();
    }
    return results;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    released = true;
    for (auto& variable : saved) variable.reset_data();
  }
};

class DifferentiableKernel : public c10::OperatorKernel {
 public:
  explicit DifferentiableKernel(IsIdentity is_identity) : is_identity_(is_identity) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    std::call_once(planned_, [&] { plan_ = make_plan(op); });
    const size_t count = op.schema().arguments().size(), first = stack->size() - count;
    auto argument = [&](size_t i) -> const c10::IValue& { return (*stack)[first + i]; };
    bool requires_grad = false;
    for (size_t i = 0; i < count; ++i) {
      if (const auto* tensor = tensor_of(argument(i))) refuse_tangent(op.operator_name().name, *tensor);
    }
    if (is_identity_ && is_identity_(torch::jit::last(*stack, count)) && ordinary(argument(0).toTensor())) {
      const at::Tensor& first_argument = argument(0).toTensor();
      at::Tensor same = first_argument.view_as(first_argument);
      stack->resize(first);
      stack->emplace_back(std::move(same));
      return;
    }
    for (size_t i : plan_.differentiable) {
      const auto* tensor = tensor_of(argument(i));
      requires_grad |= tensor && tensor->requires_grad();
    }
    if (!requires_grad || !at::GradMode::is_enabled()) {
      op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
      return;
    }
    auto node = make_node<OperatorNode>();
    node->plan = &plan_;
    for (size_t i : plan_.differentiable) {
      const auto* tensor = tensor_of(argument(i));
      node->add_next_edge(tensor && tensor->requires_grad() ? torch::autograd::impl::gradient_edge(*tensor)
                                                            : torch::autograd::Edge());
    }
    node->values.resize(plan_.sources.size());
    node->saved.resize(plan_.sources.size());
    for (size_t k = 0; k < plan_.sources.size(); ++k) {
      const auto& source = plan_.sources[k];
      const c10::IValue* value =
          source.kind == Source::Output || source.kind == Source::Grad ? nullptr : &argument(source.index);
      const auto* tensor = value ? tensor_of(*value) : nullptr;
      if (source.kind == Source::Tensor && tensor) node->saved[k] = SavedVariable(*tensor, /*is_output=*/false);
      if (source.kind == Source::Value) node->values[k] = *value;
      if (source.kind == Source::Size) node->values[k] = tensor ? c10::IValue(tensor->sym_sizes()) : c10::IValue();
    }
    {
      at::AutoDispatchBelowADInplaceOrView below;
      plan_.forward->callBoxed(stack);
    }
    at::Tensor result = (*stack)[first].toTensor();
    torch::autograd::set_history(result, node);
    for (size_t k = 0; k < plan_.sources.size(); ++k) {
      const auto& source = plan_.sources[k];
      if (source.kind != Source::Output) continue;
      if (const auto* tensor = tensor_of((*stack)[first + source.index])) {
        node->saved[k] = SavedVariable(*tensor, /*is_output=*/source.index == 0);
      }
    }
    stack->resize(first);
    stack->emplace_back(std::move(result));
  }

 private:
  // Watched by autograd alone.
  static bool ordinary(const at::Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below;
    return plain(tensor);
  }

  const IsIdentity is_identity_;
  std::once_flag planned_;
  Plan plan_;
};

void backward_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  bool watched = false;
  if (at::GradMode::is_enabled()) {
    const size_t count = op.schema().arguments().size();
    for (size_t i = stack->size() - count; i < stack->size(); ++i) {
      const auto* tensor = tensor_of((*stack)[i]);
      watched |= tensor && tensor->requires_grad();
    }
  }
  if (!watched) return call_below_autograd(op, keys, stack);
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

torch::CppFunction differentiable(IsIdentity is_identity) {
  return torch::CppFunction::makeFromBoxedKernel(
      c10::BoxedKernel::makeFromFunctor(std::make_unique<DifferentiableKernel>(is_identity)));
}

torch::CppFunction differentiable_backward() { return torch::CppFunction::makeFromBoxedFunction<&backward_kernel>(); }

template <GradientLayout layout>
void gradient_sizes(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, schema.arguments().size());
  const at::Tensor& grad = arguments[0].toTensor();
  const c10::List<bool> mask = arguments.back().toBoolList();
  auto find = [&](const std::string& name) {
    const auto index = schema.argumentIndexWithName(name);
    return index ? &arguments[static_cast<size_t>(*index)] : nullptr;
  };
  auto sized = [&](c10::SymIntArrayRef sizes) {
    return layout == GradientLayout::kAsArgument && grad.sym_sizes() == sizes ? at::empty_like(grad)
                                                                              : grad.new_empty_symint(sizes);
  };
  auto like = [](const at::Tensor* tensor) {
    if (!tensor) return at::Tensor();
    return layout == GradientLayout::kAsArgument ? at::empty_like(*tensor)
                                                 : at::empty_like(*tensor, {}, at::MemoryFormat::Contiguous);
  };
  for (size_t k = 0; k < schema.returns().size(); ++k) {
    const std::string name = schema.returns()[k].name().substr(5);
    if (!mask.get(k)) {
      stack->emplace_back(at::Tensor());
    } else if (const auto* argument = find(name)) {
      stack->emplace_back(like(tensor_of(*argument)));
    } else if (const auto* codes = find(name + "_codes")) {
      stack->emplace_back(sized(codes->toTensor().sym_sizes()));
    } else if (const auto* sizes = find(name + "_size")) {
      stack->emplace_back(sized(sizes->toSymIntVector()));
    } else if (name == "bias") {
      stack->emplace_back(sized({grad.sym_size(-1)}));
    } else {
      stack->emplace_back(like(tensor_of(arguments[arguments[1].isTensor() ? 1 : 0])));
    }
  }
}
template void gradient_sizes<GradientLayout::kAsArgument>(const c10::OperatorHandle&, Stack*);
template void gradient_sizes<GradientLayout::kInOrder>(const c10::OperatorHandle&, Stack*);

bool recording(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad() &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}

void refuse_second_gradient(const char* op, const at::Tensor& grad, const char* instead) {
  if (!recording(grad)) return;
  throw Error(
      ErrorKind::Unsupported, std::string(op) + " has no gradient of a gradient", "",
      std::string(instead) +
          " where gradients of gradients are needed; torch.autograd.grad in the place of torch.func (grad, vjp, "
          "jacrev), which asks for them always");
}

at::Tensor scaled(at::Tensor fresh, double s) {
  if (s == 1 || !fresh.defined()) return fresh;
  return recording(fresh) ? at::mul(fresh, s) : fresh.mul_(s);
}

}  // namespace plumb
