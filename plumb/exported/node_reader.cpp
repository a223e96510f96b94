#include "plumb/exported/node_reader.h"

#include <ATen/core/jit_type.h>

#include <set>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/exported/sym_ops.h"
#include "plumb/graph/schema_fit.h"
#include "plumb/operators/operator_facts.h"

namespace plumb::pt2 {
namespace {

constexpr int kMaxNesting = 32;
constexpr const char* kGradRegion = "torch.ops.higher_order.wrap_with_set_grad_enabled";
constexpr const char* kAutocastRegion = "torch.ops.higher_order.wrap_with_autocast";

bool is_region(const std::string& target) { return target == kGradRegion || target == kAutocastRegion; }

// Returns the graph among the inputs of a region's node; null if there is none.
const Json* graph_of(const JsonDoc& doc, const Json& node) {
  for (const Json& input : doc.array(doc.at(node, "inputs"))) {
    const auto [tag, value] = doc.tagged(doc.at(input, "arg"));
    if (tag == "as_graph") return &doc.at(value, "graph");
  }
  return nullptr;
}

// "torch.ops.aten.add.Tensor" -> "aten::add.Tensor"; nothing for other targets.
std::optional<std::string> operator_of_target(const std::string& target) {
  constexpr std::string_view prefix = "torch.ops.";
  if (!target.starts_with(prefix) || target.starts_with("torch.ops.higher_order.")) return std::nullopt;
  const size_t ns = target.find('.', prefix.size());
  if (ns == std::string::npos) return std::nullopt;
  std::string name = target.substr(prefix.size(), ns - prefix.size()) + "::" + target.substr(ns + 1);
  if (name.ends_with(".default")) name.resize(name.size() - 8);
  return name;
}

// Parses "KEY,PATH,TYPE;KEY,PATH,TYPE" of a node's metadata; brackets may hold commas. Returns null if it cannot.
std::shared_ptr<const ModuleStack> parse_module_stack(const std::string& text) {
  auto stack = std::make_shared<ModuleStack>();
  size_t start = 0;
  while (start < text.size()) {
    const size_t end = std::min(text.find(';', start), text.size());
    std::vector<std::string> parts(1);
    int depth = 0;
    for (char c : text.substr(start, end - start)) {
      if (c == '[' || c == '(') ++depth;
      if (c == ']' || c == ')') --depth;
      if (c == ',' && depth == 0) {
        parts.emplace_back();
      } else {
        parts.back() += c;
      }
    }
    if (parts.size() != 3) return nullptr;
    stack->push_back({parts[1], parts[2]});
    start = end + 1;
  }
  return stack->empty() ? nullptr : stack;
}

// Python's lines `File "model.py", line 12, in forward`: the innermost frame outside of torch.
std::shared_ptr<const SourceLocation> parse_stack_trace(const std::string& text) {
  std::shared_ptr<SourceLocation> found;
  for (size_t at = text.find("File \""); at != std::string::npos; at = text.find("File \"", at + 1)) {
    const size_t name = at + 6, quote = text.find("\", line ", name);
    if (quote == std::string::npos) break;
    size_t digit = quote + 8;
    int64_t line = 0;
    while (digit < text.size() && std::isdigit(static_cast<unsigned char>(text[digit])) && line < 100'000'000)
      line = line * 10 + (text[digit++] - '0');
    SourceLocation here{text.substr(name, quote - name), static_cast<int>(line), ""};
    if (text.compare(digit, 5, ", in ") == 0)
      here.function = text.substr(digit + 5, std::min(text.find('\n', digit), text.size()) - digit - 5);
    const bool torchs = here.file.find("/torch/") != std::string::npos;
    if (!found || !torchs) found = std::make_shared<SourceLocation>(std::move(here));
  }
  return found;
}

}  // namespace

ValueType type_of_tag(const std::string& tag) {
  if (tag == "as_sym_int" || tag == "as_int") return ValueType::Int;
  if (tag == "as_sym_float" || tag == "as_float") return ValueType::Float;
  if (tag == "as_sym_bool" || tag == "as_bool") return ValueType::Bool;
  return tag == "as_tensor" ? ValueType::Tensor : ValueType::Other;
}

void NodeReader::check_operators(const Json& graph) const {
  std::map<std::string, size_t> unknown;
  const Json* first = nullptr;
  std::vector<const Json*> todo{&graph};
  while (!todo.empty()) {
    const Json& nodes = doc_.array(doc_.at(*todo.back(), "nodes"));
    todo.pop_back();
    for (const Json& node : nodes) {
      const std::string& target = doc_.string(doc_.at(node, "target"));
      if (is_region(target)) {
        if (const Json* inner = graph_of(doc_, node)) todo.push_back(inner);
        continue;
      }
      auto name = operator_of_target(target);
      if (!name || try_find_operator(*name)) continue;
      if (!first) first = &node;
      ++unknown[*name];
    }
  }
  if (unknown.empty()) return;
  std::vector<std::string> names;
  std::set<std::string> of;
  for (const auto& [name, count] : unknown) {
    names.push_back(name + (count > 1 ? " (" + std::to_string(count) + " nodes)" : ""));
    of.insert(name.substr(0, name.find("::")));
  }
  const std::string spaces = join(of);
  doc_.fail(*first, "the program uses operators that nobody has registered: " + join(names),
            spaces == "aten" ? "read it with the torch release that wrote it"
                             : "first load the library that registers the operators of " + spaces +
                                   " (in C++ link or dlopen it, in Python import its package)");
}

void NodeReader::bind(const JsonDoc& doc, const Json& at, Scope& scope, const std::string& name, Arg arg) {
  if (!scope.emplace(name, std::move(arg)).second) doc.fail(at, "the name '" + name + "' is given twice");
}

const Arg& NodeReader::lookup(const Json& at, const Scope& scope, const std::string& name) const {
  auto it = scope.find(name);
  if (it == scope.end()) doc_.fail(at, "'" + name + "' is used before it is made");
  return it->second;
}

// {"as_name": "s"} or {"as_int": 3}.
Arg NodeReader::read_sym(const Json& j, const Scope& scope) const {
  const auto [tag, value] = doc_.tagged(j);
  if (tag == "as_name") return lookup(value, scope, doc_.string(value));
  if (tag == "as_int" || tag == "as_float" || tag == "as_bool") return read_argument(j, scope);
  doc_.fail(j, "unknown kind of number '" + tag + "'");
}

Arg NodeReader::read_argument(const Json& argument, const Scope& scope) const {
  const auto [tag, value] = doc_.tagged(argument);
  auto tensor = [&](const Json& j) { return lookup(j, scope, doc_.string(doc_.at(j, "name"))); };
  auto optional_tensor = [&](const Json& j) {
    const auto [kind, inner] = doc_.tagged(j);
    if (kind == "as_none") return Arg();
    if (kind != "as_tensor") doc_.fail(j, "unknown kind of optional tensor '" + kind + "'");
    return tensor(inner);
  };
  auto integer = [&](const Json& j) { return Arg(doc_.integer(j)); };
  auto number = [&](const Json& j) { return Arg(doc_.number(j)); };
  auto boolean = [&](const Json& j) { return Arg(doc_.boolean(j)); };
  auto string = [&](const Json& j) { return Arg(doc_.string(j)); };
  auto list_of = [&](auto&& element) {
    return [&](const Json& j) {
      Arg::List items;
      items.reserve(doc_.array(j).size());
      for (const Json& e : j) items.push_back(element(e));
      return Arg(std::move(items));
    };
  };
  if (tag == "as_tensor") return tensor(value);
  if (tag == "as_none") return Arg();
  if (tag == "as_int") return integer(value);
  if (tag == "as_float") return number(value);
  if (tag == "as_bool") return boolean(value);
  if (tag == "as_string") return string(value);
  if (tag == "as_sym_int" || tag == "as_sym_float" || tag == "as_sym_bool") return read_sym(value, scope);
  if (tag == "as_tensors") return list_of(tensor)(value);
  if (tag == "as_ints") return list_of(integer)(value);
  if (tag == "as_floats") return list_of(number)(value);
  if (tag == "as_bools") return list_of(boolean)(value);
  if (tag == "as_strings") return list_of(string)(value);
  if (tag == "as_sym_ints" || tag == "as_sym_floats" || tag == "as_sym_bools")
    return list_of([&](const Json& e) { return read_sym(e, scope); })(value);
  if (tag == "as_scalar_type") return Arg(static_cast<int64_t>(read_dtype(doc_, value)));
  if (tag == "as_memory_format") return Arg(read_memory_format(doc_, value));
  if (tag == "as_layout") return Arg(read_layout(doc_, value));
  if (tag == "as_device") {
    const at::Device device = read_device(doc_, value);
    return Arg(c10::IValue(device_.value_or(device)));
  }
  if (tag == "as_complex")
    return Arg(
        c10::IValue(c10::complex<double>(doc_.number(doc_.at(value, "real")), doc_.number(doc_.at(value, "imag")))));
  if (tag == "as_optional_tensor") return optional_tensor(value);
  if (tag == "as_optional_tensors") return list_of(optional_tensor)(value);
  if (tag == "as_nested_tensors") return list_of(list_of(tensor))(value);
  if (tag == "as_int_lists") return list_of(list_of(integer))(value);
  if (tag == "as_float_lists") return list_of(list_of(number))(value);
  if (tag == "as_custom_obj") doc_.fail(argument, "custom objects cannot be held in a graph");
  if (tag == "as_graph") doc_.fail(argument, "a nested graph where an argument was expected");
  doc_.fail(argument, "unknown kind of argument '" + tag + "'", "the file may be newer than this reader");
}

std::optional<TensorMeta> NodeReader::meta_of(const Json& graph, const std::string& name) {
  const Json& values = doc_.object(doc_.at(graph, "tensor_values"));
  auto it = values.find(name);
  if (it == values.end()) return std::nullopt;
  if (const Json* layout = doc_.find(*it, "layout"); layout && *layout == kUnknownLayout) return std::nullopt;
  TensorMeta meta = read_meta(doc_, *it, &program_.symbol_spelling);
  if (device_) meta.device = *device_;
  return meta;
}

void NodeReader::name_value(Value* value, const std::string& name) {
  if (value->name() == name || !is_identifier(name)) return;
  value->rename(graph_.find_value(name) ? graph_.unique_name(name) : name);
}

void NodeReader::note_expression(const Json& graph, Value* value, const std::string& file_name) {
  const char* kind = value->type() == ValueType::Int     ? "sym_int_values"
                     : value->type() == ValueType::Float ? "sym_float_values"
                                                         : "sym_bool_values";
  const Json* values = doc_.find(graph, kind);
  if (!values || !values->is_object()) return;
  auto it = values->find(file_name);
  if (it == values->end()) return;
  const auto [tag, size] = doc_.tagged(*it);
  if (tag != "as_expr") return;
  auto e = SymExpr::parse(doc_.string(doc_.at(size, "expr_str")), &program_.symbol_spelling);
  if (e) program_.value_expressions[value->name()] = e->to_infix();
}

void NodeReader::read_nodes(const Json& graph, Scope& scope, Region region, int depth) {
  if (depth > kMaxNesting) doc_.fail(graph, "graphs are nested deeper than " + std::to_string(kMaxNesting));
  for (const Json& node : doc_.array(doc_.at(graph, "nodes"))) {
    try {
      read_node(node, graph, scope, region, depth);
    } catch (const Error& e) {
      if (e.kind() == ErrorKind::BadFile) throw;
      doc_.fail(node, e.message(), e.remedy());
    } catch (const c10::Error& e) {
      doc_.fail(node, e.what_without_backtrace());
    }
  }
}

void NodeReader::read_node(const Json& node, const Json& graph, Scope& scope, Region& region, int depth) {
  const std::string& target = doc_.string(doc_.at(node, "target"));
  if (is_region(target)) return nested(node, graph, target, scope, region, depth);
  if (target == "torch._C._set_grad_enabled") {
    const Json& inputs = doc_.array(doc_.at(node, "inputs"));
    if (inputs.size() != 1) doc_.fail(node, "one argument was expected");
    const Arg on = read_argument(doc_.at(inputs[0], "arg"), scope);
    if (!on.is_constant() || !on.constant().isBool()) doc_.fail(node, "true or false was expected");
    region.grad = on.constant().toBool();
    return;
  }
  if (auto name = operator_of_target(target)) {
    // Says what export saw; a graph's dtypes follow from its inputs, which are checked when it runs.
    if (*name == "aten::_assert_tensor_metadata") return;
    const c10::OperatorHandle op = find_operator(*name);
    if (auto refusal = refused_in_files(*name)) doc_.fail(node, refusal->message, refusal->remedy);
    return call(node, graph, op, scope, region);
  }
  if (target.starts_with("torch.ops.higher_order."))
    doc_.fail(node,
              "'" + target.substr(10) +
                  "' cannot be held in a graph: control flow and other operators on graphs are not straight lines",
              "export the model without it (torch.cond: choose the branch before exporting)");
  if (target.starts_with("torch._functorch.predispatch.")) {
    doc_.fail(node, "the program holds torch.func (" + target.substr(target.rfind('.') + 1) + ") as it was called",
              "write it as operators before saving: torch.export.save(program.run_decompositions({}), ...)");
  }
  size_arithmetic(node, graph, target, scope, region);
}

void NodeReader::call(const Json& node, const Json& graph, const c10::OperatorHandle& op, Scope& scope,
                      const Region& region) {
  const auto& schema = op.schema();
  std::vector<std::optional<Arg>> given(schema.arguments().size());
  for (const Json& input : doc_.array(doc_.at(node, "inputs"))) {
    const Json& name = doc_.at(input, "name");
    auto index = schema.argumentIndexWithName(doc_.string(name));
    if (!index) doc_.fail(name, "operator " + operator_name(op) + " has no argument '" + doc_.string(name) + "'");
    auto& slot = given[static_cast<size_t>(*index)];
    if (slot) doc_.fail(name, "the argument '" + doc_.string(name) + "' is given twice");
    slot = read_argument(doc_.at(input, "arg"), scope);
  }
  std::vector<Arg> args;
  for (size_t i = 0; i < given.size(); ++i)
    args.push_back(given[i] ? std::move(*given[i]) : default_argument(schema, i));

  const Json& outputs = doc_.array(doc_.at(node, "outputs"));
  if (outputs.size() != schema.returns().size())
    doc_.fail(outputs, operator_name(op) + " has " + std::to_string(schema.returns().size()) + " results, not " +
                           std::to_string(outputs.size()));
  std::vector<int32_t> list_sizes;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (schema.returns()[i].type()->kind() != c10::TypeKind::ListType) continue;
    const auto [tag, list] = doc_.tagged(outputs[i]);
    if (!list.is_array()) doc_.fail(outputs[i], "a list of results was expected");
    list_sizes.push_back(static_cast<int32_t>(list.size()));
  }
  if (region.autocast) add_casts(node, graph, op, args, region);
  Node* made = graph_.call(op, std::move(args), std::move(list_sizes));
  set_origin(node, made, region);
  bind_outputs(node, graph, made, scope);
}

