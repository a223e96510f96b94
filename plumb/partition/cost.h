// The cost of each node of a graph: measured by running it, or estimated from shapes.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/graph_module.h"

namespace plumb {

struct NodeCost {
  double forward = 0;        // seconds
  double backward = 0;       // seconds
  double flops = 0;          // forward, a multiply and an add count as two; 0 for operators that only move data
  int64_t bytes = 0;         // read and written by forward
  int64_t output_bytes = 0;  // bytes of results that are memory of their own (views count nothing)
};

// Costs of the operators of a graph, by position among its nodes (all kinds; others than calls cost nothing).
struct GraphCost {
  std::vector<NodeCost> nodes;
  double forward() const;
  double backward() const;
  double flops() const;
};

// Returns the bytes of a tensor; 0 if its shape is not known.
int64_t bytes_of(const std::optional<TensorMeta>& meta);

struct Machine {
  double flops_per_second = 5e10;
  double bytes_per_second = 1e10;
  double seconds_per_operator = 5e-6;
};

// Estimates costs from shapes: the slower of arithmetic and memory traffic, plus a fixed share for each operator.
// Backward counts twice the forward for operators with a gradient. Shapes come from the graph's own metadata; where
// those are missing, the graph is run once on `inputs` made meta tensors (an operator without a meta kernel in C++ on
// zeros). Throws Error(InvalidArgument) if shapes are missing and inputs too.
GraphCost estimate_cost(const GraphModule& module, const std::vector<c10::IValue>& inputs = {},
                        const Machine& machine = {});

// Runs every node `repeats` times on the values it has in a run on `inputs`, forward and backward, and takes the
// fastest. Leaves the module's state, gradients and the random generator as they were.
GraphCost measure_cost(const GraphModule& module, std::vector<c10::IValue> inputs, int repeats = 5);

using ValueMetas = std::unordered_map<const Value*, TensorMeta>;

// Returns the forward's floating-point operations; a multiply and an add count as two. Contractions and recurrent
// layers (as in the table of operator facts) count their products, everything else one for each element of its results,
// lookups nothing. A value without meta counts as empty.
double flops_of(const Node& node, const ValueMetas& metas);

}  // namespace plumb
