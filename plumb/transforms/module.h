// The result of a transform: a graph module that knows what was done to it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/graph/pass.h"
#include "plumb/tensors/parameter_tag.h"
#include "plumb/transforms/report.h"

namespace plumb {

class ScaleTracker;

// Tags that an optimizer needs for each parameter, by its full name (plumb/tensors/parameter_tag.h).
using MupTable = std::map<std::string, ParameterData>;

class TransformedModule : public GraphModule {
 public:
  using GraphModule::GraphModule;

  // One for each transform, in order.
  std::vector<Report> reports;
  // Filled by unit_scale: every parameter. The tensors themselves are tagged, too: give them to plumb::optim.
  MupTable mup;
  // Set by track_scales, else null.
  std::shared_ptr<ScaleTracker> tracker;

  // Returns a deep copy that measures into a tracker of its own.
  std::shared_ptr<TransformedModule> deep_copy() const;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;
};

// Returns the module. Throws Error(InvalidArgument) for a null pointer.
const GraphModule& not_null(const std::shared_ptr<GraphModule>& module);

// Returns a module with a copy of the graph and the same tensors, with what is known of `module`.
std::shared_ptr<TransformedModule> derive(const GraphModule& module);

// Runs a transform on this module by run_checked(), and adds the report that it fills.
std::shared_ptr<TransformedModule> transformed(
    std::shared_ptr<TransformedModule> module, const std::string& pass,
    const std::function<bool(TransformedModule& module, Report& report)>& run);

// Adds a transform to the table of passes. The lines of the report that it fills are the pass's notes.
struct RegisterTransform : RegisterPass {
  using Run = std::function<bool(GraphModule& module, const PassOptions& options, Report& report)>;
  RegisterTransform(std::string name, std::string summary, std::vector<PassOption> options, Run run);
};

}  // namespace plumb
