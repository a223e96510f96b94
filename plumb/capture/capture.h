// A live module -> a graph, by watching one forward through torch's dispatcher.
//
//   auto graph = plumb::capture(model, x);            // model: a torch::nn::ModuleHolder, shared_ptr or reference
//   at::Tensor y = (*graph)(x);                       // bit for bit model->forward(x), gradients too
//
// The graph is made for the inputs' dtypes, shapes and devices and for the model's training mode. It shares the model's
// parameters and buffers under their names. The model is afterwards as it was before: buffers, gradients, random state.
// A forward in C++ that asks x.requires_grad() or at::GradMode::is_enabled() hears true, whatever the caller has:
// decide that outside of it.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

struct CaptureOptions {
  // Capture twice on different input values, compare, and replay against eager, forward and gradients: the only way to
  // notice values that leave torch unseen (raw memory, tensor hooks). Costs four forwards.
  bool verify = false;
  // Names for the inputs, in order; "x0", "x1", ... where missing.
  std::vector<std::string> input_names;
  // If not null, receives what was noticed: constants kept, buffers re-assigned, values baked in.
  std::vector<std::string>* notes = nullptr;
};

// The general form, for any callable and any front end.
struct CaptureRequest {
  State state;  // parameters and buffers by name
  // Flat. Tensors become inputs of the graph. Numbers and texts are checked in every run: the graph is made for them.
  std::vector<c10::IValue> inputs;
  TreeSpec in_spec;  // structure of (args, kwargs)
  // Runs the model on these flat inputs; returns flat outputs and sets out_spec.
  std::function<std::vector<c10::IValue>(const std::vector<c10::IValue>& inputs, TreeSpec& out_spec)> call;
  // Returns the line of the caller's code that runs now; may be empty.
  std::function<std::shared_ptr<const SourceLocation>()> locate;
  // Called after `call`: buffers as they are now, to find re-assigned ones; may be empty. Puts back the old ones.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> buffers_after;
  // Called after `call`: (name, old, new) of other tensors that the module holds and re-assigned; may be empty. Puts
  // back the old ones.
  std::function<std::vector<std::tuple<std::string, at::Tensor, at::Tensor>>()> attributes_after;
  // Called when the program converts a tensor to bool. Returns true if one of the two branches does nothing but
  // fail. Such checks become nodes that check in every run. May be empty.
  std::function<bool()> is_check;
  // Whether values that the program takes out of tensors (item, bool) may be guarded instead of refused: nodes then
  // check in every run that they are still the same, and plumb::control_value nodes note their tensors.
  bool guard_values = false;
  // Guards values at once. The first tensors that decide about values and sizes get these values, in order, as
  // ControlValueLog has them: a transformed graph takes another path than the module itself, and this is how the
  // program takes it, too.
  std::optional<std::vector<at::Tensor>> control_values;
  // Weights have unit scale and the operators no factors yet (unit_scale): results of products are divided by their
  // root mean square where it is larger than 1. Otherwise values grow from layer to layer until torch's or the model's
  // own checks of them fail.
  bool unit_weights = false;
  // Called before each attempt to capture: whether libraries that have a way of their own for graph makers
  // (torch.compiler.is_compiling()) are to take it. May be empty.
  std::function<void(bool tell_libraries)> begin_attempt;
  // Returns whether a line is of such a library. A refusal there makes the capture begin again and tell the libraries.
  // Empty: there are none.
  std::function<bool(const SourceLocation&)> in_library;
  // True if the model has modules of such a library. `begin_attempt` tells libraries whenever values are guarded.
  bool has_libraries = false;
  bool training = false;
  // Puts the model in the other training mode; `buffers_after` puts it back. If no operator of the graph knows a mode,
  // the forward is captured there, too: another path is noted, so that the graph refuses that mode. May be empty.
  std::function<void()> other_mode;
  // Class names by module path, if nothing calls push_module() and pop_module(): nodes then get their modules by the
  // parameters that they read (build.cpp).
  std::map<std::string, std::string> module_types;
};
std::shared_ptr<GraphModule> capture(const CaptureRequest& request, const CaptureOptions& options = {});

