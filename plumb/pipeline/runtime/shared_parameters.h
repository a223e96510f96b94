// Parameters that several stages, or several ranks, hold a copy of: found, compared, and their gradients summed.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plumb/pipeline/runtime/stage.h"
#include "plumb/pipeline/transport/transport.h"

namespace plumb {

// A parameter of a stage on a rank.
struct ParameterCopy {
  int rank = 0, stage = 0;
  std::string name;
  int local_stage = -1, index = -1;  // on this rank: where it is; -1 on others
};

// All copies of one parameter, in the order in which gradients are summed: from the last stage to the first.
using CopyGroup = std::vector<ParameterCopy>;

// Returns FNV-1a over 64-bit words: enough to notice copies that were initialized apart.
std::uint64_t content_hash(const at::Tensor& tensor);

struct SharedParameters {
  std::vector<CopyGroup> groups;              // groups of two or more copies, at least one of them this rank's
  std::vector<std::vector<bool>> copy_peers;  // [a][b]: ranks a and b sum gradients or buffers
  // Returns whether this rank's stage holds one of them.
  bool in_stage(int stage) const;
};

// Exchanges the parameters that each rank holds; groups are those of the table and parameters of the same name in
// several stages (or of one stage on several ranks). Throws Error(InvalidArgument) if a listed copy does not exist, or
// copies differ in size, type or value.
SharedParameters find_shared_parameters(const PipeTable& layout, const std::map<int, std::vector<NamedTensor>>& local,
                                        Transport& transport);

// Returns the values this rank sends to `peer` and gets from it at the end of a step: own (peer's) copies of the groups
// both hold, in the order of groups and copies.
std::vector<std::pair<const CopyGroup*, const ParameterCopy*>> copies_for_peer(const SharedParameters& shared,
                                                                               int holder, int other);

}  // namespace plumb