void NodeReader::size_arithmetic(const Json& node, const Json& graph, const std::string& target, Scope& scope,
                                 const Region& region) {
  const Json& outputs = doc_.array(doc_.at(node, "outputs"));
  if (outputs.size() != 1) doc_.fail(node, "one result was expected");
  const ValueType type = type_of_tag(doc_.tagged(outputs[0]).first);
  auto op = sym_operator(target, type);
  if (!op)
    doc_.fail(node, "unknown function '" + target + "'",
              "the file may be newer than this reader, or the function belongs in an operator");
  std::vector<Arg> args;
  for (const Json& input : doc_.array(doc_.at(node, "inputs")))
    args.push_back(read_argument(doc_.at(input, "arg"), scope));
  Node* made = graph_.call(*op, std::move(args));
  set_origin(node, made, region);
  bind_outputs(node, graph, made, scope);
}

bool NodeReader::read_flag(const Json& input, bool otherwise, const Scope& scope) const {
  const Arg a = read_argument(doc_.at(input, "arg"), scope);
  if (a.is_none()) return otherwise;
  if (!a.is_constant() || !a.constant().isBool()) doc_.fail(input, "true or false was expected");
  return a.constant().toBool();
}

std::optional<Region::Autocast> NodeReader::read_autocast(const Json& inputs, const Scope& scope) const {
  const Arg device = read_argument(doc_.at(inputs[0], "arg"), scope);
  const Arg dtype = read_argument(doc_.at(inputs[1], "arg"), scope);
  if (!device.is_constant() || !device.constant().isString()) doc_.fail(inputs[0], "a device type was expected");
  if (!read_flag(inputs[2], true, scope)) return std::nullopt;
  const std::string& name = device.constant().toStringRef();
  at::DeviceType type = at::kCPU;
  try {
    type = at::Device(name).type();
  } catch (const c10::Error&) {
    doc_.fail(inputs[0], "unknown device type '" + name + "'");
  }
  if (device_) type = device_->type();
  if (!dtype.is_none() && (!dtype.is_constant() || !dtype.constant().isInt()))
    doc_.fail(inputs[1], "a dtype was expected");
  const at::ScalarType lower = dtype.is_none() ? (type == at::kCUDA ? at::kHalf : at::kBFloat16)
                                               : static_cast<at::ScalarType>(dtype.constant().toInt());
  return Region::Autocast{type, lower, read_flag(inputs[3], true, scope)};
}

