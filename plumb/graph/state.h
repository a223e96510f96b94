// The tensors a graph refers to by name: parameters, buffers, constants. Shared with the model, never copied.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace plumb {

enum class AttrKind : uint8_t {
  Parameter,
  Buffer,
  Constant,  // a tensor made outside of the graph, or folded
};

struct Attr {
  std::string name;  // fully qualified, "layers.0.fc.weight"; never changed by anything
  AttrKind kind = AttrKind::Parameter;
  at::Tensor tensor;
  bool persistent = true;  // buffers: part of a state_dict
};

// Insertion-ordered. Two names may hold one tensor (tied weights).
class State {
 public:
  // Throws if the name is taken, has an empty part ("a..b") or is no UTF-8.
  void add(Attr attr);
  // Replaces the tensor (and keeps kind and place) or adds a new entry.
  void set(const std::string& name, at::Tensor tensor, AttrKind kind = AttrKind::Parameter);
  void erase(const std::string& name);
  const Attr* find(std::string_view name) const;  // null if there is none
  const Attr& get(std::string_view name) const;   // throws, naming near misses
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  size_t size() const { return attrs_.size(); }
  const std::vector<Attr>& attrs() const { return attrs_; }
  auto begin() const { return attrs_.begin(); }
  auto end() const { return attrs_.end(); }
  // Returns the names of entries of this kind in order; a tied tensor under each of its names.
  std::vector<std::string> names(AttrKind kind) const;
  // Returns a fresh name "hint", "hint_1", ... not yet taken.
  std::string unique_name(const std::string& hint) const;
  // Returns a copy with copied tensors (leaves, same requires_grad and tag); aliases stay aliases.
  State deep_copy() const;

 private:
  std::vector<Attr> attrs_;
  std::unordered_map<std::string, size_t> index_;
};

}  // namespace plumb
