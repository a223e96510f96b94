#include "plumb/graph/graph_module.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/nn/cloneable.h>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/mode.h"
#include "plumb/graph/own_buffers.h"
#include "plumb/graph/summary.h"
#include "plumb/tensors/deferred_checks.h"

namespace plumb {
namespace {

// An explicit instantiation may name a private member.
torch::OrderedDict<std::string, at::Tensor>& private_buffers(torch::nn::Module& module);
template <auto kBuffers>
struct OwnBuffers {
  friend torch::OrderedDict<std::string, at::Tensor>& private_buffers(torch::nn::Module& module) {
    return module.*kBuffers;
  }
};
template struct OwnBuffers<&torch::nn::Module::buffers_>;

// A module with nothing of its own: the "layers" and "3" of "layers.3.weight".
class Scope : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
};

bool fits(const TensorMeta& want, const at::Tensor& got) {
  if (got.scalar_type() != want.dtype || got.device().type() != want.device.type()) return false;
  if (got.dim() != static_cast<int64_t>(want.sizes.size())) return false;
  for (size_t i = 0; i < want.sizes.size(); ++i) {
    const bool dynamic = i < want.symbols.size() && !want.symbols[i].empty();
    if (!dynamic && got.size(static_cast<int64_t>(i)) != want.sizes[i]) return false;
  }
  return true;
}

// Returns the mutex, a new one for a module that was moved from.
std::mutex& mutex_of(std::unique_ptr<std::mutex>& lock) {
  if (!lock) lock = std::make_unique<std::mutex>();
  return *lock;
}

// A tensor on the meta device has a shape and no values: a graph of another device cannot run on it.
void check_values(const Graph& graph, const State& state) {
  for (const Node* node : graph.attributes()) {
    const Attr* attr = state.find(node->target());
    const auto& meta = node->result()->meta();
    if (!attr || !attr->tensor.defined() || !attr->tensor.is_meta() || !meta || meta->device.is_meta()) continue;
    throw Error(ErrorKind::InvalidState, "'" + attr->name + "' has a shape and no values: its weights are not loaded",
                "", "load them first: plumb.hf.load(FOLDER), plumb train --weights FOLDER");
  }
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor>& buffers_of(torch::nn::Module& module) { return private_buffers(module); }

GraphModule::GraphModule(Graph graph, State state, TreeSpec in_spec, TreeSpec out_spec)
    : torch::nn::Module("GraphModule"),
      graph_(std::move(graph)),
      state_(std::move(state)),
      in_spec_(std::move(in_spec)),
      out_spec_(std::move(out_spec)) {
  set_made_in_training(made_in_training(graph_));
  sync_module();
}

void GraphModule::train(bool on) {
  if (on != is_training() && (!mode_read_at_.empty() || depends_on_mode(graph_, is_training()))) {
    const char* modes[] = {"evaluation", "training"};
    throw Error(ErrorKind::InvalidState,
                std::string("the graph was made in ") + modes[is_training()] + " mode and cannot change to " +
                    modes[on] + " mode",
                mode_read_at_.empty() ? "" : "the forward reads its training mode: " + mode_read_at_,
                std::string("set the model to the other mode, model->") + (on ? "train" : "eval") +
                    "(), and capture or export it again");
  }
  Module::train(on);
}

void GraphModule::set_mode_read_at(std::string line) {
  if (line.size() > 8192) {
    throw Error(ErrorKind::InvalidArgument,
                str("the line that reads the training mode is a text of ", line.size(), " bytes, 8192 are allowed"));
  }
  mode_read_at_ = std::move(line);
}

void GraphModule::copy_mode(const GraphModule& other) {
  set_made_in_training(other.is_training());
  mode_read_at_ = other.mode_read_at_;
}

std::shared_ptr<const Plan> GraphModule::plan() {
  std::shared_ptr<const Plan> old;  // goes after the lock: freeing tensors may wait for Python
  const std::lock_guard guard(mutex_of(lock_));
  const bool under_mode = c10::impl::dispatch_mode_enabled();
  if (!plan_ || plan_version_ != graph_.version() || plan_under_mode_ != under_mode) {
    check_values(graph_, state_);
    old = std::move(plan_);
    plan_ = std::make_shared<const Plan>(graph_, state_);
    plan_version_ = graph_.version();
    plan_under_mode_ = under_mode;
  }
  return plan_;
}

std::vector<c10::IValue> GraphModule::run(std::vector<c10::IValue> inputs) {
  const std::shared_ptr<const Plan> compiled = plan();
  constexpr const char* kRemedy = "a graph is made for one signature: capture the model again on inputs like these";
  size_t i = 0;
  for (const Node* node : graph_.nodes()) {
    if (node->kind() != NodeKind::Placeholder || i == inputs.size()) break;
    c10::IValue& input = inputs[i++];
    const at::Tensor* got = input.isTensor() && input.toTensor().defined() ? &input.toTensor() : nullptr;
    const auto& want = node->result()->meta();
    const ValueType type = node->result()->type();
    if (type != ValueType::Tensor && input.isTensor() && !got) input = c10::IValue();  // C++'s None
    if (got && got->is_nested()) {
      throw Error(ErrorKind::TensorMismatch,
                  "input '" + node->target() + "' is a nested tensor, whose rows have no common size", "",
                  "pad the rows to one length (torch.nn.utils.rnn.pad_sequence) and mask what was added");
    }
    if (type == ValueType::Other && !want && got) {
      throw Error(ErrorKind::StructureMismatch,
                  "input '" + node->target() + "' was None or no tensor when the graph was made, got " +
                      type_text(TensorMeta::of(*got)),
                  "", kRemedy);
    }
    const bool whole = type == ValueType::Int;
    const bool real = input.isDouble() || input.isComplexDouble() || input.isSymFloat();
    if (type != ValueType::Tensor && type != ValueType::Other && (!input.isScalar() || (whole && real))) {
      throw Error(ErrorKind::TensorMismatch,
                  "input '" + node->target() + "' should be a " + (whole ? "whole number" : "number") + ", got " +
                      (got ? type_text(TensorMeta::of(*got)) : input.tagKind()),
                  "", kRemedy);
    }
    if (want && !(got && fits(*want, *got))) {
      throw Error(ErrorKind::TensorMismatch,
                  "input '" + node->target() + "' should be " + type_text(*want) + ", got " +
                      (got ? type_text(TensorMeta::of(*got)) : input.tagKind()),
                  "", kRemedy);
    }
  }
  if (DeferredChecks::active()) return compiled->run(std::move(inputs));
  return with_deferred_checks("", [&] { return compiled->run(std::move(inputs)); });
}

c10::IValue GraphModule::forward(std::vector<c10::IValue> args,
                                 std::vector<std::pair<std::string, c10::IValue>> kwargs) {
  if (in_spec_.children.size() != 2) {
    throw Error(ErrorKind::StructureMismatch, "the module has no structured inputs: " + in_spec_.to_string(), "",
                "call run()");
  }
  const TreeSpec& want_args = in_spec_.children[0];
  const TreeSpec& want_kwargs = in_spec_.children[1];
  const auto names = want_kwargs.children.empty() ? std::vector<std::string>{} : want_kwargs.keys();
  // A keyword input given by position follows the positional ones, in order.
  if (args.size() < want_args.children.size() || args.size() > want_args.children.size() + names.size()) {
    throw Error(ErrorKind::StructureMismatch,
                "the module takes " + std::to_string(want_args.children.size()) + " positional inputs, got " +
                    std::to_string(args.size()),
                "", "its inputs are " + in_spec_.to_string());
  }
  std::vector<c10::IValue> leaves;
  auto add = [&](const c10::IValue& value, const TreeSpec& want, const std::string& what) {
    TreeSpec got;
    auto flat = flatten(in_order_of(want, value), &got);
    if (!(got == want) && got.num_leaves() != want.num_leaves()) {
      throw Error(ErrorKind::StructureMismatch,
                  what + " should have the structure " + want.to_string() + ", got " + got.to_string());
    }
    leaves.insert(leaves.end(), flat.begin(), flat.end());
  };
  for (size_t i = 0; i < want_args.children.size(); ++i)
    add(args[i], want_args.children[i], "input " + std::to_string(i));
  for (size_t k = 0; k < names.size(); ++k) {
    const c10::IValue* value = nullptr;
    if (want_args.children.size() + k < args.size()) value = &args[want_args.children.size() + k];
    for (const auto& [name, v] : kwargs) {
      if (name != names[k]) continue;
      if (value) throw Error(ErrorKind::StructureMismatch, "keyword input '" + name + "' is given twice");
      value = &v;
    }
    if (!value) throw Error(ErrorKind::StructureMismatch, "keyword input '" + names[k] + "' is missing");
    add(*value, want_kwargs.children[k], "keyword input '" + names[k] + "'");
  }
  for (const auto& [name, v] : kwargs) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw Error(ErrorKind::UnknownName, "the module has no keyword input '" + name + "'", "",
                  "its inputs are " + in_spec_.to_string());
    }
  }
  return unflatten(out_spec_, run(std::move(leaves)));
}

