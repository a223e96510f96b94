// Inside of Transport, for transport.cpp and transport_faults.cpp.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "plumb/core/str.h"
#include "plumb/pipeline/transport/direct_messages.h"
#include "plumb/pipeline/transport/failure_store.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/host_rings.h"
#include "plumb/pipeline/transport/interruptible_wait.h"
#include "plumb/pipeline/transport/message.h"
#include "plumb/pipeline/transport/transport.h"

namespace plumb {

// The tags of c10d's messages. Each transport of a group has a range of them.
class MessageTags {
 public:
  // `range`: the transport's number in its group.
  explicit MessageTags(int range) : first_(kFirst + range % kRanges * kInRange) {}

  // Returns the tag of the buffer's class, so that no message meets a buffer that is too short for it.
  int message(int size_class) const { return first_ + size_class; }
  int second_part(int size_class, int position) const {
    return first_ + kFirstOfSecondParts + size_class * kPositions + position % kPositions;
  }

 private:
  static constexpr int kRanges = 512, kInRange = 1 << 21, kFirst = 1 << 10;
  // The lower half of a range is for messages, the upper one for second parts.
  static constexpr int kFirstOfSecondParts = kInRange / 2;
  static constexpr int kPositions = kFirstOfSecondParts / wire::kSizeClasses;

  int first_;
};

// Makes a buffer, pinned if this process uses an accelerator: values are copied to and from it without a second copy.
at::Tensor byte_buffer(std::int64_t bytes);

inline wire::Prologue read_prologue(const at::Tensor& buffer) {
  wire::Prologue p;
  std::memcpy(&p, buffer.const_data_ptr(), sizeof p);
  return p;
}

// A step's share of the ring between two ranks. It is half of the ring: the sender may be a step ahead.
class RingShare {
 public:
  // Returns whether a message in a buffer of `capacity` bytes goes through the ring. Both ends ask for all messages of
  // the step in order, so their replies are alike.
  bool take(std::int64_t capacity) {
    if (capacity > HostRings::kLongest || taken_ + HostRings::taken_by(capacity) > HostRings::kBytes / 2) return false;
    taken_ += HostRings::taken_by(capacity);
    return true;
  }

 private:
  std::int64_t taken_ = 0;
};

struct Posted {
  at::Tensor buffer;
  c10::intrusive_ptr<c10d::Work> work;
};

// All messages of a step from one peer.
struct Incoming {
  std::vector<int> order;      // indices into plan.receives
  std::vector<Posted> posted;  // by position in `order`
  size_t num_posted = 0;
  std::vector<char> done;      // by position: received and read
  std::uint32_t received = 0;  // all positions before this one are done
  RingShare ring;
  size_t next_of_ring = 0;  // the position from which on the next message of the ring has its own
};

struct Outgoing {
  std::vector<int> order;  // indices into plan.sends
  size_t num_sent = 0;
  std::deque<std::vector<Posted>> in_flight;  // the parts of each message
  size_t num_done = 0;
  RingShare ring;
};

struct Route {
  int size_class = 0;        // size class of this step's buffers
  std::int64_t largest = 0;  // message seen so far, in bytes
  std::int64_t capacity() const { return wire::class_bytes(size_class); }
};

// By kind, from, to and peer: a rank sends each of its replicas other parts of one gradient. Both ends have equal
// sizes.
using Routes = std::map<std::tuple<MessageKind, int, int, int>, Route>;

// An arrived message, until it is used.
struct Came {
  Posted message;  // undefined: not yet
  wire::Prologue prologue;
};

struct Transport::State {
  ProcessGroup group;
  const MessageTags tags;
  std::int64_t step = -1;
  const MessagePlan* plan = nullptr;
  std::vector<Incoming> incoming;  // by peer
  std::vector<Outgoing> outgoing;
  std::vector<int> position;  // position of each receive in its peer's order
  Routes routes_in, routes_out;
  std::vector<Route*> receive_routes, send_routes;  // by index in the plan
  std::vector<char> receive_by_ring, send_by_ring;  // likewise: whether the first part goes through the ring
  std::vector<Came> came;                           // by index in the plan
  std::int64_t grown = 0, sent = 0;
  bool told = false;
  InterruptibleWait waits;
  FailureStore failures;
  std::unique_ptr<DirectMessages> direct_messages;  // null: the group has no device
  std::unique_ptr<HostRings> rings;                 // null: all messages go through Gloo

  explicit State(ProcessGroup g);

  std::string name(int rank) const { return str("rank ", group.world_rank(rank)); }
  std::string me() const { return name(group.rank()); }
  c10d::Backend& backend() const { return *group.backend(); }
  // Null: no value of this step travels on its device.
  DirectMessages* direct() const { return plan != nullptr && !plan->order.empty() ? direct_messages.get() : nullptr; }

  void wait(const Posted& posted) {
    group.count_waiting(1);
    const auto ended = c10::make_scope_exit([this] { group.count_waiting(-1); });
    waits.wait(posted.work, group.timeout());
  }
  // Sends the first part of a message.
  void send_first(at::Tensor buffer, int index, std::vector<Posted>& parts);
  // Takes the messages of this step that have come through the peer's ring to their places, up to position `last`.
  void take_from_ring(int peer, size_t last);
  // Waits for the message at a place that comes through the ring.
  void come_by_ring(const PlannedMessage& message, size_t position, const std::string& action);
  Posted post_receive(at::Tensor buffer, int peer, int tag);
  Posted post_send(at::Tensor buffer, int peer, int tag);
  // Posts the receives that may be posted now that `needed` of the peer's messages have come.
  void post_ahead(int peer, size_t needed);
  // Waits for the oldest message under way.
  void finish_oldest(Outgoing& out);
  // Frees the buffers of sends that the peer has received.
  void release_sent(int peer, std::uint32_t received);

  // Waits for message `index` and compares its header with the plan.
  void come(int index, const std::string& action);
  // Returns whether come() would not wait for its first part.
  bool has_arrived(int index);

  // --- faults ---
  void check_usable() const;
  // Returns the prologue of the message in the place of `expected`. Throws if the sender has failed, or for another
  // message.
  wire::Prologue read_agreed(const at::Tensor& buffer, const PlannedMessage& expected, const std::string& action);
  // Receives the second part of a message that says it is too long for the first.
  Posted receive_second(const wire::Prologue& first, size_t position, const PlannedMessage& expected,
                        const std::string& action);
  // Tells the others, and throws.
  [[noreturn]] void raise_wrong(const PlannedMessage& message, const std::string& action, const std::string& what,
                                const std::string& remedy);
  [[noreturn]] void raise(const std::string& message, const std::string& remedy);
  std::optional<Cause> told_cause(const at::Tensor& buffer) const;
  // Finds out why `peer` does not respond, tells the others, and throws.
  [[noreturn]] void raise_lost(int peer, const std::string& waiting, const std::exception& e);
  // Marks the group as failed and tells every peer that waits for messages of this rank.
  void fail(int rank_at_fault, const std::string& cause, const std::string& own_text) noexcept;

 private:
  void make_direct(int index, const std::string& action);
  void keep_buffers();
  std::optional<Cause> find_told();
};

}  // namespace plumb
