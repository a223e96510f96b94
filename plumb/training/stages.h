// The stages that a rank runs, as the options say.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "plumb/training/job.h"

namespace plumb {

// As stages_of_rank(), with options.recompute and options.autocast. `change` answers the graph that is run in a stage's
// place.
std::map<int, std::shared_ptr<StageFunction>> make_stages(
    const TrainOptions& options, const TrainJob& job, int rank,
    const std::function<std::shared_ptr<GraphModule>(const GraphModule&)>& change = {});

}  // namespace plumb