at::Tensor GraphModule::the_tensor(const c10::IValue& output) const {
  if (output.isTensor()) return output.toTensor();
  throw Error(ErrorKind::StructureMismatch, "the module returns " + out_spec_.to_string() + ", not one tensor", "",
              "call forward({inputs...}), which returns the structure, or run({inputs...}) for a flat list");
}

void GraphModule::sync_module() {
  const std::lock_guard guard(mutex_of(lock_));
  register_members();
}

void GraphModule::set_state(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  const std::lock_guard guard(mutex_of(lock_));
  for (const auto& [name, tensor] : tensors) state_.get(name);
  for (const auto& [name, tensor] : tensors) state_.set(name, tensor);
  register_members();
}

void GraphModule::register_members() {
  for (const auto& child : named_children()) unregister_module(child.key());
  parameters_.clear();
  buffers_of(*this).clear();
  std::unordered_map<std::string, std::shared_ptr<torch::nn::Module>> scopes;
  for (const Attr& attr : state_) {
    if (attr.kind == AttrKind::Constant || !attr.tensor.defined()) continue;
    torch::nn::Module* owner = this;
    size_t start = 0;
    for (size_t dot; (dot = attr.name.find('.', start)) != std::string::npos; start = dot + 1) {
      auto& scope = scopes[attr.name.substr(0, dot)];
      if (!scope) {
        scope = std::make_shared<Scope>("Scope");
        owner->register_module(attr.name.substr(start, dot - start), scope);
      }
      owner = scope.get();
    }
    const std::string leaf = attr.name.substr(start);
    if (attr.kind == AttrKind::Parameter) {
      owner->register_parameter(leaf, attr.tensor, attr.tensor.requires_grad());
    } else {
      owner->register_buffer(leaf, attr.tensor);
    }
  }
  plan_.reset();
}

