#include "plumb/pipeline/transport.h"

#include <ATen/ATen.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/pipeline/describe.h"
#include "plumb/pipeline/group_state.h"

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Work = c10::intrusive_ptr<c10d::Work>;
using wire::Content;
using wire::Prologue;

// Receives posted ahead per peer: at least the first number, more while they are small.
constexpr int kLeastAhead = 4, kMostAhead = 64;
constexpr std::int64_t kBytesAhead = 8 << 20;

// Tags: each transport of a group has a range; the first is for messages, the others for second parts.
constexpr int kTagsPerTransport = 1 << 20, kFirstTag = 1 << 10;

at::Tensor byte_buffer(std::int64_t bytes) { return at::empty({bytes}, at::kByte); }

std::vector<std::uint8_t> as_bytes(const std::string& text) { return {text.begin(), text.end()}; }

Prologue read_prologue(const at::Tensor& buffer) {
  Prologue p;
  std::memcpy(&p, buffer.const_data_ptr(), sizeof p);
  return p;
}

struct Posted {
  at::Tensor buffer;
  Work work;
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
  struct Sent {
    std::vector<Posted> parts;
  };
  std::deque<Sent> in_flight;
  size_t num_done = 0;
};

struct Route {
  std::int64_t capacity = wire::kLeastCapacity;  // in force in this step
  std::int64_t largest = wire::kLeastCapacity;   // seen so far
};

// What is known about why a message did not come.
struct Cause {
  int rank = -1;  // the rank at fault
  std::string text;
  bool certain = false;  // the rank said so itself
};

}  // namespace

struct Transport::State {
  ProcessGroup group;
  int first_tag = 0;
  std::int64_t step = -1;
  const MessagePlan* plan = nullptr;
  std::vector<Incoming> incoming;  // by peer
  std::vector<Outgoing> outgoing;
  std::vector<int> position;  // of each receive in its peer's order
  std::map<std::tuple<MessageKind, int, int>, Route> routes_in, routes_out;
  std::vector<Route*> receive_routes, send_routes;  // by index in the plan
  std::int64_t grown = 0;
  bool told = false;

  explicit State(ProcessGroup g) : group(std::move(g)) {
    auto& shared = group.state();
    first_tag = kFirstTag + shared.tag_ranges++ % 1024 * kTagsPerTransport;
    incoming.resize(shared.size);
    outgoing.resize(shared.size);
  }

  std::string me() const { return "rank " + std::to_string(group.rank()); }
  c10d::Backend& backend() const { return *group.state().backend; }

  int second_part_tag(int position) const { return first_tag + 1 + position % (kTagsPerTransport - 1); }

  Posted post_receive(std::int64_t bytes, int peer, int tag) {
    Posted p;
    p.buffer = byte_buffer(bytes);
    std::memset(p.buffer.data_ptr(), 0, sizeof(Prologue));
    std::vector<at::Tensor> tensors{p.buffer};
    p.work = backend().recv(tensors, peer, tag);
    return p;
  }

  Posted post_send(at::Tensor buffer, int peer, int tag) {
    Posted p;
    p.buffer = std::move(buffer);
    std::vector<at::Tensor> tensors{p.buffer};
    p.work = backend().send(tensors, peer, tag);
    return p;
  }

  void post_ahead(int peer, size_t needed) {
    auto& in = incoming[peer];
    std::int64_t bytes = 0;
    for (size_t i = in.received; i < in.num_posted; i++) bytes += receive_routes[in.order[i]]->capacity;
    while (in.num_posted < in.order.size()) {
      const size_t ahead = in.num_posted - std::min(in.num_posted, needed);
      const auto capacity = receive_routes[in.order[in.num_posted]]->capacity;
      if (in.num_posted > needed && (ahead >= kMostAhead || (ahead >= kLeastAhead && bytes + capacity > kBytesAhead))) {
        break;
      }
      bytes += capacity;
      in.posted[in.num_posted] = post_receive(capacity, peer, first_tag);
      in.num_posted++;
    }
  }