// While a capture runs on this thread: enter and leave a module (its path and class name). No effect otherwise.
void push_module(std::string path, std::string type);
void pop_module();
bool is_capturing();
// Refuses what the forward does now, naming module and line.
[[noreturn]] void refuse_capture(const std::string& what, const std::string& remedy);
// Records an assignment to `tensor.data`: see Session::assign_data. Outside of a capture it is set_data().
void assign_data(const at::Tensor& tensor, const at::Tensor& value);
// Returns whether the captured forward of this thread was given the tensor or has computed it from its inputs.
bool is_computed(const at::Tensor& tensor);
// Returns whether an operator of this thread's capture has made a tensor.
bool is_result(const at::Tensor& tensor);
// Sizes that depend on the data, and values read as a list: see Guards::has_dynamic_sizes, guard_size, guard_values.
bool size_depends_on_values(const at::Tensor& tensor);
void guard_size_read(const at::Tensor& tensor, bool exact);
at::Tensor guard_values_read(const at::Tensor& tensor);

// The tensors that plumb::control_value nodes see on this thread while it lives.
class ControlValueLog {
 public:
  ControlValueLog();
  ~ControlValueLog();
  ControlValueLog(const ControlValueLog&) = delete;
  std::vector<at::Tensor> tensors;

 private:
  ControlValueLog* const outer_;
};

// A Python or C++ function that is opaque to a graph, kept as one node that calls it. Ids live as long as the process.
using OpaqueFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
int64_t register_opaque(OpaqueFunction function, std::string name);
std::string opaque_name(int64_t id);

namespace capture_detail {

// Returns CaptureRequest::buffers_after of a C++ module: a module may put a new tensor where a buffer was. The function
// puts back the buffers, and the training modes, that the modules have now.
std::function<std::vector<std::pair<std::string, at::Tensor>>()> look_again(torch::nn::Module& module);
// Returns the module. Throws Error(InvalidArgument) for an empty holder or a null pointer.
torch::nn::Module& not_null(torch::nn::Module* module);
inline torch::nn::Module& module_of(torch::nn::Module& m) { return m; }
template <typename M>
torch::nn::Module& module_of(const torch::nn::ModuleHolder<M>& m) {
  return not_null(m.is_empty() ? nullptr : m.ptr().get());
}
template <typename M>
torch::nn::Module& module_of(const std::shared_ptr<M>& m) {
  return not_null(m.get());
}

// The class of a model that is given by itself, by its TORCH_MODULE holder or by a shared_ptr.
template <typename M>
struct ModelClass {
  using type = M;
};
template <typename M>
struct ModelClass<std::shared_ptr<M>> {
  using type = M;
};
template <typename M>
  requires std::is_base_of_v<torch::nn::ModuleHolder<typename M::ContainedType>, M>
struct ModelClass<M> {
  using type = typename M::ContainedType;
};

// Returns the arguments with these flat values in place of their own (flatten() in tree_spec.h).
std::vector<c10::IValue> with_leaves(const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& flat);

template <typename T>
using AsTensor = at::Tensor;

template <typename M, typename... Inputs>
decltype(auto) call_forward(M& m, Inputs&&... inputs) {
  if constexpr (std::is_base_of_v<torch::nn::Module, M>) {
    return m.forward(std::forward<Inputs>(inputs)...);
  } else {
    return m->forward(std::forward<Inputs>(inputs)...);
  }
}

inline c10::IValue to_ivalue(const at::Tensor& t) { return t; }
inline c10::IValue to_ivalue(const std::vector<at::Tensor>& v) { return v; }
template <typename... T>
c10::IValue to_ivalue(const std::tuple<T...>& t) {
  return std::apply([](const auto&... e) { return c10::ivalue::Tuple::create({to_ivalue(e)...}); }, t);
}
template <typename A, typename B>
c10::IValue to_ivalue(const std::pair<A, B>& p) {
  return c10::ivalue::Tuple::create({to_ivalue(p.first), to_ivalue(p.second)});
}
template <typename V>
c10::IValue to_ivalue(const std::map<std::string, V>& m) {
  c10::impl::GenericDict d(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [k, v] : m) d.insert(k, to_ivalue(v));
  return d;
}
template <typename V>
c10::IValue to_ivalue(const std::unordered_map<std::string, V>& m) {
  return to_ivalue(std::map<std::string, V>(m.begin(), m.end()));
}

template <typename Model, typename... Inputs>
concept TakesTensors = requires(Model& model, AsTensor<Inputs>... inputs) { model.forward(inputs...); };
template <typename Model, typename... Inputs>
concept ReturnsTensors = requires(Model& model, AsTensor<Inputs>... inputs) { to_ivalue(model.forward(inputs...)); };

// True if capture() can take such a model and inputs; else the compiler says what they lack.
template <typename M, typename... Inputs>
constexpr bool can_capture() {
  using Model = typename ModelClass<std::remove_cv_t<M>>::type;
  constexpr bool is_module = std::is_base_of_v<torch::nn::Module, Model>;
  constexpr bool all_tensors = (std::is_convertible_v<const Inputs&, at::Tensor> && ...);
  static_assert(is_module,
                "plumb::capture: the model's class does not derive from torch::nn::Module. Derive it, or give "
                "plumb::capture_call the module that has the parameters and a lambda to call");
  static_assert(
      all_tensors,
      "plumb::capture: an input is no at::Tensor. Give tensors alone; plumb::capture_call with a lambda takes "
      "other values along");
  if constexpr (is_module && all_tensors) {
    constexpr bool takes = TakesTensors<Model, Inputs...>;
    static_assert(takes,
                  "plumb::capture: the model's class has no public forward() that takes these inputs, an at::Tensor "
                  "each. Give it one, or give plumb::capture_call a lambda that calls what it has");
    if constexpr (takes) {
      static_assert(ReturnsTensors<Model, Inputs...>,
                    "plumb::capture: forward() returns something else than tensors, or vectors, tuples, pairs and maps "
                    "of them. Give plumb::capture_call a lambda that returns these");
      return ReturnsTensors<Model, Inputs...>;
    }
  }
  return false;
}

}  // namespace capture_detail