void NodeReader::nested(const Json& node, const Json& graph, const std::string& kind, Scope& scope, Region region,
                        int depth) {
  const Json& inputs = doc_.array(doc_.at(node, "inputs"));
  const size_t head = kind == kGradRegion ? 1 : 4;  // modes before the graph
  if (inputs.size() <= head) doc_.fail(inputs, "too few arguments for " + kind);
  const bool outermost = !region.autocast;
  if (kind == kGradRegion) {
    region.grad = read_flag(inputs[0], true, scope);
  } else {
    region.autocast = read_autocast(inputs, scope);
  }
  const auto [tag, argument] = doc_.tagged(doc_.at(inputs[head], "arg"));
  if (tag != "as_graph") doc_.fail(inputs[head], "a graph was expected");
  const Json& inner = doc_.at(argument, "graph");
  const Json& takes = doc_.array(doc_.at(inner, "inputs"));
  if (takes.size() != inputs.size() - head - 1)
    doc_.fail(inner, "the nested graph takes another number of inputs than it is given");
  Scope inner_scope;
  for (size_t i = 0; i < takes.size(); ++i) {
    const auto [what, value] = doc_.tagged(takes[i]);
    Arg given = read_argument(doc_.at(inputs[head + 1 + i], "arg"), scope);
    if (what == "as_tensor") {
      bind(doc_, value, inner_scope, doc_.string(doc_.at(value, "name")), std::move(given));
    } else if (what == "as_sym_int" || what == "as_sym_float" || what == "as_sym_bool") {
      if (const Json* name = doc_.find(value, "as_name"))
        bind(doc_, value, inner_scope, doc_.string(*name), std::move(given));
    }
  }
  read_nodes(inner, inner_scope, region, depth + 1);
  if (region.autocast && outermost) cast_weights_.clear();
  bind_nested_outputs(doc_.array(doc_.at(node, "outputs")), doc_.array(doc_.at(inner, "outputs")), scope, inner_scope);
}

