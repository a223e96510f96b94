#include "plumb/exported/infer_types.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "plumb/graph/schema_fit.h"

namespace plumb::pt2 {
namespace {

std::optional<at::Tensor> stand_in(const Arg& arg) {
  if (!arg.is_value() || !arg.value()->meta()) return std::nullopt;
  const TensorMeta& meta = *arg.value()->meta();
  return at::empty_strided(meta.sizes,
                           meta.strides.size() == meta.sizes.size() ? meta.strides : contiguous_strides(meta.sizes),
                           at::dtype(meta.dtype).device(at::kMeta));
}

// False if the argument cannot be stood in for.
bool push_argument(torch::jit::Stack& stack, const c10::OperatorHandle& op, size_t i, const Arg& arg) {
  if (arg.is_value()) {
    auto tensor = stand_in(arg);
    if (tensor) stack.emplace_back(*tensor);
    return tensor.has_value();
  }
  if (arg.is_list() && (arg.has_values() || arg.list().empty())) {
    const bool optional = op.schema().arguments()[i].type()->str().find("Tensor?") != std::string::npos;
    c10::List<at::Tensor> tensors;
    c10::List<std::optional<at::Tensor>> optionals;
    for (const Arg& e : arg.list()) {
      if (optional && e.is_none()) {
        optionals.push_back(std::nullopt);
        continue;
      }
      auto tensor = stand_in(e);
      if (!tensor) return false;
      tensors.push_back(*tensor);
      optionals.push_back(tensor);
    }
    stack.push_back(optional ? c10::IValue(optionals) : c10::IValue(tensors));
    return true;
  }
  const Arg fitted = fit_argument(op.schema(), i, arg);
  if (!fitted.is_constant()) return false;
  const c10::IValue& v = fitted.constant();
  const auto type = op.schema().arguments()[i].type();
  const bool wants_tensor = type->kind() == c10::TypeKind::TensorType;
  if (wants_tensor && v.isScalar()) {
    stack.emplace_back(at::native::wrapped_scalar_tensor(v.toScalar()));
  } else if (wants_tensor && v.isNone()) {
    stack.emplace_back(at::Tensor());
  } else {
    // A device argument would make real memory.
    stack.push_back(v.isDevice() ? c10::IValue(at::Device(at::kMeta)) : v);
  }
  return true;
}

std::optional<TensorMeta> type_of(const at::Tensor& tensor, const std::vector<Arg>& args) {
  if (!tensor.defined()) return std::nullopt;
  TensorMeta meta = TensorMeta::of(tensor);
  for (const Arg& arg : args) {
    if (arg.is_constant() && arg.constant().isDevice()) {
      meta.device = arg.constant().toDevice();
      return meta;
    }
  }
  meta.device = at::kCPU;
  for (const Arg& arg : args) {
    const Value* value = arg.is_list() && !arg.list().empty() ? arg.list()[0].value() : arg.value();
    if (!value || !value->meta()) continue;
    meta.device = value->meta()->device;
    break;
  }
  return meta;
}

}  // namespace

std::vector<std::optional<TensorMeta>> infer_types(const c10::OperatorHandle& op, const std::vector<Arg>& args) {
  std::vector<std::optional<TensorMeta>> types;
  try {
    torch::jit::Stack stack;
    bool tensors = false;
    for (size_t i = 0; i < args.size(); ++i) {
      if (!push_argument(stack, op, i, args[i])) return {};
      tensors = tensors || args[i].has_values();
    }
    if (!tensors) return {};  // a factory: it might make real memory
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
    for (const c10::IValue& result : stack) {
      if (result.isTensor()) {
        types.push_back(type_of(result.toTensor(), args));
      } else if (result.isTensorList()) {
        for (const at::Tensor& t : result.toTensorVector()) types.push_back(type_of(t, args));
      } else {
        types.emplace_back();
      }
    }
  } catch (const std::exception&) {
    return {};
  }
  return types;
}

}  // namespace plumb::pt2
