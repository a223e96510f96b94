// One message between stages: a header and the values' bytes behind it, in one buffer.
//
//   prologue (64 bytes) | the microbatch's sizes | an entry per value: dtype, flags, sizes, strides | values or their
//   codes, each at a multiple of 64 bytes
//
// The prologue has a checksum of itself and one of all that follows it. The microbatch's sizes are packed ModelSizes:
// numbers, of which this file knows no more.
//
// Direct values, those on a device whose group has a backend for it, are in the table only: their bytes go through that
// backend, device to device, each a message of its own behind this one and without a checksum.
//
// Received values are tensors over the received buffer itself, direct ones over what the backend wrote. A part of a
// tensor (a chunk of columns) travels without its gaps and gets them again, in memory of its own. A message that is not
// what was agreed (another step, stage or microbatch, other values, damaged, or not plumb's at all) is an error that
// says so, never read as data.
#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plumb/numerics/format.h"

namespace plumb {

enum class MessageKind : std::uint8_t {
  Activation = 1,     // a stage's outputs on their way to a later stage
  Gradient = 2,       // gradients on their way back
  TiedGradients = 3,  // gradients of parameters that several ranks hold; stages are ranks here
  Replicas = 5,       // gradients between replicas of a stage; `from` is a part of them, `to` 1 on the way to be summed
  Exchange = 4,       // what ranks tell each other before the first step; stages are ranks here
};

// A message's identity: the same on both sides.
struct MessageId {
  MessageKind kind = MessageKind::Activation;
  std::int32_t from = 0, to = 0;  // stages (ranks for TiedGradients and Exchange)
  std::int32_t microbatch = -1;
  auto operator<=>(const MessageId&) const = default;
};

// "0SEND_F3 (output of stage 0 for stage 1, microbatch 3)"
std::string to_string(const MessageId& id);

// A tensor on its way. Undefined: there is no value (no gradient).
struct MessageValue {
  at::Tensor tensor;
  bool requires_grad = false;  // requires_grad of an activation at its sender; false for other kinds
  // It travels as codes of this format, a byte each, and arrives rounded, in its own dtype.
  const FPFormat* codes = nullptr;
};

// A value's metadata that both ends know before it comes.
struct AgreedValue {
  enum class Comes { Never, Maybe, Always };
  Comes comes = Comes::Maybe;
  std::optional<at::ScalarType> dtype;             // nothing: any
  std::optional<std::vector<std::int64_t>> sizes;  // nothing: any
  const FPFormat* codes = nullptr;                 // format of a floating-point value's codes, as in MessageValue
};
// One for each value of a message. Nothing: as many come as the sender likes.
using AgreedValues = std::optional<std::vector<AgreedValue>>;

// Returns a parameter's gradient from another rank that holds it. `own`: this rank's, undefined if there is none.
AgreedValue agreed_gradient(const at::Tensor& parameter, const at::Tensor& own);

namespace wire {

inline constexpr std::uint32_t kMagic = 0x34424c50;  // "PLB4"
inline constexpr std::int64_t kAlignment = 64;

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
  std::uint16_t has_backward = 0;  // 1: the sender's step has one
  std::int64_t step = 0;
  std::int32_t from = 0, to = 0, microbatch = 0;
  std::uint32_t received = 0;  // the sender has this many of the receiver's messages of this step, in order
  std::int64_t total_bytes = 0;
  std::uint32_t num_values = 0, num_sizes = 0;
  std::uint32_t body_sum = 0;  // CRC-32 of what follows the prologue
  std::uint32_t unused[2] = {};
  std::uint32_t sum = 0;  // CRC-32 of the prologue before it
};
static_assert(sizeof(Prologue) == 64);

// Puts the prologue's own checksum in.
void seal(Prologue& prologue);
// Returns whether it is a prologue of plumb's, of this version, and undamaged.
bool intact(const Prologue& prologue);

// Buffers have one of 512 sizes, each about 6 % above the one before: 1 KiB (class 0), so that an error's text always
// fits, to some 4 TiB.
std::int64_t class_bytes(int size_class);
// Returns the least class that holds `bytes`; 512: none does.
int size_class(std::int64_t bytes);
inline constexpr int kSizeClasses = 512;

// Returns the bytes of the whole message. `direct`: the kind of device whose values are direct.
using DirectDevice = std::optional<c10::DeviceType>;
std::int64_t message_bytes(const std::vector<MessageValue>& values, size_t num_sizes = 0, DirectDevice direct = {});
// Writes the message to `to`, which has room. `prologue` is completed and sealed. The values have passed
// sendable().
void write_message(char* to, Prologue prologue, const std::vector<MessageValue>& values, at::IntArrayRef sizes = {},
                   DirectDevice direct = {});
// Returns the tensors that follow the message, one tensor a direct value, on `device`: dense, values or their codes.
std::vector<at::Tensor> direct_values(const std::vector<MessageValue>& values, c10::Device device);
// Makes tensors on `device` for the direct values of the message in `buffer`. Throws as read_message() does, and what
// the device throws if it has no room.
std::vector<at::Tensor> make_direct_values(const at::Tensor& buffer, c10::Device device);
// Returns the bytes of a dense tensor, in the order in which they lie in memory: what a backend sends or receives.
at::Tensor bytes_of(const at::Tensor& dense);
// Returns the values in plain memory: copies of those that torch's collectives have not finished yet. Throws
// Error(Unsupported) naming the value, for a tensor without such memory (sparse, quantized, nested, meta, DTensor).
std::vector<MessageValue> sendable(const MessageId& id, std::vector<MessageValue> values);

struct Message {
  std::vector<MessageValue> values;
  std::vector<std::int64_t> sizes;  // packed ModelSizes of the microbatch
};
// Returns the message in `buffer` (a byte tensor), which stays alive as long as the values do. Throws
// Error(Communication) with the reason: damage, values that are cut off or of no plain dtype, strides that leave their
// memory or overlap, a gradient that asks for a gradient, codes without a format or of a value that has none, values
// other than `agreed`. `codes`: the format of values that come as codes. `direct`: the direct values, as many as the
// message says.
Message read_message(const at::Tensor& buffer, const AgreedValues& agreed = std::nullopt,
                     const FPFormat* codes = nullptr, const std::vector<at::Tensor>& direct = {});

}  // namespace wire
}  // namespace plumb
