#include "plumb/graph/tree_spec.h"

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "plumb/core/error.h"
#include "plumb/core/json_text.h"

namespace plumb {
namespace {

using nlohmann::json;

// Deep enough for anything a person writes; keeps hostile files from exhausting the stack.
constexpr int kMaxDepth = 200;
constexpr int kMaxJsonDepth = 2 * kMaxDepth + 16;  // an object and a list for each level, and what contexts hold

json dump(const TreeSpec& spec) {
  json j = {{"type", nullptr}, {"context", nullptr}, {"children_spec", json::array()}};
  if (spec.is_leaf()) return j;
  j["type"] = spec.type;
  // torch writes the context of this one type as an object, and reads it only so.
  const bool object = spec.type == "collections.defaultdict";
  j["context"] = object ? parse_json(spec.context, kMaxJsonDepth) : json(spec.context);
  for (const TreeSpec& child : spec.children) j["children_spec"].push_back(dump(child));
  return j;
}

TreeSpec read(const json& j, int depth) {
  if (depth > kMaxDepth) throw Error(ErrorKind::BadFile, "a tree spec nested deeper than 200");
  if (!j.is_object() || !j.contains("type") || !j.contains("children_spec") || !j["children_spec"].is_array()) {
    throw Error(ErrorKind::BadFile, "a tree spec lacks type or children_spec");
  }
  TreeSpec spec;
  if (j["type"].is_null()) {
    if (!j["children_spec"].empty()) throw Error(ErrorKind::BadFile, "a leaf of a tree spec has children");
    return spec;
  }
  if (!j["type"].is_string() || j["type"].get_ref<const std::string&>().empty()) {
    throw Error(ErrorKind::BadFile, "a tree spec's type is not a name");
  }
  spec.type = j["type"].get<std::string>();
  const json context = j.value("context", json());
  spec.context = context.is_string() ? context.get<std::string>() : context.dump();
  for (const json& child : j["children_spec"]) spec.children.push_back(read(child, depth + 1));
  if (spec.type == "builtins.dict" || spec.type == "collections.OrderedDict")
    spec.keys();  // throws now, not at its first use
  return spec;
}

bool is_dict(const TreeSpec& s) { return s.type == "builtins.dict" || s.type == "collections.OrderedDict"; }
bool is_list(const TreeSpec& s) { return s.type == "builtins.list"; }

}  // namespace

TreeSpec TreeSpec::tuple(std::vector<TreeSpec> children) { return {"builtins.tuple", "null", std::move(children)}; }
TreeSpec TreeSpec::list(std::vector<TreeSpec> children) { return {"builtins.list", "null", std::move(children)}; }
TreeSpec TreeSpec::dict(const std::vector<std::string>& keys, std::vector<TreeSpec> children) {
  return {"builtins.dict", json(keys).dump(), std::move(children)};
}
TreeSpec TreeSpec::positional_inputs(size_t n) {
  return tuple({tuple(std::vector<TreeSpec>(n, leaf())), dict({}, {})});
}

size_t TreeSpec::num_leaves() const {
  if (is_leaf()) return 1;
  size_t n = 0;
  for (const TreeSpec& child : children) n += child.num_leaves();
  return n;
}

std::vector<std::string> TreeSpec::keys() const {
  std::vector<std::string> names;
  const json parsed = is_dict(*this) ? parse_json(context, kMaxJsonDepth) : json();
  if (!parsed.is_array()) throw Error(ErrorKind::StructureMismatch, "a tree spec of type '" + type + "' has no keys");
  for (const json& key : parsed) names.push_back(key.is_string() ? key.get<std::string>() : key.dump());
  return names;
}

std::vector<std::string> TreeSpec::leaf_names() const {
  if (is_leaf()) return {""};
  const std::vector<std::string> own = is_dict(*this) ? keys() : std::vector<std::string>();
  std::vector<std::string> names;
  for (size_t i = 0; i < children.size(); ++i) {
    const std::string child = i < own.size() ? own[i] : std::to_string(i);
    for (const std::string& inner : children[i].leaf_names())
      names.push_back(inner.empty() ? child : child + "." + inner);
  }
  return names;
}

std::string TreeSpec::to_json() const { return json::array({1, dump(*this)}).dump(); }

TreeSpec TreeSpec::from_json(const std::string& text) {
  const json parsed = parse_json(text, kMaxJsonDepth);
  if (!parsed.is_array() || parsed.size() != 2 || parsed[0] != 1) {
    throw Error(ErrorKind::BadFile, "a tree spec that is not torch's protocol 1: " + text.substr(0, 80));
  }
  return read(parsed[1], 0);
}

std::string TreeSpec::to_string() const {
  if (is_leaf()) return "*";
  std::string inner;
  std::vector<std::string> names;
  if (is_dict(*this)) names = keys();
  for (size_t i = 0; i < children.size(); ++i) {
    if (i) inner += ", ";
    if (i < names.size()) inner += names[i] + ": ";
    inner += children[i].to_string();
  }
  if (is_dict(*this)) return "{" + inner + "}";
  if (is_list(*this)) return "[" + inner + "]";
  if (type == "builtins.tuple") return "(" + inner + (children.size() == 1 ? ",)" : ")");
  return type + "(" + inner + ")";
}

namespace {

TreeSpec flatten_into(const c10::IValue& v, std::vector<c10::IValue>& leaves, int depth) {
  if (depth > kMaxDepth) throw Error(ErrorKind::StructureMismatch, "a structure nested deeper than 200");
  std::vector<TreeSpec> children;
  if (v.isTuple()) {
    for (const auto& e : v.toTupleRef().elements()) children.push_back(flatten_into(e, leaves, depth + 1));
    return TreeSpec::tuple(std::move(children));
  }
  // Lists of numbers are structure as well, as in Python.
  if (v.isList()) {
    for (const c10::IValue& e : v.toListRef()) children.push_back(flatten_into(e, leaves, depth + 1));
    return TreeSpec::list(std::move(children));
  }
  if (v.isGenericDict()) {
    std::vector<std::string> keys;
    for (const auto& entry : v.toGenericDict()) {
      if (!entry.key().isString()) throw Error(ErrorKind::Unsupported, "a dict's keys must be strings");
      keys.push_back(entry.key().toStringRef());
      children.push_back(flatten_into(entry.value(), leaves, depth + 1));
    }
    return TreeSpec::dict(keys, std::move(children));
  }
  leaves.push_back(v);
  return TreeSpec::leaf();
}

c10::IValue unflatten_from(const TreeSpec& spec, std::vector<c10::IValue>& leaves, size_t& next) {
  if (spec.is_leaf()) return std::move(leaves[next++]);
  std::vector<c10::IValue> children;
  children.reserve(spec.children.size());
  for (const TreeSpec& child : spec.children) children.push_back(unflatten_from(child, leaves, next));
  const bool tensors =
      !children.empty() && std::all_of(children.begin(), children.end(), [](const auto& c) { return c.isTensor(); });
  const auto element = tensors ? c10::TypePtr(c10::TensorType::get()) : c10::TypePtr(c10::AnyType::get());
  if (is_list(spec)) {
    c10::impl::GenericList list(element);
    for (auto& c : children) list.push_back(std::move(c));
    return list;
  }
  if (is_dict(spec)) {
    c10::impl::GenericDict dict(c10::StringType::get(), element);
    const auto names = spec.keys();
    if (names.size() != children.size()) {
      throw Error(ErrorKind::StructureMismatch, "a dict's tree spec has " + std::to_string(names.size()) +
                                                    " keys and " + std::to_string(children.size()) + " values");
    }
    for (size_t i = 0; i < children.size(); ++i) dict.insert(names[i], std::move(children[i]));
    return dict;
  }
  return c10::ivalue::Tuple::create(std::move(children));
}

}  // namespace

std::vector<c10::IValue> flatten(const c10::IValue& nested, TreeSpec* spec) {
  std::vector<c10::IValue> leaves;
  TreeSpec found = flatten_into(nested, leaves, 0);
  if (spec) *spec = std::move(found);
  return leaves;
}

c10::IValue in_order_of(const TreeSpec& spec, const c10::IValue& nested) {
  if (spec.is_leaf()) return nested;
  if (is_dict(spec) && nested.isGenericDict()) {
    const auto dict = nested.toGenericDict();
    const auto names = spec.keys();
    c10::impl::GenericDict ordered(dict.keyType(), dict.valueType());
    for (size_t i = 0; i < names.size() && i < spec.children.size(); ++i) {
      const auto entry = dict.find(names[i]);
      if (entry != dict.end()) ordered.insert(names[i], in_order_of(spec.children[i], entry->value()));
    }
    if (ordered.size() == dict.size() && ordered.size() == names.size()) return ordered;
    std::string given;
    for (const auto& entry : dict) given += c10::str(given.empty() ? "" : ", ", entry.key());
    throw Error(ErrorKind::StructureMismatch,
                "a dict has the keys " + given + ", expected are those of " + spec.to_string());
  }
  if (!nested.isTuple() && !nested.isList()) return nested;
  const auto elements = nested.isTuple() ? nested.toTupleRef().elements().vec() : nested.toListRef().vec();
  if (elements.size() != spec.children.size()) return nested;
  std::vector<c10::IValue> ordered;
  for (size_t i = 0; i < elements.size(); ++i) ordered.push_back(in_order_of(spec.children[i], elements[i]));
  return c10::ivalue::Tuple::create(std::move(ordered));
}

c10::IValue unflatten(const TreeSpec& spec, std::vector<c10::IValue> leaves) {
  if (leaves.size() != spec.num_leaves()) {
    throw Error(ErrorKind::StructureMismatch, "the structure " + spec.to_string() + " has " +
                                                  std::to_string(spec.num_leaves()) + " leaves, got " +
                                                  std::to_string(leaves.size()));
  }
  size_t next = 0;
  return unflatten_from(spec, leaves, next);
}

}  // namespace plumb
