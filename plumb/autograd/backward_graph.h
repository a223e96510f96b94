// Autograd's graph below a stage's outputs, and how a backward over it is divided. For stage_backward's files only.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <vector>

#include "plumb/autograd/node_handle.h"

namespace plumb {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

// The end of autograd's graph at a stage's inputs: keeps what arrives.
struct StageInputNode : torch::autograd::Node {
  variable_list gradients;
  variable_list apply(variable_list&& grads) override {
    gradients = std::move(grads);
    return {};
  }
  std::string name() const override { return "plumb::StageInput"; }
};

// The graph below the roots, children before parents.
struct BackwardGraph {
  struct Entry {
    torch::autograd::Node* node;
    int first_child;             // into `children`
    int num_children;            // one per edge
    bool in_input_half = false;  // runs in the input half
    bool target = false;         // an input, or a node whose gradient the input half completes
    bool start = false;          // the weight half starts here
    bool twice = true;           // may run once in each half
    bool by_itself = false;      // runs rightly without autograd's engine

    bool runs_in_weight_half() const { return start || (!in_input_half && !target); }  // valid after divide()
  };
  std::vector<Entry> entries;
  std::vector<int> children;  // one per edge; -1 for none
  ska::flat_hash_map<torch::autograd::Node*, int> index;
  // Whether the graph has nodes that run rightly only in a backward of everything (node_names.h).
  bool indivisible = false;

  const Entry* find(torch::autograd::Node* node) const {
    auto it = index.find(node);
    return it == index.end() ? nullptr : &entries[it->second];
  }
};

// Walks from the roots down to leaves and to the nodes of `inputs`.
BackwardGraph walk_backward(const edge_list& roots, const std::vector<Edge>& inputs);

// Decides which nodes run in the input half and where the weight half starts.
void divide(BackwardGraph& graph);

// Returns whether each node of a divided graph's weight half gets one gradient and runs by itself.
bool defers_chains(const BackwardGraph& graph, const edge_list& roots);

}  // namespace plumb
