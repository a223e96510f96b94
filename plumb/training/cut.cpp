#include "plumb/training/cut.h"

#include "plumb/core/error.h"
#include "plumb/partition/balance.h"
#include "plumb/partition/pipe_split.h"
#include "plumb/partition/size_policy.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

std::pair<std::string, SplitPoint> split_point(const std::string& text) {
  const std::string end = ":end";
  if (text.ends_with(end)) return {text.substr(0, text.size() - end.size()), SplitPoint::End};
  return {text, SplitPoint::Beginning};
}

}  // namespace

void choose_multi_use(const GraphModule& module, const std::vector<std::string>& transmit, SplitOptions& options) {
  for (const std::string& name : transmit) {
    if (name == "all") {
      options.multi_use = MultiUse::Transmit;
      continue;
    }
    const Attr* attr = module.state().find(name);
    if (attr == nullptr || attr->kind != AttrKind::Parameter) {
      throw UsageError("--transmit " + name + ": the program has no parameter of that name",
                       "a name that `plumb show FILE` prints, or all");
    }
    options.multi_use_by_name[name] = MultiUse::Transmit;
  }
}

std::shared_ptr<Pipe> cut(const GraphModule& module, int stages, const CutOptions& cuts, const std::string& needed_by) {
  const std::vector<std::string>& at = cuts.at;
  SplitOptions options;
  bool marked = false;
  for (const Node* node : module.graph().nodes()) marked = marked || is_pipe_split(*node);
  std::string where = "the graph's marks give";
  std::shared_ptr<GraphModule> marked_there;  // by a plan's cut
  if (stages == 1) {
    options.policy = [](const Node&) { return 0; };
    where = "one stage gives";
  } else if (!cuts.before.empty()) {
    marked_there = used_by("the cut", [&] { return mark_before(module, cuts.before); });
  } else if (!at.empty()) {
    where = "--at gives";
    for (const std::string& name : at) options.points.push_back(split_point(name));
  } else if (!marked) {
    if (stages == 0)
      throw UsageError("--stages is missing, and the graph has no marks to be cut at",
                       "--stages N, or --at MODULE,MODULE");
    BalanceOptions balanced;
    balanced.stages = stages;
    options = used_by(needed_by, [&] { return balance(module, estimate_cost(module), balanced).options; });
    where = "balancing gives";
  }
  choose_multi_use(module, cuts.transmit, options);
  options.wire = cuts.wire;
  used_by("--wire", [&] { check(options.wire.formats); });
  const auto pipe =
      prefixed(at.empty() ? "" : "--at: ", [&] { return pipeline(marked_there ? *marked_there : module, options); });
  if (stages != 0 && pipe->num_stages() != stages) {
    if (marked_there)
      throw UsageError(c10::str("the cut gives ", pipe->num_stages(), " stages of ", stages), kPlanAgain);
    throw UsageError(c10::str(needed_by, " needs ", stages, " stages: ", where, " ", pipe->num_stages()),
                     c10::str("--at with ", stages - 1, " module", stages == 2 ? "" : "s", ", or another --stages"));
  }
  return pipe;
}

}  // namespace plumb
