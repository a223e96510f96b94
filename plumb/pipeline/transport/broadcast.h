// One rank's tensor to every rank of a group, and the largest of their numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

// Writes rank `root`'s values into `tensor` on every other rank: any dtype and strides, the same dtype and sizes on all
// of them, any device (staged through the CPU). Every rank calls it, in the same order. One process alone: nothing to
// do. The root first sends a description and a checksum, because bytes of another length would end the process, inside
// Gloo. Throws Error(InvalidArgument) for a root that is no rank, Error(Communication) if a peer is lost, the root
// sends another dtype or other sizes, or the values are damaged.
void broadcast(const ProcessGroup& group, const at::Tensor& tensor, int root);

// Returns the largest of the ranks' numbers, at each place. Every rank calls it, with equally many; none returns before
// all have. Throws Error(Communication) if a peer is lost.
std::vector<std::int64_t> largest_of_all(const ProcessGroup& group, const std::vector<std::int64_t>& numbers);
inline std::int64_t largest_of_all(const ProcessGroup& group, std::int64_t number) {
  return largest_of_all(group, std::vector{number})[0];
}

}  // namespace plumb
