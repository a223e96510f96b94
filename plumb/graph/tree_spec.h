// The structure of nested inputs and outputs (tuples, lists, dicts, ...) beside their flat values.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace plumb {

// It has the fields of torch.utils._pytree, so that `.pt2` files and Python carry it unchanged:
// `type` is "" for a leaf, else "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict",
// "collections.namedtuple", or a registered class; `context` is the JSON text of the type's own data (dict: its keys,
// in order; tuple and list: "null"). None is a leaf whose value is None.
struct TreeSpec {
  std::string type;
  std::string context;
  std::vector<TreeSpec> children;

  static TreeSpec leaf() { return {}; }
  static TreeSpec tuple(std::vector<TreeSpec> children);
  static TreeSpec list(std::vector<TreeSpec> children);
  static TreeSpec dict(const std::vector<std::string>& keys, std::vector<TreeSpec> children);
  // (args, kwargs) of n positional leaves: the usual input spec.
  static TreeSpec positional_inputs(size_t n);

  bool is_leaf() const { return type.empty(); }
  size_t num_leaves() const;
  // Keys of a dict (only string and integer keys, as text); throws for other types.
  std::vector<std::string> keys() const;
  // Returns a name for each leaf, of keys and places: "loss", "states.1"; "" if it is the only one.
  std::vector<std::string> leaf_names() const;
  bool operator==(const TreeSpec&) const = default;

  // torch.utils._pytree's dump, protocol 1: `[1, {"type": ..., "context": ..., "children_spec": [...]}]`.
  std::string to_json() const;
  static TreeSpec from_json(const std::string& text);
  // For people: "(*, {mask: *})".
  std::string to_string() const;
};

// Nested IValue (tuple, list, dict with string keys) -> leaves, and its spec. A Tensor list is a list of leaves.
std::vector<c10::IValue> flatten(const c10::IValue& nested, TreeSpec* spec);
// Returns the value with the entries of its dicts in the order of `spec`. Throws Error(StructureMismatch) for a dict
// with other keys. Other structures are not compared.
c10::IValue in_order_of(const TreeSpec& spec, const c10::IValue& nested);
// Returns the inverse. Throws if the number of leaves does not fit. Types unknown to C++ become tuples.
c10::IValue unflatten(const TreeSpec& spec, std::vector<c10::IValue> leaves);

}  // namespace plumb
