// Plumb's findings on a machine: the first thing to look at, and the beginning of a report of a fault.
#pragma once

#include <string>
#include <vector>

namespace plumb {

struct Finding {
  std::string topic, found;
  std::string remedy;  // "": nothing is wrong
};

// Looks at the CPU, threads, torch, devices with their kernels, Gloo and NCCL. Runs every kind of kernel once on each
// CUDA device, on small tensors. Throws nothing: what fails is a finding.
std::vector<Finding> doctor();
// Returns the page: a line a finding, remedies below theirs, a last line that concludes.
std::string to_text(const std::vector<Finding>& findings);

}  // namespace plumb
