#include "plumb/exported/graph_writer.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <set>

#include "plumb/core/error.h"
#include "plumb/exported/sym_ops.h"
#include "plumb/graph/schema_fit.h"
#include "plumb/operators/operator_facts.h"

namespace plumb::pt2 {
namespace {

// Returns whether Python code made of the graph can use the name: no keyword, and nothing that this code refers to.
bool usable_in_python(const std::string& name) {
  static const std::unordered_set<std::string> reserved = {
      "False",    "None",      "True",   "and",  "as",      "assert",   "async",   "await",  "break", "class",
      "continue", "def",       "del",    "elif", "else",    "except",   "finally", "for",    "from",  "global",
      "if",       "import",    "in",     "is",   "lambda",  "nonlocal", "not",     "or",     "pass",  "raise",
      "return",   "try",       "while",  "with", "yield",   "self",     "torch",   "device", "inf",   "nan",
      "NoneType", "fx_pytree", "pytree", "math", "as_none", "__debug__"};
  return !reserved.count(name);
}

bool is_check(const Node& node) { return node.is_op("plumb::check_input") || node.is_op("plumb::check_sizes"); }

// Metadata as torch writes it.
std::string module_stack_text(const ModuleStack& stack) {
  auto plain = [](std::string text) {
    std::replace_if(text.begin(), text.end(), [](char c) { return c == ',' || c == ';'; }, '_');
    return text;
  };
  std::string text;
  for (const ModuleFrame& frame : stack) {
    text += (text.empty() ? "L__self__" : ";L__self__") + plain(frame.path) + "," + plain(frame.path) + "," +
            plain(frame.type);
  }
  return text;
}

std::string stack_trace_text(const SourceLocation& source) {
  return "File \"" + source.file + "\", line " + std::to_string(source.line) +
         (source.function.empty() ? "" : ", in " + source.function);
}

}  // namespace

Json GraphWriter::Level::finish() && {
  return {{"inputs", std::move(inputs)},
          {"outputs", std::move(outputs)},
          {"nodes", std::move(nodes)},
          {"tensor_values", std::move(tensors)},
          {"sym_int_values", std::move(ints)},
          {"sym_bool_values", std::move(bools)},
          {"is_single_tensor_return", false},
          {"custom_obj_values", Json::object()},
          {"sym_float_values", std::move(floats)}};
}

GraphWriter::GraphWriter(const Graph& graph, const State& state, const ExportedProgram& program)
    : graph_(graph), state_(state), program_(program), spelling_(program.symbol_spelling), ranges_(program.ranges) {}

void GraphWriter::refuse(const Node& node, const std::string& why, const std::string& remedy) const {
  throw Error(ErrorKind::Unsupported, node.describe() + " cannot be written to a .pt2 file: " + why,
              node.meta().where(), remedy);
}

std::string GraphWriter::fresh_name(const std::string& hint) {
  std::string name;
  for (char c : hint) name += std::isalnum(static_cast<unsigned char>(c)) || c == '_' ? c : '_';
  if (name.empty() || std::isdigit(static_cast<unsigned char>(name[0]))) name = "_" + name;
  if (usable_in_python(name) && taken_.insert(name).second) return name;
  for (size_t& i = counters_[name];;) {
    std::string numbered = name + "_" + std::to_string(++i);
    if (taken_.insert(numbered).second) return numbered;
  }
}

void GraphWriter::name_values() {
  // Inputs keep their names; everything else may be numbered. torch makes getitem nodes of its own for nested lists.
  bool nested = false;
  for (const Node* node : graph_.nodes()) {
    const auto& layout = node->result_layout();
    nested =
        nested || (layout.size() > 1 && std::any_of(layout.begin(), layout.end(), [](int32_t n) { return n >= 0; }));
    if (node->kind() == NodeKind::Placeholder) names_.emplace(node->result(), fresh_name(node->result()->name()));
  }
  for (const Node* node : graph_.nodes()) {
    if (node->kind() == NodeKind::Placeholder) continue;
    for (const Value* value : node->results()) {
      const bool clash = nested && value->name().starts_with("getitem");
      names_.emplace(value, fresh_name(clash ? "item" + value->name().substr(7) : value->name()));
    }
  }
}

// Constant inputs and ranges of sizes stand in the graph as check nodes; in the file they are its signature's.
void GraphWriter::read_checks() {
  for (const Node* node : graph_.nodes()) {
    if (node->kind() == NodeKind::Placeholder) {
      const auto& meta = node->result()->meta();
      for (size_t i = 0; meta && i < meta->symbols.size(); ++i) {
        if (!meta->symbols[i].empty()) hints_.emplace(meta->symbols[i], meta->sizes[i]);
      }
    }
    if (node->is_op("plumb::check_input") && node->arg(0).is_value())
      constant_inputs_.emplace(node->input(0), node->arg(1).constant());
    if (node->is_op("plumb::check_sizes")) ranges_.merge(ranges_in(node->arg("spec").constant().toStringRef()));
  }
}

void GraphWriter::write_state(Level& level, Json& specs) {
  // Tied names are inputs of their own, as torch has it; the graph reads the tensor under the first name it uses.
  std::unordered_set<std::string> read;
  for (const Node* node : graph_.attributes()) {
    if (!state_.contains(node->target())) refuse(*node, "the module has no tensor of that name");
    if (node->result()->has_uses()) read.insert(node->target());
  }
  std::unordered_map<const at::TensorImpl*, std::string> first;
  for (const Attr& attr : state_) {
    if (read.count(attr.name)) first.emplace(attr.tensor.unsafeGetTensorImpl(), attr.name);
  }
  std::unordered_map<std::string, std::vector<const Value*>> uses;
  for (const Node* node : graph_.attributes()) {
    const bool used = node->result()->has_uses();
    uses[used ? first.at(state_.get(node->target()).tensor.unsafeGetTensorImpl()) : node->target()].push_back(
        node->result());
  }
  for (const Attr& attr : state_) {  // in the state's own order, which is that of a state_dict
    if (attr.kind == AttrKind::Constant && !uses.count(attr.name)) continue;
    if (!attr.tensor.defined()) {
      throw Error(ErrorKind::Unsupported, "'" + attr.name + "' of the module's state is an undefined tensor", "",
                  "give it values, or leave it out of the state");
    }
    const bool weight = attr.kind == AttrKind::Parameter || (attr.kind == AttrKind::Buffer && attr.persistent);
    (weight ? weights_ : constants_).push_back({attr.name, attr.tensor, attr.kind == AttrKind::Parameter});
  }
  static constexpr std::pair<const char*, const char*> kTypes[] = {
      {"parameter", "p_"}, {"buffer", "b_"}, {"tensor_constant", "c_"}};
  for (AttrKind kind : {AttrKind::Parameter, AttrKind::Buffer, AttrKind::Constant}) {
    for (const Attr& attr : state_) {
      if (attr.kind != kind) continue;
      const bool used = uses.count(attr.name) > 0;
      if (kind == AttrKind::Constant && !used) continue;
      const auto& [type, prefix] = kTypes[static_cast<size_t>(kind)];
      const std::string name = used ? name_of(uses[attr.name][0]) : fresh_name(prefix + attr.name);
      for (const Value* value : uses[attr.name]) names_[value] = name;
      const Json arg = {{"name", name}};
      level.inputs.push_back({{"as_tensor", arg}});
      level.tensors[name] = write_meta(TensorMeta::of(attr.tensor), spelling_);
      Json spec = {{"arg", arg}, {std::string(type) + "_name", attr.name}};
      if (kind == AttrKind::Buffer) spec["persistent"] = attr.persistent;
      specs.push_back({{type, std::move(spec)}});
    }
  }
}

void GraphWriter::write_placeholder(const Node& node, Level& level, Json& specs) {
  const Value* value = node.result();
  auto only = constant_inputs_.find(value);
  // A number that nothing reads may have any value, which the format cannot say: None stands for it.
  const bool unread = !value->is_tensor() && value->type() != ValueType::Int && !value->has_uses();
  if (only != constant_inputs_.end() || unread) {
    Json constant_json = constant(node, only == constant_inputs_.end() ? c10::IValue() : only->second, nullptr);
    level.inputs.push_back(constant_json);
    specs.push_back({{"constant_input", {{"name", name_of(value)}, {"value", std::move(constant_json)}}}});
    return;
  }
  if (value->is_tensor() && !value->meta()) refuse(node, "its shape and dtype are not known");
  if (!value->is_tensor() && value->type() != ValueType::Int)
    refuse(node, "an input is a tensor, an integer or a constant", "make it a tensor, or capture with its value fixed");
  Json arg = define(value, level);
  level.inputs.push_back(arg);
  specs.push_back({{"user_input", {{"arg", std::move(arg)}}}});
}

void GraphWriter::write_output(const Node& node, Level& level, Json& specs) {
  for (const Arg& arg : node.args()) {
    Json out = arg.is_value()      ? reference(arg.value())
               : arg.is_constant() ? constant(node, arg.constant(), nullptr)
                                   : Json();
    if (out.is_null()) refuse(node, "an output is a tensor, a number or None");
    if (arg.is_constant() && arg.constant().isString()) {
      refuse(node, "an output is a string, which torch.export.load cannot read", "leave it out of the outputs");
    }
    level.outputs.push_back(out);
    specs.push_back({{"user_output", {{"arg", std::move(out)}}}});
  }
}

Json GraphWriter::write() {
  if (!graph_.output_node()) lint(graph_);  // throws
  name_values();
  read_checks();
  Level level;
  Json inputs = Json::array(), outputs = Json::array();
  write_state(level, inputs);
  for (const Node* node : graph_.placeholders()) write_placeholder(*node, level, inputs);
  std::vector<const Node*> region;
  std::unordered_set<const Node*> inside;
  auto close_region = [&] {
    if (!region.empty()) write_region(region, level);
    region.clear();
    inside.clear();
  };
  for (const Node* node : graph_.nodes()) {
    if (node->kind() == NodeKind::CallFunction && !is_check(*node)) {
      // Grad mode means nothing to sizes, so they stay outside of regions: no expression has to cross their border.
      const bool plain = node->meta().grad_enabled || node->is_op("aten::sym_size") || python_function(node->target());
      if (!plain) {
        region.push_back(node);
        inside.insert(node);
        continue;
      }
      const auto inputs_here = node->inputs();
      const bool reads_region = std::any_of(inputs_here.begin(), inputs_here.end(),
                                            [&](const Value* v) { return inside.count(v->producer()) > 0; });
      if (node->meta().grad_enabled || reads_region) close_region();
      write_node(*node, level);
    } else if (node->kind() == NodeKind::Output) {
      close_region();
      write_output(*node, level, outputs);
    }
  }
  return {{"graph", std::move(level).finish()},
          {"signature", {{"input_specs", std::move(inputs)}, {"output_specs", std::move(outputs)}}}};
}

void GraphWriter::write_node(const Node& node, Level& level) {
  if (node.is_op("plumb::python_function")) {
    refuse(node, "it calls a custom autograd function of this process",
           "replace the function by a registered operator (torch.library, TORCH_LIBRARY)");
  }
  auto python = python_function(node.target());
  std::string target = node.target();
  // A read of .data is written as torch.export writes it.
  if (python) {
    target = *python;
  } else if (node.is_op("plumb::data")) {
    target = "torch.ops.aten.detach.default";
  } else if (auto refusal = refused_in_files(target)) {  // nothing is written that load_pt2() would not take
    refuse(node, refusal->message, refusal->remedy);
  } else {
    target.replace(target.find("::"), 2, ".");
    target = "torch.ops." + target + (node.schema().overload_name().empty() ? ".default" : "");
  }
  Json inputs = inputs_of(node);
  Json outputs = outputs_of(node, level);
  Json metadata = Json::object();
  if (node.meta().modules) metadata["nn_module_stack"] = module_stack_text(*node.meta().modules);
  if (node.meta().source) metadata["stack_trace"] = stack_trace_text(*node.meta().source);
  const bool single = node.result_layout().size() == 1 && node.result_layout()[0] < 0;
  level.nodes.push_back(
      {{"target", std::move(target)},
       {"inputs", std::move(inputs)},
       {"outputs", std::move(outputs)},
       {"metadata", std::move(metadata)},
       {"is_hop_single_tensor_return", nullptr},
       {"name", single ? name_of(node.result())
                       : fresh_name(std::string(node.op_name().substr(node.op_name().find("::") + 2)) + "_call")}});
}

// Nodes that run with gradients off, in a row: torch has a graph of their own for them.
void GraphWriter::write_region(const std::vector<const Node*>& nodes, Level& level) {
  const std::unordered_set<const Node*> inside(nodes.begin(), nodes.end());
  std::vector<const Value*> takes, gives;
  std::unordered_set<const Value*> seen;
  for (const Node* node : nodes) {
    for (const Value* value : node->inputs()) {
      if (!inside.count(value->producer()) && seen.insert(value).second) takes.push_back(value);
    }
    for (const Value* value : node->results()) {
      const auto uses = value->uses();
      if (std::any_of(uses.begin(), uses.end(), [&](const Use& use) { return !inside.count(use.user); }))
        gives.push_back(value);
    }
  }
  // torch has no type for a region that returns nothing.
  for (auto it = nodes.rbegin(); gives.empty() && it != nodes.rend(); ++it) {
    for (const Value* value : (*it)->results()) {
      if (value->is_tensor() && gives.empty()) gives.push_back(value);
    }
  }
  Level inner;
  std::set<std::string> given;  // one tensor under several get_attr nodes is one input
  Json inputs = Json::array();
  const std::string graph_name = fresh_name("submod");
  inputs.push_back({{"name", ""}, {"arg", {{"as_bool", false}}}, {"kind", 1}});
  inputs.push_back(nullptr);
  for (const Value* value : takes) {
    if (!given.insert(name_of(value)).second) continue;
    inner.inputs.push_back(define(value, inner));
    inputs.push_back({{"name", ""}, {"arg", reference(value)}, {"kind", 1}});
  }
  for (const Node* node : nodes) write_node(*node, inner);
  Json outputs = Json::array();
  for (const Value* value : gives) {
    inner.outputs.push_back(reference(value));
    outputs.push_back(define(value, level));
  }
  inputs[1] = {
      {"name", ""}, {"arg", {{"as_graph", {{"name", graph_name}, {"graph", std::move(inner).finish()}}}}}, {"kind", 1}};
  Json metadata = Json::object();
  if (nodes[0]->meta().modules) metadata["nn_module_stack"] = module_stack_text(*nodes[0]->meta().modules);
  level.nodes.push_back({{"target", "torch.ops.higher_order.wrap_with_set_grad_enabled"},
                         {"inputs", std::move(inputs)},
                         {"outputs", std::move(outputs)},
                         {"metadata", std::move(metadata)},
                         {"is_hop_single_tensor_return", false},
                         {"name", fresh_name("wrap_with_set_grad_enabled")}});
}

Json GraphWriter::define(const Value* value, Level& level) {
  const std::string& name = name_of(value);
  if (value->is_tensor()) {
    std::optional<TensorMeta> meta = value->meta();
    const Node& producer = *value->producer();
    bool for_every_size = true;
    if (!meta && producer.kind() == NodeKind::CallFunction) {
      auto types = infer_types(producer.op(), {producer.args().begin(), producer.args().end()});
      if (value->result_index() < types.size()) meta = types[value->result_index()];
      for (const Value* input : producer.inputs())
        for_every_size = for_every_size && (!input->meta() || input->meta()->symbols.empty());
    }
    if (!meta && producer.kind() == NodeKind::GetAttr) meta = TensorMeta::of(state_.get(producer.target()).tensor);
    // Torch wants a type of every tensor. One of no known type is stated as a number, with a layout that says so.
    level.tensors[name] = write_meta(meta.value_or(TensorMeta{}), spelling_);
    if (!meta || !for_every_size) level.tensors[name]["layout"] = kUnknownLayout;
  } else {
    Json& values = value->type() == ValueType::Int     ? level.ints
                   : value->type() == ValueType::Float ? level.floats
                                                       : level.bools;
    values[name] = expression_json(value);
  }
  return reference(value);
}

Json GraphWriter::outputs_of(const Node& node, Level& level) {
  Json outputs = Json::array();
  size_t next = 0;
  for (int32_t count : node.result_layout()) {
    if (count >= 0) {
      Json list = Json::array();
      for (int32_t i = 0; i < count; ++i) list.push_back(define(node.result(next++), level).at("as_tensor"));
      outputs.push_back({{"as_tensors", std::move(list)}});
      continue;
    }
    const Value* value = node.result(next++);
    // Several results, one never used and of no known type: undefined as far as anybody knows.
    const bool none = value->is_tensor() && !value->meta() && !value->has_uses() && node.result_layout().size() > 1;
    outputs.push_back(none ? Json{{"as_none", true}} : define(value, level));
  }
  return outputs;
}

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
