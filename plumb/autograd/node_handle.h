// Nodes of autograd's graph, held the way that the torch at hand holds them.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>

namespace plumb {

// An intrusive pointer from torch 2.12 on, a std::shared_ptr before.
using NodePtr = decltype(torch::autograd::Edge::function);
inline constexpr bool kNodesAreShared = std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;

template <class T>
auto make_node() {
  if constexpr (kNodesAreShared) {
    return std::make_shared<T>();
  } else {
    return c10::make_intrusive<T>();
  }
}

// Returns an owning pointer to a node that has an owner already.
template <class Node>
NodePtr node_handle(Node* node) {
  if constexpr (kNodesAreShared) {
    return node->getptr();
  } else {
    return c10::intrusive_ptr<Node>::reclaim_copy(node);
  }
}

}  // namespace plumb
