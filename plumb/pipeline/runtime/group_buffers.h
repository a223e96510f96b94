// Buffers that forwards and backwards write (running statistics, scales), by groups of microbatches.
#pragma once

#include <vector>

#include "plumb/pipeline/runtime/stage.h"

namespace plumb {

// Each group of a step begins with the buffers as they were before the step. At its end they are the mean over all
// groups, summed in a binary tree; whole numbers are those of the first group. So they do not depend on how groups are
// spread over replicas.
class GroupBuffers {
 public:
  // Buffers of one stage; `groups` of its `microbatches`, each of equally many.
  GroupBuffers(std::vector<NamedTensor> buffers, int groups, int microbatches);

  const std::vector<NamedTensor>& buffers() const { return buffers_; }
  void begin_step();
  // Puts the buffers of the microbatch's group in place, for a forward or backward of it.
  void begin_microbatch(int microbatch);
  // Returns this rank's groups' results, by buffer, when all are done: the sum, or the first group's whole numbers.
  Tensors sums();
  // Takes the sums of all `groups_of_all` groups.
  void finish_step(const Tensors& sums, int groups_of_all);

 private:
  void keep();
  std::vector<NamedTensor> buffers_;
  int groups_, size_, now_ = -1;
  Tensors before_;
  std::vector<Tensors> by_group_;  // that were in place and are not now
};

}  // namespace plumb
