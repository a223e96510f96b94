#include "plumb/cli/cut.h"

#include "plumb/cli/common.h"
#include "plumb/partition/balance.h"
#include "plumb/partition/pipe_split.h"
#include "plumb/partition/split.h"

namespace plumb::cli {

std::shared_ptr<Pipe> cut(const GraphModule& module, int stages, const std::vector<std::string>& at) {
  SplitOptions options;
  bool marked = false;
  for (const Node* node : module.graph().nodes()) marked = marked || is_pipe_split(*node);
  std::string where = "the graph's marks";
  if (!at.empty()) {
    where = "--at";
    for (const std::string& name : at) options.points.emplace_back(name, SplitPoint::Beginning);
  } else if (!marked) {
    if (stages == 0) throw UsageError("the graph has no marks to be cut at", "--stages N, or --at MODULE,MODULE");
    if (stages > 1) {
      BalanceOptions balanced;
      balanced.stages = stages;
      options = balance(module, estimate_cost(module), balanced).options;
    }
    where = "balancing";
  }
  auto pipe = pipeline(module, options);
  if (stages != 0 && pipe->num_stages() != stages) {
    throw UsageError("--stages " + std::to_string(stages) + ": " + where + " gives " +
                         std::to_string(pipe->num_stages()) + " stages",
                     "--stages " + std::to_string(pipe->num_stages()) + ", or other names for --at");
  }
  return pipe;
}

}  // namespace plumb::cli
