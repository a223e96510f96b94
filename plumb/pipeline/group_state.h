// Inside of ProcessGroup, for the files of this room only.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/process_group.h"

namespace plumb {

struct ProcessGroup::State {
  int rank = 0;
  int size = 1;
  std::vector<int> world;  // by rank: its number among all processes; empty: the same
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  RankEnvironment env;
  GlooOptions options;
  // Buffers of messages that were under way when the group failed: Gloo may still write into them, so they go after it.
  std::vector<std::shared_ptr<void>> until_closed;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
  // Values on `device` go through this one; null: all values are staged through `backend`.
  c10::intrusive_ptr<c10d::Backend> device_backend;
  c10::Device device = c10::kCPU;
  int tag_ranges = 0;   // handed out to transports
  bool failed = false;  // a peer is lost: no more messages
  std::string failure;
};

// Gives a group that plumb makes the backend that is registered for the options' device, if there is one.
void add_device_backend(ProcessGroup::State& state);

// gloo_backend.cpp
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    const std::string& master_address, const GlooOptions& options);

// transport_faults.cpp: Gloo's own words, without the place in its source and its advice:
// "Read error [127.0.0.1]:61108: Connection reset by peer".
std::string what_gloo_says(const std::exception& error);

// Does `work`. An exception becomes Error(Communication): `what`, and the first line of its text.
template <class Work>
std::invoke_result_t<Work> connecting(const std::string& what, const std::string& remedy, Work work) {
  try {
    return work();
  } catch (const std::exception& e) {
    throw Error(ErrorKind::Communication, str(what, ": ", first_line(e.what())), "", remedy);
  }
}

// Descriptors of a group beside one for each connection to a rank: the store, listening sockets, Gloo's loop.
inline constexpr int kDescriptorsBeside = 8;
// Throws Error(ExecutionFailed) that begins with `who` if this process may not open `count` more files: without them,
// Gloo's threads end the process.
void require_descriptors(const std::string& who, int count);

}  // namespace plumb
