#include "plumb/capture/module_names.h"

#include <optional>
#include <unordered_map>

namespace plumb {
namespace {

using Path = std::optional<std::string>;

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

// Returns the innermost module around both; "" is the root.
std::string around(std::string a, std::string b) {
  while (a != b) {
    std::string& longer = a.size() < b.size() ? b : a;
    longer = parent_of(longer);
  }
  return a;
}

// Finds the module that a node belongs to: the owner of the state it reads. A value made of state alone passes its
// module on to its reader.
class Owners {
 public:
  Path owner_of(const Node* node) {
    Path owner;
    bool state_alone = node->num_inputs() > 0;
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      const auto known = made_of_.find(node->input(i));
      const Path of = node->input(i)->producer()->kind() == NodeKind::GetAttr
                          ? Path(parent_of(node->input(i)->producer()->target()))
                          : (known == made_of_.end() ? std::nullopt : Path(known->second));
      state_alone = state_alone && of;
      if (of) owner = owner ? around(*owner, *of) : *of;
    }
    if (owner && state_alone) {
      for (const Value* result : node->results()) made_of_[result] = *owner;
    }
    return owner;
  }

 private:
  std::unordered_map<const Value*, std::string> made_of_;
};

std::shared_ptr<const ModuleStack> stack_of(const std::string& path, const ModuleTypes& types) {
  auto stack = std::make_shared<ModuleStack>();
  for (const auto& [name, type] : types) {  // sorted: the outer ones first
    const bool holds = name.empty() || name == path || path.starts_with(name + ".");
    if (holds) stack->push_back({name, type});
  }
  return stack;
}

}  // namespace

void name_modules_by_state(Graph& graph, const ModuleTypes& types) {
  std::unordered_map<std::string, std::shared_ptr<const ModuleStack>> stacks;
  std::unordered_map<const Value*, std::string> callers;  // producer's caller: its layer's parent, or its own module
  auto name = [&](Node* node, const std::string& path, const std::string& caller) {
    auto& stack = stacks[path];
    if (!stack) stack = stack_of(path, types);
    node->meta().modules = stack;
    for (const Value* result : node->results()) callers[result] = caller;
  };
  // The innermost module around the callers of what a node reads.
  auto around_inputs = [&](const Node* node) {
    Path path;
    for (const Value* value : node->inputs()) {
      const auto known = callers.find(value);
      if (known != callers.end()) path = path ? around(*path, known->second) : known->second;
    }
    return path;
  };
  Owners owners;
  std::string before;
  std::vector<Node*> open;  // since the last one with an owner
  auto close = [&](const std::string& behind) {
    const std::string place = around(before, behind);
    for (Node* node : open) {
      // The last add of a block stands before the next one, and reads what this one made.
      const Path read = around_inputs(node);
      const std::string& path = read && around(*read, place) == place ? *read : place;
      name(node, path, path);
    }
    open.clear();
    before = behind;
  };
  for (Node* node : graph.nodes()) {
    if (!node->is_call() || node->meta().modules) continue;
    const Path owner = owners.owner_of(node);
    if (owner) {
      close(*owner);
      name(node, *owner, parent_of(*owner));
    } else {
      open.push_back(node);
    }
  }
  close("");
}

}  // namespace plumb
