// Errors of a step when a message does not come, or is not what was agreed.
#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/transport/transport_state.h"

namespace plumb {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using wire::Content;
using wire::Prologue;

}  // namespace

void Transport::State::check_usable() const {
  const std::string* failure = group.failure();
  if (failure == nullptr) return;
  throw Error(ErrorKind::Communication, me() + " cannot go on: " + *failure, "",
              "make a new process group; after a fault this one takes no more messages");
}

Prologue Transport::State::read_agreed(const at::Tensor& buffer, const PlannedMessage& expected,
                                       const std::string& action) {
  const Prologue p = read_prologue(buffer);
  if (const auto cause = told_cause(buffer)) {
    const std::string text = me() + ", " + action + " waiting for " + to_string(expected.id) + ": " +
                             name(cause->rank) + " failed: " + cause->text;
    fail(cause->rank, cause->text, text);
    throw Error(ErrorKind::Communication, text, "", "look at what " + name(cause->rank) + " printed");
  }
  std::string wrong;
  if (p.magic != wire::kMagic) {
    wrong = "something that is not plumb's, or of another version";
  } else if (!wire::intact(p)) {
    wrong = "a message whose header is damaged";
  } else if (p.step != step || p.kind != expected.id.kind || p.from != expected.id.from || p.to != expected.id.to ||
             p.microbatch != expected.id.microbatch) {
    wrong = str(to_string(MessageId{p.kind, p.from, p.to, p.microbatch}), " of step ", p.step);
  } else if (p.received > outgoing[expected.peer].num_sent) {
    wrong = str("the answer to ", p.received, " messages, where ", outgoing[expected.peer].num_sent, " were sent");
  }
  if (wrong.empty() && (p.has_backward != 0) != plan->has_backward) {
    raise_wrong(expected, action,
                plan->has_backward ? "it is of a step without a backward, and this rank's has one"
                                   : "it is of a step with a backward, and this rank's has none",
                "call step() on every rank or eval() on every rank, in Python with a loss function on every rank: a "
                "schedule without one goes forward only");
  }
  if (wrong.empty()) return p;
  raise(str(me(), " at ", action, " expected ", to_string(expected.id), " of step ", step, " from ",
            name(expected.peer), " and got ", wrong),
        "make the same calls with the same schedule and the same version of plumb on every rank");
}

void Transport::State::raise_wrong(const PlannedMessage& message, const std::string& action, const std::string& what,
                                   const std::string& remedy) {
  raise(str(me(), " at ", action, " cannot use ", to_string(message.id), " of step ", step, " from ",
            name(message.peer), ": ", what),
        remedy);
}

void Transport::State::raise(const std::string& message, const std::string& remedy) {
  fail(group.rank(), message, message);
  throw Error(ErrorKind::Communication, message, "", remedy);
}

// Gloo's threads may still write into these.
void Transport::State::keep_buffers() {
  auto kept = std::make_shared<std::vector<Posted>>();
  for (auto& in : incoming) {
    for (auto& p : in.posted) {
      if (p.work) kept->push_back(p);
    }
  }
  for (auto& out : outgoing) {
    for (const auto& parts : out.in_flight) kept->insert(kept->end(), parts.begin(), parts.end());
  }
  group.keep_until_closed(kept);
}

// Returns an error message of any peer that has arrived, in a buffer posted for something else.
std::optional<Cause> Transport::State::find_told() {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (int peer = 0; peer < group.size(); peer++) {
    auto& in = incoming[peer];
    try {
      take_from_ring(peer, in.order.size());
    } catch (const Error&) {
      // It holds no messages.
    }
    for (size_t i = in.received; i < in.posted.size(); i++) {
      if (!in.posted[i].buffer.defined()) continue;
      if (auto told = told_cause(in.posted[i].buffer)) return told;
    }
  }
  return std::nullopt;
}

