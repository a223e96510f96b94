// Where a program is cut into stages: shared by split and train.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plumb/partition/pipe.h"

namespace plumb::cli {

// Cut before the named modules; without names at the graph's own marks, and without marks so that the slowest stage is
// as fast as can be. `stages` 0: as many as the cuts give. Throws UsageError if that is not `stages`.
std::shared_ptr<Pipe> cut(const GraphModule& module, int stages, const std::vector<std::string>& at);

}  // namespace plumb::cli
