// Two modules on the same inputs, tensor by tensor: a file and a live module, a model and its transformed self, a CPU
// and another device.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/recording/diff.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {

// Runs of two modules of which every tensor and gradient is kept: memory for all of them, twice. The gradient of a
// parameter that has hooks is what these leave of it. Recurrent layers with dropout are taken apart if the other module
// has no such layers, as formats leave none.
//
//   ModuleDiff both(*a, *b);
//   both.run([&](GraphModule& graph) { return graph(x, y); });  // the loss
//   std::cout << both.report().to_text();
class ModuleDiff {
 public:
  ModuleDiff(const GraphModule& a, const GraphModule& b);
  // Share the tensors of the given modules.
  std::shared_ptr<GraphModule> a, b;

  // Runs each forward and backward from the scalar that `loss` returns; an undefined tensor: only forward. Both draw
  // the same random numbers. Gradients, buffers and generators are put back.
  void run(const std::function<at::Tensor(GraphModule& graph)>& loss);

  // Compares what has run. Differences of a relative size up to `tolerance` count as none. Throws
  // Error(InvalidArgument) for a tolerance that is negative or not finite.
  DiffReport report(const DiffNames& names = {}, double tolerance = 0) const;

 private:
  using Gradients = std::map<std::string, at::Tensor>;  // by parameter, as the last run left them behind hooks
  std::shared_ptr<ScaleTracker> of_a_, of_b_;
  Gradients gradients_a_, gradients_b_;
};

// Returns the sum of the outputs that require gradients, of complex ones the real part. Undefined if none does.
at::Tensor sum_of_outputs(const std::vector<c10::IValue>& outputs);

struct ModuleDiffOptions {
  // Returns the loss to go backward from; empty: sum_of_outputs(). If it is undefined, only values are compared.
  std::function<at::Tensor(const std::vector<c10::IValue>& outputs)> loss = {};
  double tolerance = 0;
  DiffNames names = {};
};
// Runs both on copies of these flat inputs, each on the device of its own tensors. The modules stay as they were.
DiffReport diff(const GraphModule& a, const GraphModule& b, const std::vector<c10::IValue>& inputs,
                const ModuleDiffOptions& options = {});

}  // namespace plumb
