#include "plumb/cli/cut.h"

#include "plumb/cli/common.h"
#include "plumb/core/error.h"
#include "plumb/partition/balance.h"
#include "plumb/partition/pipe_split.h"
#include "plumb/partition/split.h"

namespace plumb::cli {

std::shared_ptr<Pipe> cut(const GraphModule& module, int stages, const std::vector<std::string>& at,
                          const std::string& needed_by) {
  SplitOptions options;
  bool marked = false;
  for (const Node* node : module.graph().nodes()) marked = marked || is_pipe_split(*node);
  std::string where = "the graph's marks give";
  if (stages == 1) {
    options.policy = [](const Node&) { return 0; };
    where = "one stage gives";
  } else if (!at.empty()) {
    where = "--at gives";
    for (const std::string& name : at) options.points.emplace_back(name, SplitPoint::Beginning);
  } else if (!marked) {
    if (stages == 0)
      throw UsageError("--stages is missing, and the graph has no marks to be cut at",
                       "--stages N, or --at MODULE,MODULE");
    BalanceOptions balanced;
    balanced.stages = stages;
    try {
      options = balance(module, estimate_cost(module), balanced).options;
    } catch (const Error& e) {
      throw UsageError(needed_by + ": " + e.message(), e.remedy());
    }
    where = "balancing gives";
  }
  auto pipe = [&] {
    try {
      return pipeline(module, options);
    } catch (const Error& e) {
      if (at.empty()) throw;
      throw Error(e.kind(), "--at: " + e.message(), e.where(), e.remedy());
    }
  }();
  if (stages != 0 && pipe->num_stages() != stages) {
    throw UsageError(
        needed_by + " needs " + std::to_string(stages) + " stages: " + where + " " + std::to_string(pipe->num_stages()),
        "--at with " + std::to_string(stages - 1) + " module" + (stages == 2 ? "" : "s") + ", or another --stages");
  }
  return pipe;
}

}  // namespace plumb::cli