  // The work of sends that the peer says it has received is done; their buffers may go.
  void release_sent(int peer, std::uint32_t received) {
    auto& out = outgoing[peer];
    while (out.num_done < received && !out.in_flight.empty()) {
      for (auto& part : out.in_flight.front().parts) part.work->wait(group.timeout());
      out.in_flight.pop_front();
      out.num_done++;
    }
  }

  void check_usable() const {
    const auto& shared = group.state();
    if (!shared.failed) return;
    throw Error(ErrorKind::Communication, me() + " cannot go on: " + shared.failure, "",
                "make a new process group; after a fault this one takes no more messages");
  }

  // Gloo's threads may still write into these.
  void keep_buffers() {
    auto& shared = group.state();
    auto kept = std::make_shared<std::vector<Posted>>();
    for (auto& in : incoming) {
      for (auto& p : in.posted) {
        if (p.work) kept->push_back(p);
      }
    }
    for (auto& out : outgoing) {
      for (auto& s : out.in_flight) {
        for (auto& p : s.parts) kept->push_back(p);
      }
    }
    shared.until_closed.push_back(kept);
  }

  std::string store_key(int rank) const { return "plumb/failure/" + std::to_string(rank); }

  // An error message of any peer that has arrived, in a buffer posted for something else.
  bool find_told(Cause& cause) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    for (const auto& in : incoming) {
      for (size_t i = in.received; i < in.num_posted; i++) {
        if (!in.posted[i].buffer.defined()) continue;
        const auto p = read_prologue(in.posted[i].buffer);
        if (p.magic == wire::kMagic && p.content == Content::Error) {
          cause = told_cause(in.posted[i].buffer, p);
          return true;
        }
      }
    }
    return false;
  }

  Cause told_cause(const at::Tensor& buffer, const Prologue& p) const {
    const auto room = buffer.numel() - static_cast<std::int64_t>(sizeof p);
    const auto length = std::clamp<std::int64_t>(p.total_bytes, 0, room);
    return {p.microbatch, std::string(static_cast<const char*>(buffer.const_data_ptr()) + sizeof p, length), true};
  }

  bool find_stored(Cause& cause, int suspect) const {
    const auto& store = group.state().store;
    if (!store) return false;
    try {
      for (int k = 0; k < group.size(); k++) {
        const int rank = (suspect + k) % group.size();
        if (rank == group.rank() || !store->check({store_key(rank)})) continue;
        const auto bytes = store->get(store_key(rank));
        const std::string text(bytes.begin(), bytes.end());
        const auto colon = text.find(':');
        cause = {std::atoi(text.c_str()), text.substr(colon + 1), true};
        return true;
      }
    } catch (const std::exception&) {
      // The store went with its rank; what is known without it must do.
    }
    return false;
  }

  static std::string late_key(int rank) { return "plumb/late/" + std::to_string(rank); }

  // Tells the others that this rank has waited for `peer` in vain.
  void store_late(int peer) const noexcept {
    try {
      if (const auto& store = group.state().store) store->set(late_key(group.rank()), as_bytes(std::to_string(peer)));
    } catch (const std::exception&) {
      // Without the store the neighbour is named.
    }
  }

  // Who keeps everybody waiting: the peer, or whom that one has waited for in vain, and so on.
  int last_waited_for(int peer) const {
    const auto& store = group.state().store;
    int rank = peer;
    try {
      for (int k = 0; store && k < group.size() && store->check({late_key(rank)}); k++) {
        const auto bytes = store->get(late_key(rank));
        rank = std::atoi(std::string(bytes.begin(), bytes.end()).c_str());
      }
    } catch (const std::exception&) {
      return peer;
    }
    return rank == group.rank() ? peer : rank;
  }

  [[noreturn]] void raise_lost(int peer, const std::string& waiting, const std::exception& e) {
    const std::string text = first_line(e.what());
    const bool late = text.find("imed out") != std::string::npos;
    if (late) store_late(peer);
    Cause cause;
    // The peer may have told its reason on another way, or be about to.
    const auto patience = late ? std::min(group.timeout() / 2, milliseconds(2000)) : milliseconds(700);
    const auto until = Clock::now() + patience;
    bool found = find_told(cause);
    for (bool first = true; !found && (first || Clock::now() < until); first = false) {
      found = find_told(cause) || find_stored(cause, peer);
      if (!found) std::this_thread::sleep_for(milliseconds(10));
    }
    if (!found) {
      cause.rank = late ? last_waited_for(peer) : peer;
      cause.text =
          late ? "no answer within " + std::to_string(group.timeout().count()) + " ms" : "it is gone (" + text + ")";
    }
    const std::string message =
        me() + ", " + waiting + ": rank " + std::to_string(cause.rank) + (found ? " failed: " : ": ") + cause.text;
    fail(cause.rank, found ? cause.text : cause.text + ", noticed by " + me() + " " + waiting, message);
    throw Error(ErrorKind::Communication, message, "",
                late && !found ? "look at rank " + std::to_string(cause.rank) +
                                     " (stopped? overloaded?), or give a longer time-out"
                               : "look at what rank " + std::to_string(cause.rank) + " printed");
  }

  // Marks the group as failed and tells every peer that waits for messages of this rank.
  void fail(int rank_at_fault, const std::string& cause, const std::string& own_text) noexcept {
    auto& shared = group.state();
    if (told) return;
    told = true;
    shared.failed = true;
    shared.failure = own_text;
    try {
      if (shared.store) {
        const std::string text = std::to_string(rank_at_fault) + ":" + cause;
        shared.store->set(store_key(group.rank()), as_bytes(text));
      }
    } catch (const std::exception&) {
      // Told on the other way below.
    }
    std::vector<Posted> sent;
    for (int peer = 0; peer < group.size(); peer++) {
      auto& out = outgoing[peer];
      if (plan == nullptr || out.num_sent >= out.order.size() || peer == rank_at_fault) continue;
      try {
        const auto room = wire::kLeastCapacity - static_cast<std::int64_t>(sizeof(Prologue));
        Prologue p;
        p.content = Content::Error;
        p.microbatch = rank_at_fault;
        p.step = step;
        p.total_bytes = std::min<std::int64_t>(room, static_cast<std::int64_t>(cause.size()));
        auto buffer = at::zeros({wire::kLeastCapacity}, at::kByte);
        std::memcpy(buffer.data_ptr(), &p, sizeof p);
        std::memcpy(static_cast<char*>(buffer.data_ptr()) + sizeof p, cause.data(), p.total_bytes);
        sent.push_back(post_send(buffer, peer, first_tag));
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
    try {
      shared.until_closed.push_back(std::make_shared<std::vector<Posted>>(std::move(sent)));
      keep_buffers();
    } catch (const std::exception&) {
    }
  }

  void check_agreed(const Prologue& p, const PlannedMessage& expected, std::int64_t capacity,
                    const std::string& action) {
    std::string wrong;
    if (p.magic != wire::kMagic) {
      wrong = "something that is not plumb's";
    } else if (p.step != step || p.kind != expected.id.kind || p.from != expected.id.from || p.to != expected.id.to ||
               p.microbatch != expected.id.microbatch) {
      wrong = to_string(MessageId{p.kind, p.from, p.to, p.microbatch}) + " of step " + std::to_string(p.step);
    } else if (p.capacity != capacity) {
      wrong = "a message for a buffer of " + std::to_string(p.capacity) + " bytes where " + std::to_string(capacity) +
              " were posted";
    }
    if (wrong.empty()) return;
    const std::string message = me() + " at " + action + " expected " + to_string(expected.id) + " of step " +
                                std::to_string(step) + " from rank " + std::to_string(expected.peer) + " and got " +
                                wrong;
    fail(group.rank(), message, message);
    throw Error(ErrorKind::Communication, message, "", "run the same schedule and the same version on every rank");
  }
};

Transport::Transport(ProcessGroup group) : state_(std::make_unique<State>(std::move(group))) {}

Transport::~Transport() {
  // A step that was left in the middle: peers must not wait for the rest of it.
  if (state_->plan != nullptr && !state_->told) tell_failure("it left the step");
}

const ProcessGroup& Transport::group() const { return state_->group; }
std::int64_t Transport::grown() const { return state_->grown; }

std::vector<std::string> Transport::exchange(const std::string& own) {
  auto& s = *state_;
  s.check_usable();
  const int size = s.group.size();
  std::vector<std::string> texts(size);
  texts[s.group.rank()] = own;
  if (size == 1) return texts;
  MessagePlan plan;
  for (int peer = 0; peer < size; peer++) {
    if (peer == s.group.rank()) continue;
    plan.sends.push_back({{MessageKind::Exchange, s.group.rank(), peer}, peer});
    plan.receives.push_back({{MessageKind::Exchange, peer, s.group.rank()}, peer});
  }
  begin_step(plan);
  auto text = at::empty({static_cast<std::int64_t>(own.size())}, at::kByte);
  if (!own.empty()) std::memcpy(text.data_ptr(), own.data(), own.size());
  for (size_t i = 0; i < plan.sends.size(); i++) send(static_cast<int>(i), {{text}});
  for (size_t i = 0; i < plan.receives.size(); i++) {
    auto values = receive(static_cast<int>(i), "the start");
    if (values.size() != 1 || !values[0].tensor.defined()) continue;
    texts[plan.receives[i].peer].assign(static_cast<const char*>(values[0].tensor.const_data_ptr()),
                                        values[0].tensor.nbytes());
  }
  end_step();
  return texts;
}

void Transport::begin_step(const MessagePlan& plan) {
  auto& s = *state_;
  s.check_usable();
  if (s.plan != nullptr) throw Error(ErrorKind::Internal, "a step began before the last one ended");
  if (!s.group.state().backend && !(plan.sends.empty() && plan.receives.empty())) {
    throw Error(ErrorKind::InvalidArgument,
                "the step has messages between ranks and the process group has one process");
  }
  s.plan = &plan;
  s.step++;
  for (auto& in : s.incoming) in = Incoming();
  for (auto& out : s.outgoing) out = Outgoing();
  s.position.assign(plan.receives.size(), 0);
  s.receive_routes.clear();
  s.send_routes.clear();
  for (size_t i = 0; i < plan.receives.size(); i++) {
    const auto& m = plan.receives[i];
    auto& in = s.incoming.at(m.peer);
    s.position[i] = static_cast<int>(in.order.size());
    in.order.push_back(static_cast<int>(i));
    auto& route = s.routes_in[{m.id.kind, m.id.from, m.id.to}];
    route.capacity = route.largest;
    s.receive_routes.push_back(&route);
  }
  for (size_t i = 0; i < plan.sends.size(); i++) {
    const auto& m = plan.sends[i];
    s.outgoing.at(m.peer).order.push_back(static_cast<int>(i));
    auto& route = s.routes_out[{m.id.kind, m.id.from, m.id.to}];
    route.capacity = route.largest;
    s.send_routes.push_back(&route);
  }
  for (int peer = 0; peer < s.group.size(); peer++) {
    auto& in = s.incoming[peer];
    in.posted.resize(in.order.size());
    in.done.resize(in.order.size());
    if (in.order.empty()) continue;
    try {
      s.post_ahead(peer, 0);
    } catch (const std::exception& e) {
      s.raise_lost(peer, "beginning step " + std::to_string(s.step), e);
    }
  }
}

void Transport::send(int index, const std::vector<MessageValue>& values) {
  auto& s = *state_;
  const auto& m = s.plan->sends.at(index);
  auto& out = s.outgoing[m.peer];
  if (out.num_sent >= out.order.size() || out.order[out.num_sent] != index) {
    throw Error(ErrorKind::Internal, to_string(m.id) + " is sent out of turn");
  }
  wire::check_sendable(m.id, values);
  auto& route = *s.send_routes[index];
  Prologue p;
  p.kind = m.id.kind;
  p.step = s.step;
  p.from = m.id.from;
  p.to = m.id.to;
  p.microbatch = m.id.microbatch;
  p.received = s.incoming[m.peer].received;
  p.capacity = route.capacity;
  const std::int64_t bytes = wire::message_bytes(values);
  auto buffer = byte_buffer(bytes);
  wire::write_message(static_cast<char*>(buffer.data_ptr()), p, values);
  try {
    Outgoing::Sent sent;
    if (bytes <= route.capacity) {
      sent.parts.push_back(s.post_send(std::move(buffer), m.peer, s.first_tag));
    } else {
      p.content = Content::Grow;
      p.total_bytes = bytes;
      auto header = byte_buffer(sizeof p);
      std::memcpy(header.data_ptr(), &p, sizeof p);
      sent.parts.push_back(s.post_send(std::move(header), m.peer, s.first_tag));
      const int tag = s.second_part_tag(static_cast<int>(out.num_sent));
      sent.parts.push_back(s.post_send(std::move(buffer), m.peer, tag));
      s.grown++;
    }
    route.largest = std::max(route.largest, bytes);
    out.num_sent++;
    out.in_flight.push_back(std::move(sent));
  } catch (const std::exception& e) {
    s.raise_lost(m.peer, "sending " + to_string(m.id), e);
  }
}

std::vector<MessageValue> Transport::receive(int index, const std::string& action) {
  auto& s = *state_;
  const auto& m = s.plan->receives.at(index);
  auto& in = s.incoming[m.peer];
  const auto& route = *s.receive_routes[index];
  const size_t position = s.position[index];
  const std::string waiting = action + " waiting for " + to_string(m.id);
  Posted message;
  Prologue p;
  try {
    s.post_ahead(m.peer, position);
    in.posted[position].work->wait(s.group.timeout());
    message = std::move(in.posted[position]);
    in.posted[position] = {};
    p = read_prologue(message.buffer);
    if (p.magic == wire::kMagic && p.content == Content::Error) {
      const auto cause = s.told_cause(message.buffer, p);
      const std::string text =
          s.me() + ", " + waiting + ": rank " + std::to_string(cause.rank) + " failed: " + cause.text;
      s.fail(cause.rank, cause.text, text);
      throw Error(ErrorKind::Communication, text, "", "look at what rank " + std::to_string(cause.rank) + " printed");
    }
    s.check_agreed(p, m, route.capacity, action);
    if (p.content == Content::Grow) {
      if (p.total_bytes <= route.capacity || p.total_bytes > (std::int64_t{1} << 40)) {
        throw Error(ErrorKind::Communication,
                    to_string(m.id) + " asks for a buffer of " + std::to_string(p.total_bytes) + " bytes");
      }
      message = s.post_receive(p.total_bytes, m.peer, s.second_part_tag(static_cast<int>(position)));
      message.work->wait(s.group.timeout());
      s.grown++;
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    s.raise_lost(m.peer, waiting, e);
  }
  in.done[position] = 1;
  while (in.received < in.done.size() && in.done[in.received]) in.received++;
  auto& route_in = *s.receive_routes[index];
  route_in.largest = std::max(route_in.largest, p.total_bytes);
  try {
    s.release_sent(m.peer, p.received);
    s.post_ahead(m.peer, position + 1);
  } catch (const std::exception& e) {
    s.raise_lost(m.peer, "after " + to_string(m.id), e);
  }
  return wire::read_values(message.buffer, message.buffer.numel());
}

void Transport::end_step() {
  auto& s = *state_;
  if (s.plan == nullptr) return;
  for (int peer = 0; peer < s.group.size(); peer++) {
    auto& out = s.outgoing[peer];
    const int total = static_cast<int>(out.order.size());
    try {
      while (!out.in_flight.empty()) {
        for (auto& part : out.in_flight.front().parts) part.work->wait(s.group.timeout());
        out.in_flight.pop_front();
        out.num_done++;
      }
    } catch (const std::exception& e) {
      const auto& m = s.plan->sends[out.order[std::min<size_t>(out.num_done, total - 1)]];
      s.raise_lost(peer, "at the end of the step sending " + to_string(m.id), e);
    }
  }
  s.plan = nullptr;
}

void Transport::tell_failure(const std::string& reason) noexcept {
  auto& s = *state_;
  // A process alone has nobody to tell and may go on with the next step.
  if (s.group.size() > 1) s.fail(s.group.rank(), reason, s.me() + " failed: " + reason);
  s.plan = nullptr;
}

}  // namespace plumb
