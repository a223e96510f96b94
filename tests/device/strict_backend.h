// A c10d backend for tests that behaves as NCCL does, over Gloo. It takes tensors of the test device only and nothing
// but sends and receives. It matches those of two ranks in the order in which they are posted, without tags, and ends a
// send only when its receive is posted. A rank has one stream: a transfer waits for those posted before, except within
// one group. Memory is read and written when a transfer runs, not when it is posted.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace plumb_test {

c10::intrusive_ptr<c10d::Backend> make_strict_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                      std::chrono::milliseconds timeout);

// The test device's memory as the CPU sees it (test_device.cpp).
at::Tensor memory_of(const at::Tensor& tensor);

}  // namespace plumb_test
