#include "plumb/schedule/action.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "plumb/core/error.h"

namespace plumb {
namespace {

constexpr std::array<std::pair<ActionKind, std::string_view>, 15> kNames = {{
    {ActionKind::Forward, "F"},
    {ActionKind::BackwardInput, "I"},
    {ActionKind::BackwardWeight, "W"},
    {ActionKind::FullBackward, "B"},
    {ActionKind::SendForward, "SEND_F"},
    {ActionKind::RecvForward, "RECV_F"},
    {ActionKind::SendBackward, "SEND_B"},
    {ActionKind::RecvBackward, "RECV_B"},
    {ActionKind::Unshard, "UNSHARD"},
    {ActionKind::Reshard, "RESHARD"},
    {ActionKind::ReduceGrad, "REDUCE_GRAD"},
    {ActionKind::Overlap, "OVERLAP_F_B"},
    {ActionKind::WaitSendForward, "WAIT_SEND_F"},
    {ActionKind::WaitSendBackward, "WAIT_SEND_B"},
    {ActionKind::WaitReduceGrad, "WAIT_REDUCE_GRAD"},
}};

constexpr int kLargest = 1'000'000'000;  // far beyond any table, and safe to add to

bool needs_microbatch(ActionKind kind) {
  return kind != ActionKind::Unshard && kind != ActionKind::Reshard && kind != ActionKind::ReduceGrad &&
         kind != ActionKind::WaitReduceGrad;
}

// Returns the neighbor a message without a named other end means: values go up, gradients down.
int neighbor(ActionKind kind, int stage) {
  return kind == ActionKind::SendForward || kind == ActionKind::RecvBackward ? stage + 1 : stage - 1;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Returns the beginning of a text in quotes: a file that is no table may have cells of any length.
std::string quoted(std::string_view text) {
  constexpr std::size_t kMost = 60;
  return "'" + std::string(text.substr(0, kMost)) + (text.size() > kMost ? "...'" : "'");
}

[[noreturn]] void fail(std::string_view text, const std::string& why) {
  throw Error(ErrorKind::InvalidArgument, quoted(text) + " is not an action: " + why, "",
              "write stage, kind, microbatch, for example 2F0, 1SEND_F3 or (0F5;7B2)OVERLAP_F_B");
}

// Takes a number from the front of `rest`.
int take_number(std::string_view text, std::string_view& rest, const char* what) {
  int value = 0;
  if (rest.empty() || !is_digit(rest.front())) fail(text, std::string("the ") + what + " is missing");
  auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (error != std::errc() || value > kLargest) fail(text, std::string("the ") + what + " is too large");
  rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
  return value;
}

ActionKind kind_named(std::string_view text, std::string_view name) {
  for (const auto& [kind, known] : kNames) {
    if (known == name) return kind;
  }
  fail(text, name.empty() ? "the kind is missing" : quoted(name) + " is no kind of action");
}

std::string_view trim(std::string_view text) {
  auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

Action parse_overlap(std::string_view text) {
  auto close = text.find(')');
  if (close == std::string_view::npos) fail(text, "the bracket is not closed");
  if (text.substr(close + 1) != "OVERLAP_F_B") fail(text, "OVERLAP_F_B has to follow the bracket");
  std::string_view inside = text.substr(1, close - 1);
  auto semicolon = inside.find(';');
  if (semicolon == std::string_view::npos) fail(text, "the bracket has to hold two actions, parted by a semicolon");
  std::string_view halves[2] = {trim(inside.substr(0, semicolon)), trim(inside.substr(semicolon + 1))};
  for (auto half : halves) {
    if (half.empty() || half.front() == '(') fail(text, "the bracket has to hold two plain actions");
  }
  Action first = parse_action(halves[0]), second = parse_action(halves[1]);
  if (first.kind != ActionKind::Forward ||
      (second.kind != ActionKind::FullBackward && second.kind != ActionKind::BackwardInput)) {
    fail(text, "the bracket has to hold a forward, then a backward (B or I)");
  }
  return Action::overlap(first, second);
}

}  // namespace

std::string_view to_string(ActionKind kind) {
  for (const auto& [known, name] : kNames) {
    if (known == kind) return name;
  }
  return "";
}

bool Action::is_compute() const {
  return kind == ActionKind::Overlap || (kind >= ActionKind::Forward && kind <= ActionKind::FullBackward);
}

std::string to_string(const Action& action) {
  if (action.is_idle()) return "";
  if (action.kind == ActionKind::Overlap) {
    return "(" + to_string(action.first_part()) + ";" + to_string(action.second_part()) + ")OVERLAP_F_B";
  }
  std::string text = std::to_string(action.stage);
  text += to_string(action.kind);
  if (action.microbatch >= 0) text += std::to_string(action.microbatch);
  if (action.is_message() && action.other_stage != neighbor(action.kind, action.stage)) {
    text += action.is_send() ? '>' : '<';
    text += std::to_string(action.other_stage);
  }
  return text;
}

Action parse_action(std::string_view whole) {
  std::string_view text = trim(whole);
  if (text.empty()) return Action::idle();
  if (text.front() == '(') return parse_overlap(text);
  std::string_view rest = text;
  Action action;
  action.stage = take_number(text, rest, "stage");
  auto end_of_kind = std::ranges::find_if(rest, [](char c) { return is_digit(c) || c == '>' || c == '<'; });
  std::string_view name = rest.substr(0, static_cast<std::size_t>(end_of_kind - rest.begin()));
  action.kind = kind_named(text, name);
  if (action.kind == ActionKind::Overlap) fail(text, "OVERLAP_F_B needs its two actions in a bracket in front");
  rest.remove_prefix(name.size());
  if (needs_microbatch(action.kind)) action.microbatch = take_number(text, rest, "microbatch");
  if (action.is_message()) {
    action.other_stage = neighbor(action.kind, action.stage);
    if (!rest.empty() && rest.front() == (action.is_send() ? '>' : '<')) {
      rest.remove_prefix(1);
      action.other_stage = take_number(text, rest, "other stage");
    }
    if (action.other_stage < 0) fail(text, "stage 0 has no stage before it");
  }
  if (!rest.empty()) fail(text, quoted(rest) + " does not belong there");
  return action;
}

}  // namespace plumb
