// Functions that a graph cannot look into: one plumb::python_function node calls each.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <deque>
#include <mutex>

#include "plumb/capture/custom_function.h"
#include "plumb/core/error.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

struct OpaqueTable {
  std::mutex mutex;
  std::deque<std::pair<OpaqueFunction, std::string>> functions;  // addresses stay
};
OpaqueTable& opaque_table() {
  static OpaqueTable* table = new OpaqueTable;  // outlives Python objects that functions may hold at exit
  return *table;
}

const std::pair<OpaqueFunction, std::string>& opaque(int64_t id) {
  auto& table = opaque_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  if (id < 0 || id >= static_cast<int64_t>(table.functions.size())) {
    throw Error(ErrorKind::UnknownName,
                "plumb::python_function " + std::to_string(id) + " does not exist in this process", "",
                "graphs that call Python functions cannot leave the process that captured them");
  }
  return table.functions[static_cast<size_t>(id)];
}

// Restores the autocast region that the function was captured in: a replay ignores its caller's.
c10::impl::LocalDispatchKeySet with_autocast() {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autocast_dispatch_keyset;
  return keys;
}

std::vector<at::Tensor> python_function(int64_t id, at::TensorList inputs) {
  const c10::impl::ForceDispatchKeyGuard allowed(with_autocast());
  return opaque(id).first(inputs.vec());
}

}  // namespace

const RegisterOperators opaque_function_rows{
    {"plumb::",
     "python_function",
     {.refused = "it calls Python functions of this process by their number", .opaque = true}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) { m.def("python_function(int id, Tensor[] inputs) -> Tensor[]", python_function); }

int64_t register_opaque(OpaqueFunction function, std::string name) {
  if (!function) throw Error(ErrorKind::InvalidArgument, "the opaque function '" + name + "' is empty");
  auto& table = opaque_table();
  std::lock_guard<std::mutex> lock(table.mutex);
  table.functions.emplace_back(std::move(function), std::move(name));
  return static_cast<int64_t>(table.functions.size()) - 1;
}

std::string opaque_name(int64_t id) { return opaque(id).second; }

std::vector<at::Tensor> call_opaque(int64_t id, const std::vector<at::Tensor>& inputs) {
  static const auto op =
      find_operator("plumb::python_function").typed<std::vector<at::Tensor>(int64_t, at::TensorList)>();
  return op.call(id, inputs);
}

}  // namespace plumb