// Returns parameters and buffers of a C++ module under their full names; a tied tensor under each of its names.
State state_of(const torch::nn::Module& module);

// Any callable over a module's parameters: capture_call(module, [&](at::Tensor x) { return ...; }, {}, x). Inputs are
// what an IValue takes: tensors, lists, tuples and dicts of them, numbers and texts. The graph is made for these
// numbers and texts, and refuses others.
template <typename F, typename... Inputs>
std::shared_ptr<GraphModule> capture_call(torch::nn::Module& module, F&& function, const CaptureOptions& options,
                                          const Inputs&... inputs) {
  CaptureRequest request;
  request.state = state_of(module);
  const std::vector<c10::IValue> given{c10::IValue(inputs)...};
  TreeSpec arguments;
  request.inputs = flatten(c10::ivalue::Tuple::create(given), &arguments);
  request.in_spec = TreeSpec::tuple({std::move(arguments), TreeSpec::dict({}, {})});
  request.training = module.is_training();
  request.other_mode = [&module] { module.train(!module.is_training()); };
  request.module_types[""] = module.name();
  for (const auto& m : module.named_modules("", /*include_self=*/false)) {
    request.module_types[m.key()] = m.value()->name();
  }
  request.call = [&](const std::vector<c10::IValue>& flat, TreeSpec& out_spec) {
    const auto in = capture_detail::with_leaves(given, flat);
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return flatten(capture_detail::to_ivalue(function(in[I].template to<std::decay_t<Inputs>>()...)), &out_spec);
    }(std::index_sequence_for<Inputs...>{});
  };
  request.buffers_after = capture_detail::look_again(module);
  return capture(request, options);
}

template <typename M, typename... Inputs>
std::shared_ptr<GraphModule> capture(const CaptureOptions& options, M& model, const Inputs&... inputs) {
  if constexpr (capture_detail::can_capture<M, Inputs...>()) {
    return capture_call(
        capture_detail::module_of(model), [&](auto&&... in) { return capture_detail::call_forward(model, in...); },
        options, at::Tensor(inputs)...);
  } else {
    return nullptr;
  }
}
template <typename M, typename... Inputs>
  requires(!std::is_same_v<std::remove_cv_t<M>, CaptureRequest> && !std::is_same_v<std::remove_cv_t<M>, CaptureOptions>)
std::shared_ptr<GraphModule> capture(M& model, const Inputs&... inputs) {
  return capture(CaptureOptions(), model, inputs...);
}

}  // namespace plumb