void NodeReader::bind_nested_outputs(const Json& outputs, const Json& results, Scope& scope, const Scope& inner) {
  // One result that is a list stands for all of them.
  std::vector<const Json*> names;
  for (const Json& out : outputs) {
    const auto [what, value] = doc_.tagged(out);
    if (what == "as_tensors") {
      for (const Json& e : doc_.array(value)) names.push_back(&doc_.at(e, "name"));
    } else if (what == "as_tensor") {
      names.push_back(&doc_.at(value, "name"));
    } else {
      names.push_back(value.is_object() ? doc_.find(value, "as_name") : nullptr);
    }
  }
  if (names.size() != results.size())
    doc_.fail(outputs, "the nested graph has " + std::to_string(results.size()) + " results");
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i]) bind(doc_, *names[i], scope, doc_.string(*names[i]), read_argument(results[i], inner));
  }
}

void NodeReader::bind_outputs(const Json& node, const Json& graph, Node* made, Scope& scope) {
  size_t next = 0;
  const Json& outputs = doc_.at(node, "outputs");
  for (size_t i = 0; i < made->result_layout().size(); ++i) {
    const int32_t count = made->result_layout()[i];
    if (count < 0) {
      bind_output(outputs[i], graph, made->result(next++), scope);
      continue;
    }
    const auto [tag, list] = doc_.tagged(outputs[i]);
    for (const Json& e : list) {
      Value* value = made->result(next++);
      if (tag == "as_tensors") {
        bind_output({{"as_tensor", e}}, graph, value, scope);
      } else if (tag == "as_sym_ints" || tag == "as_sym_floats" || tag == "as_sym_bools") {
        bind_output({{tag.substr(0, tag.size() - 1), e}}, graph, value, scope);
      }
    }
  }
}

