// One entry of a pipeline's time table, and its text form.
//
// The text is torch's: stage, kind, microbatch. "2F0" is the forward of microbatch 0 through stage 2, "1I3" the
// backward of stage 1 with respect to its input, "0W3" with respect to its weights, "0B1" both at once, "1SEND_F2" the
// sending of stage 1's output to stage 2, "2RECV_F2" the receiving of it, "1SEND_B2" / "0RECV_B2" the same for
// gradients, "3UNSHARD", "3RESHARD", "3REDUCE_GRAD" without microbatch, "(0F5;7B2)OVERLAP_F_B" a forward and a backward
// run as one. A message between stages that are not neighbors names the other stage: "0SEND_F2>3" goes to stage 3,
// "3RECV_F2<0" comes from stage 0. "1WAIT_SEND_F2" and "3WAIT_REDUCE_GRAD" (torch 2.15 and newer) say where torch waits
// for what it has begun; a step of plumb's waits by itself. An idle tick is the empty text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace plumb {

enum class ActionKind : std::uint8_t {
  Idle,
  Forward,         // F
  BackwardInput,   // I
  BackwardWeight,  // W
  FullBackward,    // B: input and weight at once
  SendForward,     // SEND_F
  RecvForward,     // RECV_F
  SendBackward,    // SEND_B
  RecvBackward,    // RECV_B
  Unshard,
  Reshard,
  ReduceGrad,
  Overlap,           // OVERLAP_F_B: a forward and a backward (full or input) run as one
  WaitSendForward,   // WAIT_SEND_F
  WaitSendBackward,  // WAIT_SEND_B
  WaitReduceGrad,
};

// "F", "SEND_B", ...; empty for Idle.
std::string_view to_string(ActionKind kind);

struct Action {
  ActionKind kind = ActionKind::Idle;
  ActionKind second_kind = ActionKind::Idle;  // Overlap only: FullBackward or BackwardInput
  std::int32_t stage = -1;                    // Overlap: of the forward
  std::int32_t microbatch = -1;               // Overlap: of the forward; -1 where the kind has none
  // SEND/RECV: the stage at the other end. Overlap: the backward's stage. Otherwise -1.
  std::int32_t other_stage = -1;
  std::int32_t other_microbatch = -1;  // Overlap: the backward's

  bool operator==(const Action&) const = default;

  static Action idle() { return {}; }
  static Action forward(int stage, int microbatch) {
    return {ActionKind::Forward, ActionKind::Idle, stage, microbatch};
  }
  static Action input(int stage, int microbatch) {
    return {ActionKind::BackwardInput, ActionKind::Idle, stage, microbatch};
  }
  static Action weight(int stage, int microbatch) {
    return {ActionKind::BackwardWeight, ActionKind::Idle, stage, microbatch};
  }
  static Action backward(int stage, int microbatch) {
    return {ActionKind::FullBackward, ActionKind::Idle, stage, microbatch};
  }
  // Returns a message of `kind` at `stage`, whose other end is `other`.
  static Action message(ActionKind kind, int stage, int microbatch, int other) {
    return {kind, ActionKind::Idle, stage, microbatch, other};
  }
  // UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD.
  static Action of_stage(ActionKind kind, int stage) { return {kind, ActionKind::Idle, stage}; }
  static Action overlap(const Action& forward, const Action& backward) {
    return {ActionKind::Overlap, backward.kind, forward.stage, forward.microbatch, backward.stage, backward.microbatch};
  }

  bool is_idle() const { return kind == ActionKind::Idle; }
  // F, I, W, B or an overlapped pair.
  bool is_compute() const;
  bool is_send() const { return kind == ActionKind::SendForward || kind == ActionKind::SendBackward; }
  bool is_receive() const { return kind == ActionKind::RecvForward || kind == ActionKind::RecvBackward; }
  bool is_message() const { return is_send() || is_receive(); }
  // The halves of an overlapped pair; the action itself and idle otherwise.
  Action first_part() const { return kind == ActionKind::Overlap ? forward(stage, microbatch) : *this; }
  Action second_part() const {
    return kind == ActionKind::Overlap ? Action{second_kind, ActionKind::Idle, other_stage, other_microbatch} : idle();
  }
};

std::string to_string(const Action& action);

// Parses the text of an action; surrounding blanks are ignored, an empty text is idle. Throws Error(InvalidArgument)
// with the reason for text that is not exactly one action.
Action parse_action(std::string_view text);

}  // namespace plumb
