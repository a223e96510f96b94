// Nodes of one graph, a bit each. An erased node's bit is no other's later, as its address may be.
#pragma once

#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

class NodeSet {
 public:
  bool contains(const Node* node) const { return node->id() < bits_.size() && bits_[node->id()]; }
  // Returns whether it is new.
  bool insert(const Node* node) {
    if (contains(node)) return false;
    if (node->id() >= bits_.size()) bits_.resize(node->graph().id_end());
    bits_[node->id()] = true;
    ++size_;
    return true;
  }
  // Returns whether it was there.
  bool erase(const Node* node) {
    if (!contains(node)) return false;
    bits_[node->id()] = false;
    --size_;
    return true;
  }
  void clear() { bits_.clear(), size_ = 0; }
  bool empty() const { return size_ == 0; }

 private:
  std::vector<bool> bits_;  // by Node::id()
  size_t size_ = 0;
};

}  // namespace plumb
