// Errors of a step when a message does not come, or is not what was agreed.
#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <string_view>
#include <thread>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/transport_state.h"
#include "plumb/pipeline/within.h"

namespace plumb {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using wire::Content;
using wire::Prologue;

std::vector<std::uint8_t> as_bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string late_key(int rank) { return str("plumb/late/", rank); }

// Returns the rank at the begin of a text that a peer wrote; `otherwise` where it is none of a group of `size`.
int written_rank(std::string_view text, int size, int otherwise) {
  int rank = -1;
  std::from_chars(text.data(), text.data() + text.size(), rank);
  return rank >= 0 && rank < size ? rank : otherwise;
}

}  // namespace

std::string what_gloo_says(const std::exception& e) {
  std::string text = first_line(e.what());
  if (!text.empty() && text[0] == '[') {
    const auto end = text.find("] ");
    if (end != std::string::npos) text = text.substr(end + 2);
  }
  return text.substr(0, text.find(". This is typically"));
}

void Transport::State::check_usable() const {
  const auto& shared = group.state();
  if (!shared.failed) return;
  throw Error(ErrorKind::Communication, me() + " cannot go on: " + shared.failure, "",
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
  auto& shared = group.state();
  auto kept = std::make_shared<std::vector<Posted>>();
  for (auto& in : incoming) {
    for (auto& p : in.posted) {
      if (p.work) kept->push_back(p);
    }
  }
  for (auto& out : outgoing) {
    for (const auto& parts : out.in_flight) kept->insert(kept->end(), parts.begin(), parts.end());
  }
  shared.until_closed.push_back(kept);
}

// Returns an error message of any peer that has arrived, in a buffer posted for something else.
std::optional<Cause> Transport::State::find_told() const {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (const auto& in : incoming) {
    for (size_t i = in.received; i < in.num_posted; i++) {
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

// Returns nullopt once the store is lost: it goes with its rank, or does not respond because that rank is stopped, and
// most of its calls would wait for ever.
template <class Ask>
auto Transport::State::ask_store(Ask ask) -> std::optional<std::invoke_result_t<Ask, c10d::Store&>> {
  const auto& store = group.state().store;
  if (!store || store_state != StoreState::Answers) return std::nullopt;
  try {
    auto answer = within(std::min(group.timeout(), milliseconds(2000)), [store, ask] { return ask(*store); });
    if (!answer) store_state = StoreState::Silent;
    return answer;
  } catch (const std::exception&) {
    store_state = StoreState::Lost;
    return std::nullopt;
  }
}

std::optional<Cause> Transport::State::find_stored(int suspect) {
  std::vector<std::string> keys;
  for (int k = 0; k < group.size(); k++) {
    const int rank = (suspect + k) % group.size();
    if (rank != group.rank()) keys.push_back(store_key(rank));
  }
  const auto text = ask_store([keys](c10d::Store& store) {
    for (const auto& key : keys) {
      if (!store.check({key})) continue;
      const auto bytes = store.get(key);
      return std::string(bytes.begin(), bytes.end());
    }
    return std::string();
  });
  if (!text || text->empty()) return std::nullopt;
  return Cause{written_rank(*text, group.size(), suspect), text->substr(text->find(':') + 1)};
}

// Tells the others that this rank's wait for `peer` has timed out.
void Transport::State::store_late(int peer) {
  // Without the store the neighbor is named.
  ask_store([key = late_key(group.rank()), peer](c10d::Store& store) {
    store.set(key, as_bytes(std::to_string(peer)));
    return true;
  });
}

// Returns the rank that keeps all others waiting: the peer, or the rank that the peer has waited for until its
// time-out, and so on. If the store does not respond, that is world rank 0, which serves it.
int Transport::State::last_waited_for(int peer) {
  const int last = ask_store([peer, size = group.size()](c10d::Store& store) {
                     int rank = peer;
                     for (int k = 0; k < size && store.check({late_key(rank)}); k++) {
                       const auto bytes = store.get(late_key(rank));
                       rank = written_rank({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, size, rank);
                     }
                     return rank;
                   }).value_or(peer);
  if (store_state == StoreState::Silent && !group.state().env.launcher_serves_store) {
    for (int rank = 0; rank < group.size(); rank++) {
      if (group.world_rank(rank) == 0) return rank == group.rank() ? peer : rank;
    }
  }
  return last == group.rank() ? peer : last;
}

void Transport::State::raise_lost(int peer, const std::string& waiting, const std::exception& e) {
  {
    std::lock_guard<std::mutex> guard(lock);
    if (interrupted) throw Error(ErrorKind::Communication, "the step was given up");
  }
  const std::string text = what_gloo_says(e);
  bool late = text.find("imed out") != std::string::npos;
  const auto& env = group.state().env;
  if (late) store_late(peer);
  if (!late && group.world_rank(peer) == 0 && !env.launcher_serves_store && store_state == StoreState::Answers)
    store_state = StoreState::Lost;
  // The peer may have given its reason on another way, or be about to.
  const auto patience = late ? std::min(group.timeout() / 2, milliseconds(2000)) : milliseconds(700);
  const auto until = Clock::now() + patience;
  auto told_by = find_told();
  for (bool first = true; !told_by && (first || Clock::now() < until); first = false) {
    told_by = find_told();
    if (!told_by) told_by = find_stored(peer);
    if (!told_by) std::this_thread::sleep_for(milliseconds(10));
  }
  const bool found = told_by.has_value();
  Cause cause = told_by.value_or(Cause());
  if (!found) {
    cause.rank = last_waited_for(peer);
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
  auto& shared = group.state();
  if (told) return;
  told = true;
  shared.failed = true;
  shared.failure = own_text;
  try {  // and on the other way below
    ask_store([key = store_key(group.rank()), text = str(rank_at_fault, ":", cause)](c10d::Store& store) {
      store.set(key, as_bytes(text));
      return true;
    });
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
      sent.push_back(post_send(buffer, peer, message_tag(route.size_class)));
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
  abort_direct();
  try {
    shared.until_closed.push_back(std::make_shared<std::vector<Posted>>(std::move(sent)));
    keep_buffers();
  } catch (const std::exception&) {
  }
}

}  // namespace plumb
