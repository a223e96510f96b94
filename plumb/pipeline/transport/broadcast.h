// One rank's tensor to every rank of a group, and the largest of their numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

// Writes the values that rank `root` has into `tensor` on every other rank: of any dtype and strides, of the same dtype
// and sizes on all of them, on any device (staged through the CPU). Every rank calls it, in the same order. One process
// alone: nothing to do. The root says first what it sends, and its checksum: bytes of another length would end the
// process, inside Gloo. Raises Error(InvalidArgument) for a root that is no rank, Error(Communication) if a peer is
// lost, the root sends another dtype or other sizes, or what comes is damaged.
void broadcast(const ProcessGroup& group, const at::Tensor& tensor, int root);

// Returns the largest of the ranks' numbers. Every rank calls it; none returns before all have. Throws
// Error(Communication) if a peer is lost.
std::int64_t largest_of_all(const ProcessGroup& group, std::int64_t number);

}  // namespace plumb