std::shared_ptr<GraphModule> GraphModule::deep_copy() const {
  auto copy = std::make_shared<GraphModule>(graph_.clone(), state_.deep_copy(), in_spec_, out_spec_);
  copy->copy_mode(*this);
  return copy;
}

std::shared_ptr<torch::nn::Module> GraphModule::clone(const std::optional<at::Device>& device) const {
  auto copy = deep_copy();
  if (device) copy->to(*device);
  return copy;
}

void GraphModule::lint() const {
  plumb::lint(graph_);
  for (const Node* node : graph_.attributes()) {
    if (!state_.contains(node->target())) {
      throw Error(ErrorKind::InvalidGraph, node->describe() + ": the state has no such tensor", node->meta().where());
    }
  }
  if (in_spec_.num_leaves() != graph_.placeholders().size()) {
    throw Error(ErrorKind::InvalidGraph, "the input structure " + in_spec_.to_string() + " does not fit the graph's " +
                                             std::to_string(graph_.placeholders().size()) + " inputs");
  }
  if (out_spec_.num_leaves() != graph_.output_node()->args().size()) {
    throw Error(ErrorKind::InvalidGraph, "the output structure " + out_spec_.to_string() +
                                             " does not fit the graph's " +
                                             std::to_string(graph_.output_node()->args().size()) + " outputs");
  }
}

namespace {

// Returns null if the operator has no such argument, or takes it from the graph.
const c10::IValue* constant_of(const Node* node, std::string_view argument) {
  const Arg* arg = node->is_call() ? node->try_arg(argument) : nullptr;
  return arg && arg->is_constant() ? &arg->constant() : nullptr;
}

const c10::IValue* mode_of(const Node* node) {
  const auto name = mode_argument(*node);
  return name ? constant_of(node, *name) : nullptr;
}

template <class Holds>
bool any_node(const Graph& graph, const Holds& holds) {
  for (const Node* node : graph.nodes()) {
    if (holds(node)) return true;
  }
  return false;
}

bool depends_on_mode(const Node* node, bool made_in_training) {
  if (mode_of(node)) return true;
  const c10::IValue* attention = constant_of(node, "dropout_p");
  return attention && (!made_in_training || (attention->isDouble() && attention->toDouble() != 0));
}

}  // namespace

bool made_in_training(const Graph& graph) {
  bool anything = false;
  const bool training = any_node(graph, [&](const Node* node) {
    const c10::IValue* mode = mode_of(node);
    anything = anything || mode;
    // native_dropout's mode is optional: none means training.
    return mode && (!mode->isBool() || mode->toBool());
  });
  return training || !anything;
}

bool depends_on_mode(const Graph& graph, bool made_in_training) {
  return any_node(graph, [&](const Node* node) { return depends_on_mode(node, made_in_training); });
}

}  // namespace plumb
