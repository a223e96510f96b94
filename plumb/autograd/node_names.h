// Autograd's nodes that plumb knows by their names alone, as torch gives them no other mark.
//
// If a test of NodeNames fails, torch changed, look here: it has renamed a node or moved it to another namespace. A
// name that is no longer found divides a backward that must stay whole, or keeps whole what could be divided.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstring>
#include <string>
#include <typeinfo>

namespace plumb::node_names {

using torch::autograd::Node;

inline bool has(const Node& node, const char* part) { return node.name().find(part) != std::string::npos; }

// A torch::autograd::Function in C++; `of_plumb`: one of plumb's own.
inline bool is_cpp_function(const Node& node) { return has(node, "CppNode<"); }
inline bool is_cpp_function_of_plumb(const Node& node) { return has(node, "CppNode<plumb::"); }

// A torch.autograd.Function in Python. All of them are of one class in C++.
inline bool is_python_function(const Node& node) { return std::strstr(typeid(node).name(), "PyNode") != nullptr; }

// The backward of an operator of ATen, made from its formula.
inline bool is_generated(const Node& node) { return std::strstr(typeid(node).name(), "autograd9generated") != nullptr; }

// Writes its input's gradient also where none is asked for, to nowhere (channels-last tensors).
inline bool is_group_norm(const Node& node) { return has(node, "NativeGroupNormBackward"); }

// Runs rightly only in a backward of everything: a write into a view looks at and changes the list of nodes to run, a
// re-entrant checkpoint starts a backward() of its own.
inline bool needs_whole_backward(const Node& node) {
  return has(node, "CopySlices") || has(node, "CheckpointFunctionBackward");
}

}  // namespace plumb::node_names