// Nothing if the buffer holds no error, or not the whole of it yet.
std::optional<Cause> Transport::State::told_cause(const at::Tensor& buffer) const {
  const Prologue p = read_prologue(buffer);
  const auto room = buffer.numel() - static_cast<std::int64_t>(sizeof p);
  if (!wire::intact(p) || p.content != Content::Error || p.total_bytes < 0 || p.total_bytes > room) return std::nullopt;
  const char* text = static_cast<const char*>(buffer.const_data_ptr()) + sizeof p;
  if (crc32(text, p.total_bytes) != p.body_sum || p.microbatch < 0 || p.microbatch >= group.size()) return std::nullopt;
  return Cause{p.microbatch, std::string(text, p.total_bytes)};
}

void Transport::State::raise_lost(int peer, const std::string& waiting, const std::exception& e) {
  if (waits.interrupted()) throw Error(ErrorKind::Communication, "the step was given up");
  const std::string text = what_gloo_says(e);
  bool late = text.find("imed out") != std::string::npos;
  late ? failures.publish_late(peer) : failures.note_closed(peer);
  // The peer may have given its reason on another way, or be about to.
  const auto patience = late ? std::min(group.timeout() / 2, milliseconds(2000)) : milliseconds(700);
  const auto until = Clock::now() + patience;
  auto told_by = find_told();
  for (bool first = true; !told_by && (first || Clock::now() < until); first = false) {
    told_by = find_told();
    if (!told_by) told_by = failures.find(peer);
    if (!told_by) std::this_thread::sleep_for(milliseconds(10));
  }
  const bool found = told_by.has_value();
  Cause cause = told_by.value_or(Cause());
  if (!found) {
    cause.rank = failures.last_waited_for(peer);
    // A wait that times out closes all of that rank's connections: the peer is gone because it waited for another.
    late |= cause.rank != peer;
    cause.text = late ? str("no answer within ", group.timeout().count(), " ms") : "it is gone (" + text + ")";
  }
  const std::string message =
      me() + ", " + waiting + ": " + name(cause.rank) + (found ? " failed: " : ": ") + cause.text;
  fail(cause.rank, found ? cause.text : cause.text + ", noticed by " + me() + " " + waiting, message);
  throw Error(ErrorKind::Communication, message, "",
              late && !found ? "look at " + name(cause.rank) +
                                   " (stopped? overloaded? in another call, such as eval() for step()?), or give a "
                                   "longer time-out"
                             : "look at what " + name(cause.rank) + " printed");
}

void Transport::State::fail(int rank_at_fault, const std::string& cause, const std::string& own_text) noexcept {
  if (told) return;
  told = true;
  group.set_failure(own_text);
  try {  // and on the other way below
    failures.publish({rank_at_fault, cause});
  } catch (const std::exception&) {
  }
  std::vector<Posted> sent;
  for (int peer = 0; peer < group.size(); peer++) {
    auto& out = outgoing[peer];
    if (plan == nullptr || out.num_sent >= out.order.size() || peer == rank_at_fault) continue;
    try {
      const Route& route = *send_routes[out.order[out.num_sent]];
      const auto room = wire::class_bytes(0) - static_cast<std::int64_t>(sizeof(Prologue));
      Prologue p;
      p.content = Content::Error;
      p.microbatch = rank_at_fault;
      p.step = step;
      p.total_bytes = std::min<std::int64_t>(room, static_cast<std::int64_t>(cause.size()));
      p.body_sum = crc32(cause.data(), p.total_bytes);
      wire::seal(p);
      auto buffer = at::zeros({wire::class_bytes(0)}, at::kByte);
      std::memcpy(buffer.data_ptr(), &p, sizeof p);
      std::memcpy(static_cast<char*>(buffer.data_ptr()) + sizeof p, cause.data(), p.total_bytes);
      if (send_by_ring[out.order[out.num_sent]]) {
        rings->try_send(peer, buffer);
      } else {
        sent.push_back(post_send(buffer, peer, tags.message(route.size_class)));
      }
    } catch (const std::exception&) {
      // That peer is gone as well.
    }
  }
  const auto until = Clock::now() + milliseconds(500);
  for (auto& p : sent) {
    try {
      p.work->wait(std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(until - Clock::now())));
    } catch (const std::exception&) {
      // It does not take messages any more.
    }
  }
  DirectMessages::abort(group);
  try {
    group.keep_until_closed(std::make_shared<std::vector<Posted>>(std::move(sent)));
    keep_buffers();
  } catch (const std::exception&) {
  }
}

}  // namespace plumb
