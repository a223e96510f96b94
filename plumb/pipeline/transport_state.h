// Inside of Transport, for transport.cpp, transport_faults.cpp and tests of what peers send.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "plumb/core/str.h"
#include "plumb/pipeline/group_state.h"
#include "plumb/pipeline/transport.h"

namespace plumb {

// Each transport of a group has a range of tags; its lower half is for messages, the upper one for second parts.
inline constexpr int kTransports = 512, kTagsPerTransport = 1 << 21, kFirstTag = 1 << 10;
inline constexpr int kFirstOfSecondParts = kTagsPerTransport / 2;
inline constexpr int kPositions = kFirstOfSecondParts / wire::kSizeClasses;

// Pinned where this process uses an accelerator: values are copied to and from it without a second copy on the host.
at::Tensor byte_buffer(std::int64_t bytes);

inline wire::Prologue read_prologue(const at::Tensor& buffer) {
  wire::Prologue p;
  std::memcpy(&p, buffer.const_data_ptr(), sizeof p);
  return p;
}

struct Posted {
  at::Tensor buffer;
  c10::intrusive_ptr<c10d::Work> work;
};

// Everything that goes one way between this rank and one peer.
struct Incoming {
  std::vector<int> order;      // indices into plan.receives
  std::vector<Posted> posted;  // by position in `order`
  size_t num_posted = 0;
  std::vector<char> done;      // by position: received and read
  std::uint32_t received = 0;  // all positions before this one are done
};

struct Outgoing {
  std::vector<int> order;  // indices into plan.sends
  size_t num_sent = 0;
  std::deque<std::vector<Posted>> in_flight;  // the parts of each message
  size_t num_done = 0;
};

struct Route {
  int size_class = 0;        // of the buffers of this step
  std::int64_t largest = 0;  // message seen so far, in bytes
  std::int64_t capacity() const { return wire::class_bytes(size_class); }
};

// By kind, from, to and peer: a rank sends each of its replicas other parts of one gradient. Both ends must have the
// same sizes.
using Routes = std::map<std::tuple<MessageKind, int, int, int>, Route>;

// A message that has come, until it is used.
struct Came {
  Posted message;  // undefined: not yet
  wire::Prologue prologue;
  bool posted = false;             // of its direct values, if it has any, and of all before them
  std::vector<at::Tensor> direct;  // and what fills them
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
};

struct DirectMessages;

// The known reason why a message did not come.
struct Cause {
  int rank = -1;  // the rank at fault
  std::string text;
};

struct Transport::State {
  ProcessGroup group;
  int first_tag = 0;
  std::int64_t step = -1;
  const MessagePlan* plan = nullptr;
  std::vector<Incoming> incoming;  // by peer
  std::vector<Outgoing> outgoing;
  std::vector<int> position;  // of each receive in its peer's order
  Routes routes_in, routes_out;
  std::vector<Route*> receive_routes, send_routes;  // by index in the plan
  std::vector<Came> came;                           // by index in the plan
  std::int64_t grown = 0, sent = 0;
  bool told = false;
  std::mutex lock;  // of the next three
  bool interrupted = false;
  c10::intrusive_ptr<c10d::Work> waited_for;
  bool on_device = false;  // it is the device backend's
  // Lost: another request would print c10d's warnings each time. Silent: lost because it did not respond, its rank is
  // stopped.
  enum class StoreState : uint8_t { Answers, Lost, Silent } store_state = StoreState::Answers;

  explicit State(ProcessGroup g);

  std::string name(int rank) const { return str("rank ", group.world_rank(rank)); }
  std::string me() const { return name(group.rank()); }
  c10d::Backend& backend() const { return *group.state().backend; }
  // By the class of the buffer, so that no message meets a buffer that is too short for it.
  int message_tag(int size_class) const;
  int second_part_tag(int size_class, int position) const;

  // `on_device`: has the device's current stream wait, where the backend can.
  void wait(const Posted& posted, bool on_device = false);
  Posted post_receive(at::Tensor buffer, int peer, int tag);
  Posted post_send(at::Tensor buffer, int peer, int tag);
  // Posts the receives that may be posted now that `needed` of the peer's messages have come.
  void post_ahead(int peer, size_t needed);
  // Waits for the oldest message under way.
  void finish_oldest(Outgoing& out);
  // The work of sends that the peer says it has received is done; their buffers may go.
  void release_sent(int peer, std::uint32_t received);

  // Waits for message `index` and holds its header against the plan.
  void come(int index, const std::string& action);
  // Returns whether come() would not wait for its first part.
  bool has_arrived(int index);

  // --- transport_direct.cpp: values that travel on their device ---
  // Whether there may be such in this step.
  bool direct() const;
  void begin_direct();
  // The values of message `index` are made.
  void submit(int index, const std::vector<MessageValue>& values);
  // Posts what can be posted without waiting. `until`: a message whose receive must be posted, waiting for headers; -1:
  // all messages.
  void post_direct(std::optional<int> until, const std::string& action);
  void make_direct(int index, const std::string& action);
  // Users of the values wait for them.
  void use_direct(const Came& c);
  // Throws if values that are under way got lost.
  void check_direct();
  void end_direct();
  void abort_direct() noexcept;

  // --- faults ---
  void check_usable() const;
  // Returns the prologue of the message in the place of `expected`. Throws if the sender has failed, or it is another
  // message.
  wire::Prologue read_agreed(const at::Tensor& buffer, const PlannedMessage& expected, const std::string& action);
  // Receives the second part of a message whose first part is too short for it.
  Posted receive_second(const wire::Prologue& first, size_t position, const PlannedMessage& expected,
                        const std::string& action);
  // Tells the others, and raises.
  [[noreturn]] void raise_wrong(const PlannedMessage& message, const std::string& action, const std::string& what,
                                const std::string& remedy);
  [[noreturn]] void raise(const std::string& message, const std::string& remedy);
  std::optional<Cause> told_cause(const at::Tensor& buffer) const;
  // Finds out why `peer` does not respond, tells the others, and throws.
  [[noreturn]] void raise_lost(int peer, const std::string& waiting, const std::exception& e);
  // Marks the group as failed and tells every peer that waits for messages of this rank.
  void fail(int rank_at_fault, const std::string& cause, const std::string& own_text) noexcept;

 private:
  bool is_ready(const std::vector<MessagePlan::End>& ends, bool wait, const std::string& action);
  void finish_first();
  void post_group(const std::vector<MessagePlan::End>& ends);
  void keep_buffers();
  std::string store_key(int rank) const { return str("plumb/failure/", rank); }
  template <class Ask>
  auto ask_store(Ask ask) -> std::optional<std::invoke_result_t<Ask, c10d::Store&>>;
  void store_late(int peer);
  int last_waited_for(int peer);
  std::optional<Cause> find_told() const;
  std::optional<Cause> find_stored(int suspect);

  struct DeleteDirect {
    void operator()(DirectMessages* d) const;
  };
  std::unique_ptr<DirectMessages, DeleteDirect> direct_;  // none: the group has no device
};

}  // namespace plumb
