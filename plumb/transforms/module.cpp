#include "plumb/transforms/module.h"

#include "plumb/core/error.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {

namespace {

// A tracker like `original` for a copy of the graph that was tracked by it.
void take_tracker(TransformedModule& copy, const std::shared_ptr<ScaleTracker>& original) {
  if (!original) return;
  copy.tracker = original->twin();
  const Arg old(original->id());
  for (Node* node : copy.graph().nodes()) {
    const bool tracks = node->is_op("plumb::track") || node->is_op("plumb::track_rounded");
    if (tracks && node->arg("tracker") == old) node->set_arg("tracker", copy.tracker->id());
  }
}

// Returns a module with a copy of the graph and these tensors, with what is known of `module`.
std::shared_ptr<TransformedModule> copy_with(State state, const GraphModule& module) {
  auto copy = std::make_shared<TransformedModule>(module.graph().clone(), std::move(state), module.in_spec(),
                                                  module.out_spec());
  copy->copy_mode(module);
  if (const auto* known = dynamic_cast<const TransformedModule*>(&module)) {
    copy->reports = known->reports;
    copy->mup = known->mup;
    take_tracker(*copy, known->tracker);
  }
  return copy;
}

}  // namespace

const GraphModule& not_null(const std::shared_ptr<GraphModule>& module) {
  if (module) return *module;
  throw Error(ErrorKind::InvalidArgument, "a transform is given a null pointer", "", "give it a captured module");
}

std::shared_ptr<TransformedModule> derive(const GraphModule& module) { return copy_with(module.state(), module); }

std::shared_ptr<TransformedModule> TransformedModule::deep_copy() const {
  return copy_with(state().deep_copy(), *this);
}

std::shared_ptr<torch::nn::Module> TransformedModule::clone(const std::optional<at::Device>& device) const {
  auto copy = deep_copy();
  if (device) copy->to(*device);
  return copy;
}

std::shared_ptr<TransformedModule> transformed(std::shared_ptr<TransformedModule> module, const std::string& pass,
                                               const std::function<bool(TransformedModule&, Report&)>& run) {
  Report report(pass);
  run_checked(pass, [&] { return run(*module, report); }, *module);
  module->reports.push_back(std::move(report));
  return module;
}

RegisterTransform::RegisterTransform(std::string name, std::string summary, std::vector<PassOption> options, Run run)
    : RegisterPass({name, std::move(summary), std::move(options),
                    [name, run](GraphModule& module, const PassOptions& given, std::vector<std::string>* notes) {
                      Report report(name);
                      const bool changed = run(module, given, report);
                      if (notes) *notes = report.lines();
                      return changed;
                    }}) {}

}  // namespace plumb
