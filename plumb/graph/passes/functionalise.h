// Turns writes into pure operators where nothing else can see the difference: `x += y` becomes an add to every later
// pass.
//
//   %a = aten::add_.Tensor(%x, %y)                    %a = aten::add.Tensor(%x, %y)          (%x: %a from here on)
//   %s = aten::select.int(%x, 1, 0)                   %s = aten::select.int(%x, 1, 0)
//   %f = aten::mul_.Tensor(%s, 2)             ->      %f = aten::mul.Tensor(%s, 2)
//                                                     %x2 = aten::select_scatter(%x, %f, 1, 0)
//
// A memory is taken as a whole or left as it is. Left alone: inputs, parameters and buffers; writes through views that
// have no inverse (transposes, reshapes that may or may not copy); writes whose pure form would have another dtype,
// layout or backward (seen from the values' types: without types everything is left alone); random and metadata writes.
// Outputs are the same bits. Gradients are the same numbers, their layout need not be: eager gives the gradient of a
// written memory the memory's strides, a pure view hands on what it gets, a transposed one. A matrix product behind
// it then sums in another order, and its gradients may differ in the last places. Elsewhere gradients are the same
// bits, but for the sign of zeros.
#pragma once

#include "plumb/graph/graph_module.h"

namespace plumb {

// Answers whether anything changed. Why a write was left alone goes to `report`.
bool functionalise(GraphModule& module, std::vector<std::string>* report = nullptr);
bool functionalise(Graph& graph, const State* state = nullptr, std::vector<std::string>* report = nullptr);

}  // namespace plumb
