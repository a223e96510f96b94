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

}  // namespace

const GraphModule& not_null(const std::shared_ptr<GraphModule>& module) {
  if (module) return *module;
  throw Error(ErrorKind::InvalidArgument, "a transform is given a null pointer", "", "give it a captured module");
}

std::shared_ptr<TransformedModule> derive(const GraphModule& module) {
  auto result =
      std::make_shared<TransformedModule>(module.graph().clone(), module.state(), module.in_spec(), module.out_spec());
  result->copy_mode(module);
  if (const auto* known = dynamic_cast<const TransformedModule*>(&module)) {
    result->reports = known->reports;
    result->mup = known->mup;
    take_tracker(*result, known->tracker);
  }
  return result;
}

std::shared_ptr<TransformedModule> TransformedModule::deep_copy() const {
  auto copy = std::make_shared<TransformedModule>(graph().clone(), state().deep_copy(), in_spec(), out_spec());
  copy->copy_mode(*this);
  copy->reports = reports;
  copy->mup = mup;
  take_tracker(*copy, tracker);
  return copy;
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
