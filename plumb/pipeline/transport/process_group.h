// A rank's place among the processes of a pipeline, and the c10d backends its messages go through: Gloo for sizes,
// faults and values of the CPU; for values on a device the device's own (NCCL) if the group has one, else Gloo.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/pipeline/launch/environment.h"

namespace c10d {
class ProcessGroup;
class Backend;
class Store;
}  // namespace c10d

namespace plumb {

class ProcessGroup {
 public:
  // One process alone: rank 0 of 1, no backend.
  ProcessGroup();

  int rank() const;
  int size() const;
  // Returns the number of one of this group's ranks among all processes, for messages: of a subgroup, in its group.
  int world_rank(int rank) const;
  // Returns how long a message, or a peer that starts up, is waited for.
  std::chrono::milliseconds timeout() const;
  void set_timeout(std::chrono::milliseconds timeout);

  // Returns the device whose values travel through a backend of its own.
  std::optional<c10::Device> device() const;

  // --- for messages (transport.h, broadcast.h) ---
  // Returns GlooOptions::share_memory.
  bool shares_memory() const;
  // Null: one process alone.
  const c10::intrusive_ptr<c10d::Backend>& backend() const;
  // Returns the backend that values on device() go through. Null: all values are staged through backend().
  const c10::intrusive_ptr<c10d::Backend>& device_backend() const;
  // Carries error texts between ranks. May be null.
  const c10::intrusive_ptr<c10d::Store>& store() const;
  bool launcher_serves_store() const;
  // Returns whether a thread of this rank waits for a message of the group.
  bool is_waiting() const;
  // Called with 1 when a thread begins to wait for a message, with -1 afterwards.
  void count_waiting(int more) const;
  // Returns another number for each caller.
  int take_tag_range() const;
  // Returns why the group takes no more messages: a peer is lost. Null: it takes some.
  const std::string* failure() const;
  void set_failure(const std::string& why) const;
  // Keeps buffers of messages that were under way when the group failed: Gloo may still write into them.
  void keep_until_closed(std::shared_ptr<void> buffers) const;

  struct State;
  explicit ProcessGroup(std::shared_ptr<State> state);

 private:
  friend ProcessGroup make_subgroup(const ProcessGroup& group, const std::string& name, const std::vector<int>& ranks);
  friend ProcessGroup use_group(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
                                std::chrono::milliseconds timeout);
  friend ProcessGroup share_group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<int> world,
                                  std::chrono::milliseconds timeout);
  std::shared_ptr<State> state_;
};

struct GlooOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  // The host name, address or network interface ("eth0") to listen on. Empty: loopback if the master is on loopback,
  // GLOO_SOCKET_IFNAME if set, else this host's address on the way to the master.
  std::string interface;
  // Runs Gloo's own threads under SCHED_BATCH: a woken thread then does not take the core from the one that computes,
  // which halves a message's cost on busy cores. The calling thread keeps its own policy.
  bool batch_threads = true;
  // Sends messages of at most HostRings::kLongest to ranks of this host through memory that both hold.
  bool share_memory = true;
  // The device that this rank computes on. Its values travel through the backend registered for it, if there is one.
  std::optional<c10::Device> device;
};

// Makes a backend for a device's values over ranks that meet in `store`. It must match the sends and receives of two
// ranks in order and coalesce (startCoalescing) or else be asked for one message at a time; it needs no buffers, no
// tags and nothing but send and recv of contiguous byte tensors on the device.
using MakeDeviceBackend =
    std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    c10::Device device, std::chrono::milliseconds timeout)>;
// Registers a backend for groups made from here on. torch gives C++ no way to make NCCL's backend without CUDA's
// headers: a program that has them registers `[](auto& store, ...) { return
// c10::make_intrusive<c10d::ProcessGroupNCCL>(store, ...); }`. Groups of torch.distributed bring their own.
void register_device_backend(c10::DeviceType type, MakeDeviceBackend make);

// Connects all ranks of `env` over Gloo. Rank 0 serves the store unless the launcher does. Blocks until all are there.
// Throws Error(Communication) that names the address, and the ranks that did not come, after the time-out; at once if
// a rank says that it cannot start.
ProcessGroup make_gloo_group(const RankEnvironment& env, const GlooOptions& options = {});

// Tells the ranks that wait in make_gloo_group() that this one does not come, and why. Does nothing where the launcher
// itself ends the others: plumb's, and torchrun's agent. Rank 0 serves the store for that; it takes 10 seconds at most.
void tell_cannot_start(const RankEnvironment& env, const std::string& why) noexcept;

// Returns the group the launcher made this process for (environment.h); one process alone if there is none.
ProcessGroup make_group_from_environment(const GlooOptions& options = {});

// Makes a group of some of the ranks of `group`, for data parallel beside pipeline and the like; ranks are renumbered
// in the order given. All of `ranks` must call it with the same name and list; the caller must be one of them.
ProcessGroup make_subgroup(const ProcessGroup& group, const std::string& name, const std::vector<int>& ranks);

// `replicas` pipelines beside each other: ranks 0 to n - 1 are the first, the next n the second, and so on.
struct ReplicatedGroups {
  ProcessGroup pipeline;  // ranks of this rank's replica
  ProcessGroup replicas;  // ranks that hold the same stages; PipelineOptions::replicas
};

// Throws Error(InvalidArgument) if the group's size is no multiple of `replicas`. All ranks of `group` must call it.
ReplicatedGroups divide_into_replicas(const ProcessGroup& group, int replicas);

// Uses a group that exists already, such as torch.distributed's. `store` carries error texts between ranks; null: the
// group's own. A group with a backend for a device ("nccl", "cpu:gloo,cuda:nccl") sends that device's values through
// it; if it has none for the CPU a Gloo group is made beside it, for which all ranks must make this call. Threads of
// the group given are its maker's: unless the program ignores SIGPIPE (Python does), make it while a NoSigpipe
// (no_sigpipe.h) lives, or a lost peer ends the process by that signal. Groups that plumb makes never raise it.
ProcessGroup use_group(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::intrusive_ptr<c10d::Store> store,
                       std::chrono::milliseconds timeout = std::chrono::seconds(60));
// As use_group(), for callers that use a group more than once: its backend's messages share one range of tags after
// another, and what failed stays failed. `world`: the number of each rank among all processes.
ProcessGroup share_group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<int> world,
                         std::chrono::milliseconds timeout);
ProcessGroup use_backend(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                         std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace plumb
