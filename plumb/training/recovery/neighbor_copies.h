// Copies of the state of every N-th edge (state_copies.h) on another host, for a training that has one pipeline.
//
// Each rank sends its copy to a rank of the next host and takes in those of the host before, on a thread beside the
// steps. It sends a piece when the rank waits for a message anyway (a bubble), or after a short while without one. Two
// copies of each rank are kept there, and the two that they were made of here: an edge stays whole on all hosts until
// all ranks have the next one. If they are not done when the next one is due, that one is left out.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "plumb/pipeline/transport/process_group.h"
#include "plumb/pipeline/transport/shared_memory.h"
#include "plumb/pipeline/transport/transport.h"
#include "plumb/training/reports/events.h"

namespace plumb {

class NeighborCopies {
 public:
  // Made by all ranks of `world` together. `host`: of this rank. `busy`: the group whose waits are bubbles. `most`:
  // bytes that a copy may have.
  NeighborCopies(const ProcessGroup& world, int host, ProcessGroup busy, int64_t most);
  ~NeighborCopies();
  NeighborCopies(const NeighborCopies&) = delete;

  // Returns whether there is another host.
  bool has_neighbor() const { return to_ >= 0; }
  // Returns the memory that has to be held when this process is gone.
  const std::vector<SharedMemory>& memory() const { return memory_; }
  // Returns whether copies of an edge of this generation are on other hosts, for all ranks.
  bool complete() const { return complete_; }
  // Sends the copy of this edge, whose bytes are `copy`. All ranks call it. Returns an event about
  // the copies before: they have arrived, or the reason why not.
  std::optional<TrainEvent> send(int64_t edge, const at::Tensor& copy);

 private:
  struct Received {
    int from = 0;
    SharedMemory memory[2];
  };
  void transfer();
  std::vector<int64_t> exchange_sizes();
  void exchange_piece(int64_t at, const std::vector<int64_t>& sizes, const std::vector<char*>& into,
                      std::vector<int64_t>& marks);
  void wait_for_bubble();

  const ProcessGroup world_, group_, busy_;
  const int64_t most_;
  int to_ = -1;
  std::vector<Received> received_;
  SharedMemory own_[2];
  std::vector<SharedMemory> memory_;
  std::unique_ptr<Transport> transport_;

  // State of the transfer that runs, or of the last one.
  std::thread thread_;
  std::atomic<bool> done_ = true, ends_ = false;
  std::string problem_;
  int64_t edge_ = -1, bytes_ = 0, in_bubbles_ = 0, pieces_ = 0;
  double seconds_ = 0;
  size_t slot_ = 0;
  at::Tensor sending_;
  bool complete_ = false, given_up_ = false;
};

}  // namespace plumb
