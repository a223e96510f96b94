// Turns writes into pure operators where nothing else can see the difference: `x += y` becomes an add to later passes.
//
//   %a = aten::add_.Tensor(%x, %y)                    %a = aten::add.Tensor(%x, %y)          (%x: %a from here on)
//   %s = aten::select.int(%x, 1, 0)                   %s = aten::select.int(%x, 1, 0)
//   %f = aten::mul_.Tensor(%s, 2)             ->      %f = aten::mul.Tensor(%s, 2)
//                                                     %x2 = aten::select_scatter(%x, %f, 1, 0)
//
// A memory is taken as a whole or left as it is. Left alone: inputs, parameters and buffers; writes through views that
// have no inverse (transposes, reshapes that may or may not copy); writes whose pure form would have another dtype,
// layout or backward (seen from the values' types: without types everything is left alone); random and metadata writes.
// `inexact` turns dropout, too: on a GPU its pure form draws other values. Outputs are the same bits otherwise.
// Gradients are the same numbers, but their layout may differ: eager gives the gradient of a written memory the
// memory's strides; a pure view passes its gradient through, maybe transposed. A matrix product on it then sums in
// another order, and its gradients may differ in the last places. All other gradients are the same bits, except the
// sign of zeros.
#pragma once

#include "plumb/graph/graph_module.h"

namespace plumb {

// Returns whether anything changed. The reason why a write was left alone goes to `report`.
bool functionalise(GraphModule& module, std::vector<std::string>* report = nullptr, bool inexact = false);
bool functionalise(Graph& graph, const State* state = nullptr, std::vector<std::string>* report = nullptr,
                   bool inexact = false);

}  // namespace plumb
