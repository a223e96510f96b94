// Measures every floating-point tensor of a graph, and its gradient, while it runs.
//
//   auto tracked = plumb::track_scales(module);
//   tracked->forward({x}).toTensor().sum().backward();
//   std::cout << plumb::scales_graph(*tracked).to_text();
//
// Values and gradients are those of the module without it: the nodes hand their tensors on. The caller's input tensors
// are not touched; the gradient of a floating-point input is measured whether it requires one or not, unless a mask of
// attention hangs on it, which torch then computes with other bits. That of a
// pipeline stage's input has what later stages add to it.
#pragma once

#include <memory>

#include "plumb/transforms/module.h"
#include "plumb/transforms/track/scales_graph.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {

// Inserts a plumb::track node after every floating-point tensor that is used: inputs, parameters, buffers, results.
// Values that are tracked already are not tracked again. Returns whether anything changed. `every_type`: also after
// tensors of other types, of which a slot keeps values (ScaleTracker::Wanted::keep) and measures nothing.
bool track_scales(GraphModule& module, ScaleTracker& tracker, Report* report = nullptr, bool every_type = false);

// Returns a new module that shares the tensors of `module`, with a tracker of its own (TransformedModule::tracker). A
// module that is tracked already keeps its tracker, and what has come new since is tracked too.
std::shared_ptr<TransformedModule> track_scales(const std::shared_ptr<GraphModule>& module,
                                                const MetricsOptions& options = {});

// Returns the module's graph as it is now, without the tracking nodes, and what was measured in the last run. Throws
// Error(InvalidState) if the module is not tracked.
ScalesGraph scales_graph(const TransformedModule& module);

}  // namespace plumb
