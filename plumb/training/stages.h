// The stages that a rank runs, as the options say.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "plumb/training/job.h"

namespace plumb {

// Returns a copy of the graph, with the tensors of `module`, whose float32 products and convolutions run in bfloat16:
// their inputs are cast, and their results cast back. (torch.autocast leaves results in bfloat16 for what comes after;
// here pointwise operators and sums are in float32 as before.)
std::shared_ptr<GraphModule> bf16_products(const GraphModule& module);

// Returns the device that --device names, for a process of this number on its host. Throws UsageError for what is no
// device, or not there.
at::Device device_of(const std::string& given, int local_rank);

// As stages_of_rank(), with options.recompute and options.autocast. `change` returns the graph to run for a stage.
std::map<int, std::shared_ptr<StageFunction>> make_stages(
    const TrainOptions& options, const TrainJob& job, int rank,
    const std::function<std::shared_ptr<GraphModule>(const GraphModule&)>& change = {});

}  // namespace plumb
