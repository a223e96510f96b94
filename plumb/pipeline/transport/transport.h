// Messages of one step between the ranks of a pipeline.
//
// Both ends know beforehand which messages a step has and in which order each rank sends them to each other; sizes they
// learn as they go. For every route (kind, from stage, to stage) the ends keep a capacity: that of the largest message
// so far. Receives are posted ahead at that capacity. A larger message goes as a header that says "grow to n" and a
// second part that the receiver posts n bytes for; from the next step on it fits. So shapes and types may change with
// every message, and the first step needs no special round.
//
// A message that is longer than the buffer posted for it would end the process, inside Gloo. So the tag of a message
// contains the buffer's length (one of a few hundred sizes). Ranks that disagree about the next message's length wait
// for each other until the time-out instead.
//
// A message is checked against what was agreed before it is used: its checksums, which message of which step it is,
// whether that step has a backward, and the values that the caller of receive() expects.
//
// Messages of at most HostRings::kLongest between ranks of one host go through memory that they share, where both ends
// could open it (host_rings.h): which ones follows from the plan and the capacities. All others go through Gloo.
//
// If the group has a backend for a device, only headers and values of the CPU go this way; the others follow through
// that backend (direct_messages.h), where the plan has an order for them.
//
// Every fault becomes Error(Communication) on every rank that notices: which rank is at fault, its own text, and which
// action waited for which message. After a fault the process group takes no more messages.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/pipeline/transport/message.h"
#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

struct PlannedMessage {
  MessageId id;
  int peer = 0;  // the rank at the other end
};

// The messages of this rank in a step. `receives`: for each peer in the order in which that peer sends; the order among
// peers is free. `sends`: likewise, and send() must be called in this order for each peer.
struct MessagePlan {
  std::vector<PlannedMessage> sends, receives;
  bool has_backward = false;  // must be equal at both ends of a message
  // For values that travel on their device: all of this rank's messages in an order that all ranks follow. Messages
  // that meet, both between the same two ranks, are one element on both. Empty: all values are staged through the CPU.
  struct End {
    bool sends;
    int index;  // in `sends` or `receives`
  };
  std::vector<std::vector<End>> order;
};

// Returns a text as a message's tensor.
at::Tensor text_tensor(const std::string& text);
// Returns the text that a message begins with; nullopt for other messages.
std::optional<std::string> text_of(const std::vector<MessageValue>& message);

class Transport {
 public:
  explicit Transport(ProcessGroup group);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  const ProcessGroup& group() const;

  // Exchanges a text with every other rank, between steps; returns theirs, by rank. `action` as for receive().
  std::vector<std::string> exchange(const std::string& own, const std::string& action = "the start");

  // Connects the ranks of this host by memory that they share, for which all ranks must call it at once. Messages of
  // at most HostRings::kLongest then go through it. `may_look`: whether receivers may look for them before they sleep.
  void connect_host(bool may_look);

  // Connects the device's backend, for which all ranks must call it at once. Before the first step whose values travel
  // there. Throws Error(Communication) after the time-out.
  void connect_device();

  // Begins a step and posts its first receives. The plan must live until end_step().
  void begin_step(const MessagePlan& plan);
  // Sends message `index` of the plan: copies the given values and returns. `sizes`: packed ones of the microbatch.
  void send(int index, const std::vector<MessageValue>& given, at::IntArrayRef sizes = {});
  // Waits for message `index` of the plan. `action` is what needs it, for the error's text ("1F3"). Throws
  // Error(Communication) that names both ranks, the message and what is wrong with it if its values are not `agreed`.
  // `codes`: the format of values that come as codes.
  wire::Message receive(int index, const std::string& action, const AgreedValues& agreed = std::nullopt,
                        const FPFormat* codes = nullptr);
  // Waits until everything sent has left.
  void end_step();

  // Called from another thread: every wait of this one, now or later, becomes an error. Only tell_failure() may follow.
  void interrupt() noexcept;
  // Called after a failure within the step: throws Error(Communication) if values of a message never came whole. Work
  // on a device continues with what such a message left in memory, and may have failed for that.
  void check_values();
  // Called after this rank has failed: tells the peers that still wait for messages of this rank, so that they name
  // `reason`.
  void tell_failure(const std::string& reason) noexcept;

  // Returns how many messages did not fit the buffer agreed on, so far.
  std::int64_t grown() const;
  // Returns the bytes of the messages that were sent so far.
  std::int64_t sent() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace plumb
