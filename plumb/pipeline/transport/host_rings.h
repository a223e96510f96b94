// Messages between ranks of one host, through memory that they share.
//
// Each rank writes one memory of its own and reads those of its peers (shared_memory.h). It holds for every peer a ring
// of messages to that peer, and how far the rank has read the peer's ring. A message is there as soon as it is written:
// no thread of Gloo's takes part, and a receiver that is awake need not be woken.
//
// A receiver looks for its message before it sleeps, if there is a core for every rank of the host. The time that it
// looks halves whenever no message came meanwhile, so ranks whose stages take long sleep at once.
//
// A peer is lost when its process has ended, or has closed its rings. Messages are copied before they are read, and
// checked against the ring's limits: a hostile peer can make an error, no more.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plumb/pipeline/launch/descriptor.h"
#include "plumb/pipeline/transport/shared_memory.h"

namespace plumb {

class HostRings {
 public:
  // Longest message.
  static constexpr std::int64_t kLongest = 4 << 20;
  // Bytes of a ring: most are never taken from the system, as a ring that was read to its end begins anew.
  static constexpr std::int64_t kBytes = 64 << 20;
  // Returns the bytes that a message takes of a ring.
  static std::int64_t taken_by(std::int64_t bytes) { return (bytes + kHeader + kHeader - 1) / kHeader * kHeader; }

  // Makes the memory of rank `rank` of `size`. Throws Error without memory or descriptors.
  HostRings(int rank, int size);
  // Closes the rings: peers that wait see it.
  ~HostRings();
  HostRings(const HostRings&) = delete;
  HostRings& operator=(const HostRings&) = delete;

  // Returns where peers find this memory, or "" if the host cannot be named.
  std::string address() const;
  // Opens the memory of a peer. Returns false if it is on another host or cannot be read.
  bool open(int peer, const std::string& address);
  void close(int peer) { peers_.at(peer) = Peer(); }
  bool has(int peer) const { return peers_.at(peer).ring.defined(); }
  // Lets this rank look for messages before it sleeps, if `processes` do not need more cores than it may use.
  void look_first(int processes);

  // Returns false if the peer has not read enough of the ring yet. Throws Error(CannotWrite) without memory.
  bool try_send(int peer, const at::Tensor& message);
  // Waits for room. Throws as try_send() and wait() do.
  void send(int peer, const at::Tensor& message, std::chrono::milliseconds timeout,
            const std::function<bool()>& interrupted);
  // Returns the next message of the peer, a byte tensor; undefined: there is none yet. Throws Error(Communication) for
  // what is no ring of plumb's.
  at::Tensor take(int peer);
  // Waits until the peer has written. Throws std::runtime_error as waits for Gloo's messages do: "timed out", or how
  // the peer was lost.
  void wait(int peer, std::chrono::milliseconds timeout, const std::function<bool()>& interrupted);

 private:
  static constexpr std::int64_t kHeader = 8;  // a message's length, and what it is rounded up to
  struct Head;
  struct Lane;
  struct Peer {
    at::Tensor lanes, ring;                // of the peer's memory, to read
    Descriptor process;                    // readable once it has ended
    std::chrono::microseconds look_for{};  // before the next sleep
    std::int64_t taken = 0;                // bytes of this rank's ring for it that the system has given
  };

  static std::int64_t first_ring(int size);
  static std::int64_t memory_bytes(int size);
  // This rank's lane for a peer, and its ring.
  Lane& lane_for(int peer) const;
  char* ring_for(int peer) const;
  // The peer's lane for this rank, and its ring.
  const Lane& lane_of(int peer) const;
  const char* ring_of(int peer) const;
  bool has_written(int peer) const;
  // Returns how the peer was lost, or "".
  const char* how_lost(int peer) const;

  const int rank_, size_;
  std::chrono::microseconds most_looking_{};
  SharedMemory memory_;
  char* own_ = nullptr;
  std::vector<Peer> peers_;  // by rank
};

}  // namespace plumb
