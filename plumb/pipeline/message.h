// One message between stages: a header and the values' bytes behind it, in one buffer.
//
//   prologue (64 bytes) | the microbatch's sizes | an entry per value: dtype, flags, sizes, strides | values, each at a
//   multiple of 64 bytes
//
// The microbatch's sizes are packed ModelSizes: numbers, of which this file knows no more.
//
// Received values are tensors over the received buffer itself. A message that is not what was agreed (another step,
// stage or microbatch, or not plumb's at all) is an error that says so, never read as data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace plumb {

enum class MessageKind : std::uint8_t {
  Activation = 1,     // a stage's outputs on their way to a later stage
  Gradient = 2,       // gradients on their way back
  TiedGradients = 3,  // gradients of parameters that several ranks hold; stages are ranks here
  Replicas = 5,       // gradients between replicas of a stage; `from` is a part of them, `to` 1 on the way to be summed
  Exchange = 4,       // what ranks tell each other before the first step; stages are ranks here
};

// Which message: the same on both sides.
struct MessageId {
  MessageKind kind = MessageKind::Activation;
  std::int32_t from = 0, to = 0;  // stages (ranks for TiedGradients and Exchange)
  std::int32_t microbatch = -1;
  bool operator==(const MessageId&) const = default;
};

// "0SEND_F3 (output of stage 0 for stage 1, microbatch 3)"
std::string to_string(const MessageId& id);

// A tensor on its way. Undefined: there is no value (no gradient).
struct MessageValue {
  at::Tensor tensor;
  bool requires_grad = false;
};

namespace wire {

inline constexpr std::uint32_t kMagic = 0x31424c50;  // "PLB1"
inline constexpr std::int64_t kAlignment = 64;
// Every buffer posted has room for this much, so that an error's text always fits.
inline constexpr std::int64_t kLeastCapacity = 1024;

enum class Content : std::uint8_t {
  Nothing = 0,
  Values = 1,  // the message itself
  Grow = 2,    // too large for the buffer agreed on: `total_bytes` follow in a message of their own
  Error = 3,   // the sender has failed; `microbatch` is the rank at fault, the text follows
};

struct Prologue {
  std::uint32_t magic = kMagic;
  Content content = Content::Nothing;
  MessageKind kind = MessageKind::Activation;
  std::uint16_t num_values = 0;
  std::int64_t step = 0;
  std::int32_t from = 0, to = 0, microbatch = 0;
  std::uint32_t received = 0;  // the sender has this many of the receiver's messages of this step, in order
  std::int64_t total_bytes = 0;
  std::int64_t capacity = 0;  // of the buffer the sender believes posted
  std::uint32_t num_sizes = 0;
  std::uint8_t unused[12] = {};
};
static_assert(sizeof(Prologue) == 64);

// Bytes of the whole message.
std::int64_t message_bytes(const std::vector<MessageValue>& values, size_t num_sizes = 0);
// Writes the message to `to`, which has room. `prologue` is completed with num_values, total_bytes and content. Raises
// Error(InvalidArgument) for tensors that have no plain memory (sparse, quantised), naming the value.
void write_message(char* to, Prologue prologue, const std::vector<MessageValue>& values, at::IntArrayRef sizes = {});
void check_sendable(const MessageId& id, const std::vector<MessageValue>& values);
// The values of a message in `buffer` (a byte tensor), which stays alive as long as they do. Raises
// Error(Communication) if its parts do not fit into `bytes`.
std::vector<MessageValue> read_values(const at::Tensor& buffer, std::int64_t bytes);
// The microbatch's sizes, of a message whose values were read.
std::vector<std::int64_t> read_sizes(const at::Tensor& buffer);

}  // namespace wire
}  // namespace plumb
