// Arguments, constants and size expressions of a written program.
#include "plumb/core/error.h"
#include "plumb/exported/graph_writer.h"
#include "plumb/exported/sym_ops.h"
#include "plumb/graph/schema_fit.h"

namespace plumb::pt2 {
namespace {

bool is_python_keyword(const std::string& name) {
  return name == "from" || name == "lambda" || name == "in" || name == "is" || name == "not";
}

}  // namespace

Json GraphWriter::inputs_of(const Node& node) const {
  const auto& schema = node.schema();
  Json inputs = Json::array();
  bool can_skip = true, skipped = false;
  for (const auto& argument : schema.arguments()) can_skip = can_skip && !is_python_keyword(argument.name());
  const bool sizes = python_function(node.target()).has_value();
  for (size_t i = 0; i < node.args().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const Arg& arg = node.arg(i);
    if (can_skip && has_default(schema, i) && arg == default_argument(schema, i)) {
      skipped = true;
      continue;
    }
    const int kind = argument.kwarg_only() || (skipped && !sizes) ? 2 : 1;
    inputs.push_back({{"name", argument.name()}, {"arg", this->argument(node, arg, argument)}, {"kind", kind}});
  }
  return inputs;
}

Json GraphWriter::reference(const Value* value) const {
  const std::string& name = name_of(value);
  switch (value->type()) {
    case ValueType::Tensor: return {{"as_tensor", {{"name", name}}}};
    case ValueType::Float: return {{"as_sym_float", {{"as_name", name}}}};
    case ValueType::Bool: return {{"as_sym_bool", {{"as_name", name}}}};
    case ValueType::Int: return {{"as_sym_int", {{"as_name", name}}}};
    case ValueType::Other: break;
  }
  refuse(*value->producer(), "%" + value->name() + " is neither a tensor nor a number");
}

Json GraphWriter::argument(const Node& node, const Arg& arg, const c10::Argument& schema) const {
  if (arg.is_value()) return reference(arg.value());
  if (arg.is_list()) return list(node, arg.list());
  return constant(node, arg.constant(), &schema);
}

// Returns a list with values in it: of tensors, optional tensors, or sizes and integers.
Json GraphWriter::list(const Node& node, const Arg::List& items) const {
  bool none = false;
  ValueType type = ValueType::Other;
  for (const Arg& e : items) {
    none = none || e.is_none();
    if (e.is_value()) type = e.value()->type();
  }
  Json out = Json::array();
  if (type == ValueType::Tensor || (type == ValueType::Other && none)) {
    for (const Arg& e : items) {
      if (e.is_none()) {
        out.push_back({{"as_none", true}});
      } else if (e.is_value() && e.value()->is_tensor()) {
        out.push_back(none ? reference(e.value()) : reference(e.value()).at("as_tensor"));
      } else {
        refuse(node, "a list of tensors with something else in it");
      }
    }
    return {{none ? "as_optional_tensors" : "as_tensors", std::move(out)}};
  }
  const char* tag = type == ValueType::Int     ? "as_sym_ints"
                    : type == ValueType::Float ? "as_sym_floats"
                                               : "as_sym_bools";
  for (const Arg& e : items) {
    if (e.is_value() && e.value()->type() == type) {
      out.push_back({{"as_name", name_of(e.value())}});
    } else if (e.is_constant() && (type == ValueType::Int     ? e.constant().isInt()
                                   : type == ValueType::Float ? e.constant().isDouble()
                                                              : e.constant().isBool())) {
      out.push_back(constant(node, e.constant(), nullptr));
    } else {
      refuse(node, "a list of numbers of several types");
    }
  }
  return {{tag, std::move(out)}};
}

Json GraphWriter::constant(const Node& node, const c10::IValue& v, const c10::Argument* schema) const {
  if (v.isNone()) return {{"as_none", true}};
  if (v.isInt()) {
    switch (schema ? int_meaning(*schema) : IntMeaning::Plain) {
      case IntMeaning::ScalarType: return {{"as_scalar_type", write_dtype(static_cast<at::ScalarType>(v.toInt()))}};
      case IntMeaning::Layout: return {{"as_layout", write_layout(v.toInt())}};
      case IntMeaning::MemoryFormat: return {{"as_memory_format", write_memory_format(v.toInt())}};
      case IntMeaning::Plain: return {{"as_int", v.toInt()}};
    }
  }
  if (v.isBool()) return {{"as_bool", v.toBool()}};
  if (v.isDouble()) return {{"as_float", json_number(v.toDouble())}};
  if (v.isComplexDouble()) {
    return {{"as_complex",
             {{"real", json_number(v.toComplexDouble().real())}, {"imag", json_number(v.toComplexDouble().imag())}}}};
  }
  if (v.isString()) return {{"as_string", v.toStringRef()}};
  if (v.isDevice()) return {{"as_device", write_device(v.toDevice())}};
  if (v.isList()) {
    auto items = v.toListRef();
    if (items.empty()) {
      const std::string element = schema ? schema->type()->str() : "";
      const char* tag = element.find("Tensor") != std::string::npos  ? "as_tensors"
                        : element.find("float") != std::string::npos ? "as_floats"
                        : element.find("bool") != std::string::npos  ? "as_bools"
                        : element.find("str") != std::string::npos   ? "as_strings"
                                                                     : "as_ints";
      return {{tag, Json::array()}};
    }
    const bool numbers = items[0].isInt() || items[0].isDouble() || items[0].isBool() || items[0].isString();
    if (numbers &&
        std::all_of(items.begin(), items.end(), [&](auto& e) { return e.tagKind() == items[0].tagKind(); })) {
      Json out = Json::array();
      std::string tag;
      for (const c10::IValue& e : items) {
        const Json one = constant(node, e, nullptr);
        tag = one.begin().key() + "s";
        out.push_back(one.front());
      }
      return {{tag, std::move(out)}};
    }
  }
  refuse(node, "a constant of kind " + v.tagKind());
}

// Returns the expression of a size or number: as in the file that it came from, or worked out from its nodes.
SymExpr GraphWriter::expression(const Value* value) {
  if (auto known = expressions_.find(value); known != expressions_.end()) return known->second;
  std::optional<SymExpr> e;
  if (auto noted = program_.value_expressions.find(value->name()); noted != program_.value_expressions.end()) {
    e = SymExpr::parse(noted->second);
  }
  const Node& node = *value->producer();
  auto operand = [&](size_t i) -> std::optional<SymExpr> {
    const Arg& arg = node.arg(i);
    if (arg.is_value() && expressions_.count(arg.value())) return expressions_.at(arg.value());
    if (arg.is_constant() && arg.constant().isInt()) return SymExpr::integer(arg.constant().toInt());
    return std::nullopt;
  };
  if (!e && node.is_op("aten::sym_size") && node.num_inputs() == 1 && node.input(0)->meta() &&
      node.arg(1).is_constant()) {
    const TensorMeta& meta = *node.input(0)->meta();
    int64_t dim = node.arg(1).constant().toInt();
    if (dim < 0) dim += static_cast<int64_t>(meta.sizes.size());
    if (dim >= 0 && dim < static_cast<int64_t>(meta.sizes.size())) {
      const size_t d = static_cast<size_t>(dim);
      e = meta.symbols.empty() || meta.symbols[d].empty() ? SymExpr::integer(meta.sizes[d])
                                                          : SymExpr::parse(meta.symbols[d]);
    }
  }
  static const std::map<std::string, std::string> calls = {{"plumb::sym_add.int", "Add"},
                                                           {"plumb::sym_sub.int", "Add"},
                                                           {"plumb::sym_mul.int", "Mul"},
                                                           {"plumb::sym_floordiv.int", "FloorDiv"},
                                                           {"plumb::sym_mod.int", "PythonMod"}};
  if (auto call = calls.find(node.target()); !e && call != calls.end()) {
    auto a = operand(0), b = operand(1);
    if (b && call->first == "plumb::sym_sub.int") b = SymExpr::call("Mul", {SymExpr::integer(-1), *b});
    if (a && b) e = SymExpr::call(call->second, {*a, *b});
  }
  // A size that is known only in a run: a symbol of its own.
  if (!e) {
    const bool input = node.kind() == NodeKind::Placeholder;
    e = SymExpr::symbol((input ? "s9" : "u9") + std::to_string(1000 + fresh_symbols_++));
  }
  expressions_.emplace(value, *e);
  return *e;
}

Json GraphWriter::expression_json(const Value* value) {
  const SymExpr e = expression(value);
  const bool is_int = value->type() == ValueType::Int;
  if (is_int && e.kind() == SymExpr::Kind::Integer) return {{"as_int", e.value()}};
  Json hint = nullptr;
  if (is_int) {
    auto value_now = e.evaluate(hints_);
    if (value_now) hint = {{"as_int", *value_now}};
    if (!value_now && value->producer()->kind() == NodeKind::Placeholder) hint = {{"as_int", 8}};
  }
  std::string text = e.to_sympy(spelling_);
  // A number worked out from unknowns that is no integer.
  if (!is_int && e.kind() == SymExpr::Kind::Symbol && !spelling_.count(e.text())) {
    if (value->type() == ValueType::Float) text = "Symbol('zuf" + e.text().substr(1) + "', real=True)";
    if (value->type() == ValueType::Bool) return {{"as_bool", true}};
  }
  return {{"as_expr", {{"expr_str", text}, {"hint", hint}}}};
}

}  // namespace plumb::pt2