void NodeReader::bind_output(const Json& out, const Json& graph, Value* value, Scope& scope) {
  const auto [tag, inner] = doc_.tagged(out);
  if (tag == "as_none") return;
  const ValueType type = type_of_tag(tag);
  const Json* name = type == ValueType::Tensor ? &doc_.at(inner, "name")
                     : inner.is_object()       ? doc_.find(inner, "as_name")
                                               : nullptr;
  if (type == ValueType::Other || !name) doc_.fail(out, "unknown kind of result '" + tag + "'");
  if ((type == ValueType::Tensor) != value->is_tensor())
    doc_.fail(out, "'" + doc_.string(*name) + "' is " + (value->is_tensor() ? "a tensor" : "no tensor"));
  const std::string& text = doc_.string(*name);
  name_value(value, text);
  if (type == ValueType::Tensor) {
    value->set_meta(meta_of(graph, text));
  } else {
    value->set_type(type);
    note_expression(graph, value, text);
  }
  bind(doc_, out, scope, text, value);
}

void NodeReader::set_origin(const Json& node, Node* made, const Region& region) {
  NodeMeta& meta = made->meta();
  meta.grad_enabled = region.grad;
  const Json* metadata = doc_.find(node, "metadata");
  if (!metadata) return;
  if (const Json* stack = doc_.find(*metadata, "nn_module_stack")) {
    auto [it, fresh] = stacks_.try_emplace(doc_.string(*stack));
    if (fresh) it->second = parse_module_stack(it->first);
    meta.modules = it->second;
  }
  if (const Json* trace = doc_.find(*metadata, "stack_trace")) {
    auto [it, fresh] = sources_.try_emplace(doc_.string(*trace));
    if (fresh) it->second = parse_stack_trace(it->first);
    meta.source = it->second;
  }
}

}  // namespace plumb::pt2
