// Values that travel on their device, through the backend that the group has for it.
//
// All ranks know one order of the step's messages (MessagePlan::order), and each posts its ends in that order. So the
// sends and receives of two ranks match without tags, and none waits for one that is posted behind another that waits
// for it, even where a rank has one stream for all messages and a send completes only when its receive is posted. The
// message's header brings in advance what a receive needs; a rank waits for a header no earlier than for the first
// value behind it in the order.
//
// Messages have a stream of their own. It waits for the stream that made a value by an event, and the stream that uses
// one waits for the backend's work, so the host waits for headers only. Tensors are held until their work is done.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/pipeline/transport/interruptible_wait.h"
#include "plumb/pipeline/transport/transport.h"

namespace plumb {

class DirectMessages {
 public:
  // The headers of messages, which come through the CPU's backend.
  struct Headers {
    std::function<bool(int index)> has_arrived;
    // Waits for the header of message `index`, and calls make().
    std::function<void(int index, const std::string& action)> receive;
    // Throws Error(Communication): the peer does not respond.
    std::function<void(int peer, const std::string& waiting, const std::exception& e)> raise_lost;
  };
  // The group has a device.
  DirectMessages(const ProcessGroup& group, InterruptibleWait& waits, Headers headers);
  ~DirectMessages();

  // As Transport::connect_device().
  static void connect(const ProcessGroup& group);
  // Ends all works with an error, whatever they wait for; buffers may go.
  static void abort(const ProcessGroup& group) noexcept;

  void begin_step(const MessagePlan& plan);
  // Sends the values of message `index` once its turn has come. Returns their bytes.
  std::int64_t send(int index, const std::vector<MessageValue>& values);
  // Makes memory for the values of message `index`, whose header is there.
  void make(int index, const at::Tensor& header);
  // Posts what can be posted without waiting. `until`: a message whose receive must be posted, waiting for headers; -1:
  // all messages.
  void post(std::optional<int> until, const std::string& action);
  // Returns the values of message `index`, which post() has posted. The current stream waits for them.
  std::vector<at::Tensor> take(int index);
  // Throws if values that are under way got lost.
  void check();
  void end_step();

 private:
  class Watch;
  // Values to send, and the event of their making.
  struct Made {
    std::vector<at::Tensor> values;
    std::optional<c10::Event> made;
  };
  struct Incoming {
    bool made = false;    // its header is there, and its values have memory
    bool posted = false;  // and so are those of all messages before it
    std::vector<at::Tensor> values;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;  // what fills them
  };
  struct Flight {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> held;
    int peer;
    MessageId id;
  };

  const PlannedMessage& message_of(const MessagePlan::End& end) const {
    return (end.sends ? plan_->sends : plan_->receives)[end.index];
  }
  bool is_ready(const std::vector<MessagePlan::End>& ends, bool wait, const std::string& action);
  void post_group(const std::vector<MessagePlan::End>& ends);
  void finish_first();
  void check_late() const;

  const ProcessGroup group_;
  InterruptibleWait& waits_;
  const Headers headers_;
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream stream_;
  const std::unique_ptr<Watch> watch_;
  const MessagePlan* plan_ = nullptr;
  std::vector<std::optional<Made>> sends_;  // values to send in this step, by index in the plan
  std::vector<Incoming> receives_;          // likewise
  size_t next_ = 0;                         // index of the next entry of plan_->order to post
  std::deque<Flight> in_flight_;
};

}  // namespace plumb
