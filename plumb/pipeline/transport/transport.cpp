#include "plumb/pipeline/transport/transport.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/transport/no_sigpipe.h"
#include "plumb/pipeline/transport/transport_state.h"

namespace plumb {
namespace {

using wire::Content;
using wire::Prologue;

// Receives posted ahead per peer: at least the first number, more while they are small: their buffers are memory.
constexpr int kLeastAhead = 2, kMostAhead = 64;
constexpr std::int64_t kBytesAhead = 1 << 20;

// With the size of this step's buffers.
Route* route_in(Routes& routes, const PlannedMessage& m) {
  auto& route = routes[{m.id.kind, m.id.from, m.id.to, m.peer}];
  route.size_class = wire::size_class(route.largest);
  return &route;
}

// Returns how many ranks the launcher has started on this host, those of other groups included; 0: it does not say.
int started_here() {
  const auto text = process_variable("LOCAL_WORLD_SIZE").value_or("");
  return std::atoi(text.c_str());
}

}  // namespace

at::Tensor byte_buffer(std::int64_t bytes) {
  const auto accelerator = at::getAccelerator();  // torch's build has one; the machine may have none
  const auto* hooks = accelerator ? &at::globalContext().getAcceleratorHooksInterface(accelerator) : nullptr;
  if (hooks && hooks->deviceCount() > 0 && hooks->hasPrimaryContext(0)) {
    try {
      return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    } catch (const std::exception&) {
      // There is none, or no more of it.
    }
  }
  return at::empty({bytes}, at::kByte);
}

Transport::State::State(ProcessGroup g) : group(std::move(g)), tags(group.take_tag_range()), failures(group) {
  incoming.resize(group.size());
  outgoing.resize(group.size());
  if (!group.device()) return;
  direct_messages = std::make_unique<DirectMessages>(
      group, waits,
      DirectMessages::Headers{
          [this](int index) { return has_arrived(index); },
          [this](int index, const std::string& action) { come(index, action); },
          [this](int peer, const std::string& waiting, const std::exception& e) { raise_lost(peer, waiting, e); }});
}

Posted Transport::State::post_receive(at::Tensor buffer, int peer, int tag) {
  const NoSigpipe guard;  // Gloo tells the sender that the buffer is there
  Posted p;
  p.buffer = std::move(buffer);
  std::memset(p.buffer.data_ptr(), 0, sizeof(Prologue));
  std::vector<at::Tensor> tensors{p.buffer};
  p.work = backend().recv(tensors, peer, tag);
  return p;
}

Posted Transport::State::post_send(at::Tensor buffer, int peer, int tag) {
  const NoSigpipe guard;
  Posted p;
  p.buffer = std::move(buffer);
  std::vector<at::Tensor> tensors{p.buffer};
  p.work = backend().send(tensors, peer, tag);
  return p;
}

void Transport::State::post_ahead(int peer, size_t needed) {
  auto& in = incoming[peer];
  std::int64_t bytes = 0;
  for (size_t i = in.received; i < in.num_posted; i++) {
    if (!receive_by_ring[in.order[i]]) bytes += receive_routes[in.order[i]]->capacity();
  }
  while (in.num_posted < in.order.size()) {
    const size_t ahead = in.num_posted - std::min(in.num_posted, needed);
    const Route& route = *receive_routes[in.order[in.num_posted]];
    const auto capacity = route.capacity();
    if (receive_by_ring[in.order[in.num_posted]]) {
      in.num_posted++;
      continue;
    }
    if (in.num_posted > needed && (ahead >= kMostAhead || (ahead >= kLeastAhead && bytes + capacity > kBytesAhead))) {
      break;
    }
    bytes += capacity;
    in.posted[in.num_posted] = post_receive(byte_buffer(capacity), peer, tags.message(route.size_class));
    in.num_posted++;
  }
}

void Transport::State::send_first(at::Tensor buffer, int index, std::vector<Posted>& parts) {
  const int peer = plan->sends[index].peer;
  if (send_by_ring[index]) {
    rings->send(peer, buffer, group.timeout(), [this] { return waits.interrupted(); });
  } else {
    parts.push_back(post_send(std::move(buffer), peer, tags.message(send_routes[index]->size_class)));
  }
}

void Transport::State::take_from_ring(int peer, size_t last) {
  if (!rings || !rings->has(peer)) return;
  auto& in = incoming[peer];
  while (true) {
    while (in.next_of_ring < in.order.size() && !receive_by_ring[in.order[in.next_of_ring]]) in.next_of_ring++;
    if (in.next_of_ring == in.order.size() || in.next_of_ring > last) return;  // later ones wait in the ring
    in.posted[in.next_of_ring].buffer = rings->take(peer);
    if (!in.posted[in.next_of_ring].buffer.defined()) return;
    in.next_of_ring++;
  }
}

void Transport::State::come_by_ring(const PlannedMessage& message, size_t position, const std::string& action) {
  const auto& place = incoming[message.peer].posted[position].buffer;
  while (true) {
    try {
      take_from_ring(message.peer, position);
    } catch (const Error& e) {
      raise_wrong(message, action, e.message(), e.remedy());
    }
    if (place.defined()) return;
    rings->wait(message.peer, group.timeout(), [this] { return waits.interrupted(); });
  }
}

void Transport::State::finish_oldest(Outgoing& out) {
  for (const auto& part : out.in_flight.front()) wait(part);
  out.in_flight.pop_front();
  out.num_done++;
}

void Transport::State::release_sent(int peer, std::uint32_t received) {
  auto& out = outgoing[peer];
  while (out.num_done < received && !out.in_flight.empty()) {
    finish_oldest(out);
  }
}

Transport::Transport(ProcessGroup group) : state_(std::make_unique<State>(std::move(group))) {}

Transport::~Transport() {
  // A step that was left in the middle: peers must not wait for the rest of it.
  if (state_->plan != nullptr && !state_->told) tell_failure("it left the step");
}

const ProcessGroup& Transport::group() const { return state_->group; }

// An end that cannot open the other's memory says so, and both stay with Gloo.
void Transport::connect_host(bool may_look) {
  auto& s = *state_;
  const int size = s.group.size();
  if (size == 1) return;
  std::unique_ptr<HostRings> rings;
  if (s.group.shares_memory()) {
    try {
      rings = std::make_unique<HostRings>(s.group.rank(), size);
    } catch (const Error&) {
      // The system gives none.
    }
  }
  const auto addresses = exchange(rings ? rings->address() : "");
  std::string opened(size, '0');
  for (int peer = 0; peer < size; peer++) {
    if (rings && peer != s.group.rank() && rings->open(peer, addresses[peer])) opened[peer] = '1';
  }
  const auto all_opened = exchange(opened);
  int here = 1;
  for (int peer = 0; rings && peer < size; peer++) {
    const std::string& theirs = all_opened[peer];
    if (theirs.size() != opened.size() || theirs[s.group.rank()] != '1') rings->close(peer);
    here += rings->has(peer) ? 1 : 0;
  }
  if (rings && may_look) rings->look_first(std::max(here, started_here()));
  s.rings = std::move(rings);
}

void Transport::connect_device() { DirectMessages::connect(state_->group); }
std::int64_t Transport::grown() const { return state_->grown; }
std::int64_t Transport::sent() const { return state_->sent; }

at::Tensor text_tensor(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes;
}

std::optional<std::string> text_of(const std::vector<MessageValue>& message) {
  if (message.empty() || !message[0].tensor.defined() || message[0].tensor.scalar_type() != at::kByte)
    return std::nullopt;
  const at::Tensor bytes = message[0].tensor.contiguous();
  return std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
}

std::vector<std::string> Transport::exchange(const std::string& own, const std::string& action) {
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
  for (size_t i = 0; i < plan.sends.size(); i++) send(static_cast<int>(i), {{text_tensor(own)}});
  const AgreedValues a_text{{{AgreedValue::Comes::Always, at::kByte, std::nullopt}}};
  for (size_t i = 0; i < plan.receives.size(); i++)
    texts[plan.receives[i].peer] = text_of(receive(static_cast<int>(i), action, a_text).values).value();
  end_step();
  return texts;
}

void Transport::begin_step(const MessagePlan& plan) {
  auto& s = *state_;
  s.check_usable();
  if (s.plan != nullptr) throw Error(ErrorKind::InvalidState, "a step began before the last one ended");
  if (!s.group.backend() && !(plan.sends.empty() && plan.receives.empty())) {
    throw Error(ErrorKind::Schedule, "the step has messages between ranks and the process group has one process");
  }
  s.plan = &plan;
  s.step++;
  for (auto& in : s.incoming) in = Incoming();
  for (auto& out : s.outgoing) out = Outgoing();
  s.position.assign(plan.receives.size(), 0);
  s.came.clear();
  s.came.resize(plan.receives.size());
  if (s.direct_messages) s.direct_messages->begin_step(plan);
  s.receive_routes.clear();
  s.send_routes.clear();
  s.receive_by_ring.clear();
  s.send_by_ring.clear();
  const auto by_ring = [&s](auto& end, int peer, const Route& route) {
    return s.rings && s.rings->has(peer) && end.ring.take(route.capacity());
  };
  for (size_t i = 0; i < plan.receives.size(); i++) {
    const auto& m = plan.receives[i];
    auto& in = s.incoming.at(m.peer);
    s.position[i] = static_cast<int>(in.order.size());
    in.order.push_back(static_cast<int>(i));
    in.posted.emplace_back();
    in.done.push_back(0);
    s.receive_routes.push_back(route_in(s.routes_in, m));
    s.receive_by_ring.push_back(by_ring(in, m.peer, *s.receive_routes[i]));
  }
  for (size_t i = 0; i < plan.sends.size(); i++) {
    const auto& m = plan.sends[i];
    auto& out = s.outgoing.at(m.peer);
    out.order.push_back(static_cast<int>(i));
    s.send_routes.push_back(route_in(s.routes_out, m));
    s.send_by_ring.push_back(by_ring(out, m.peer, *s.send_routes[i]));
  }
  for (int peer = 0; peer < s.group.size(); peer++) {
    if (s.incoming[peer].order.empty()) continue;
    try {
      s.post_ahead(peer, 0);
    } catch (const std::exception& e) {
      s.raise_lost(peer, str("beginning step ", s.step), e);
    }
  }
}

void Transport::send(int index, const std::vector<MessageValue>& given, at::IntArrayRef sizes) {
  auto& s = *state_;
  const auto& m = s.plan->sends.at(index);
  auto& out = s.outgoing[m.peer];
  if (out.num_sent >= out.order.size() || out.order[out.num_sent] != index) {
    throw Error(ErrorKind::Internal, to_string(m.id) + " is sent out of turn");
  }
  const auto values = wire::sendable(m.id, given);
  auto& route = *s.send_routes[index];
  Prologue p;
  p.kind = m.id.kind;
  p.step = s.step;
  p.from = m.id.from;
  p.to = m.id.to;
  p.microbatch = m.id.microbatch;
  p.received = s.incoming[m.peer].received;
  p.has_backward = s.plan->has_backward ? 1 : 0;
  const auto direct = s.direct() ? wire::DirectDevice(s.group.device()->type()) : std::nullopt;
  const std::int64_t bytes = wire::message_bytes(values, sizes.size(), direct);
  auto buffer = byte_buffer(bytes);
  wire::write_message(static_cast<char*>(buffer.data_ptr()), p, values, sizes, direct);
  try {
    std::vector<Posted> parts;
    if (bytes <= route.capacity()) {
      s.send_first(std::move(buffer), index, parts);
    } else {
      p.content = Content::Grow;
      p.total_bytes = bytes;
      wire::seal(p);
      auto header = byte_buffer(sizeof p);
      std::memcpy(header.data_ptr(), &p, sizeof p);
      s.send_first(std::move(header), index, parts);
      const int second_tag = s.tags.second_part(wire::size_class(bytes), static_cast<int>(out.num_sent));
      parts.push_back(s.post_send(std::move(buffer), m.peer, second_tag));
      s.grown++;
    }
    route.largest = std::max(route.largest, bytes);
    s.sent += bytes;
    out.num_sent++;
    out.in_flight.push_back(std::move(parts));
  } catch (const Error&) {  // the rank's own fault: it has no memory for the ring
    throw;
  } catch (const std::exception& e) {
    s.raise_lost(m.peer, "sending " + to_string(m.id), e);
  }
  if (direct) s.sent += s.direct()->send(index, values);
}

Posted Transport::State::receive_second(const Prologue& first, size_t position, const PlannedMessage& expected,
                                        const std::string& action) {
  const int size_class = wire::size_class(first.total_bytes);
  at::Tensor buffer;
  try {
    if (size_class < wire::kSizeClasses) buffer = byte_buffer(wire::class_bytes(size_class));
  } catch (const std::exception&) {
    // reported below
  }
  if (!buffer.defined()) {
    raise_wrong(expected, action, str("it asks for a buffer of ", first.total_bytes, " bytes"),
                "send less at once, or give this rank more memory");
  }
  Posted second =
      post_receive(std::move(buffer), expected.peer, tags.second_part(size_class, static_cast<int>(position)));
  wait(second);
  const Prologue p = read_agreed(second.buffer, expected, action);
  if (p.content != Content::Values || p.total_bytes != first.total_bytes) {
    raise_wrong(expected, action, "its two parts are not of one message",
                "run the same version of plumb on every rank");
  }
  grown++;
  return second;
}

bool Transport::State::has_arrived(int index) {
  auto& in = incoming[plan->receives.at(index).peer];
  const auto at = static_cast<size_t>(position[index]);
  if (!receive_by_ring[index]) return at < in.num_posted && in.posted[at].work->isCompleted();
  take_from_ring(plan->receives[index].peer, at);
  return in.posted[at].buffer.defined();
}

void Transport::State::come(int index, const std::string& action) {
  auto& c = came.at(index);
  const auto& m = plan->receives.at(index);
  auto& in = incoming[m.peer];
  auto& route = *receive_routes[index];
  const auto at = static_cast<size_t>(position[index]);
  try {
    post_ahead(m.peer, at);
    receive_by_ring[index] ? come_by_ring(m, at, action) : wait(in.posted[at]);
    c.message = std::move(in.posted[at]);
    in.posted[at] = {};
    c.prologue = read_agreed(c.message.buffer, m, action);
    if (c.prologue.content == Content::Grow) c.message = receive_second(c.prologue, at, m, action);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    raise_lost(m.peer, action + " waiting for " + to_string(m.id), e);
  }
  in.done[at] = 1;
  while (in.received < in.done.size() && in.done[in.received]) in.received++;
  route.largest = std::max(route.largest, c.prologue.total_bytes);
  if (direct()) make_direct(index, action);
}

void Transport::State::make_direct(int index, const std::string& action) {
  const auto& m = plan->receives[index];
  try {
    direct()->make(index, came[index].message.buffer);
  } catch (const Error& e) {
    raise_wrong(m, action, e.message(), e.remedy());
  } catch (const std::exception& e) {
    raise_wrong(m, action, "there is no room for its values: " + std::string(e.what()).substr(0, 200),
                "send less at once, or give this rank's device more memory");
  }
}

wire::Message Transport::receive(int index, const std::string& action, const AgreedValues& agreed,
                                 const FPFormat* codes) {
  auto& s = *state_;
  const auto& m = s.plan->receives.at(index);
  if (s.direct()) {
    s.direct()->post(index, action);
  } else {
    s.come(index, action);
  }
  const Came c = std::exchange(s.came[index], {});
  std::vector<at::Tensor> values;  // that traveled on their device
  try {
    if (s.direct()) values = s.direct()->take(index);
  } catch (const std::exception& e) {
    s.raise_lost(m.peer, action + " waiting for the values of " + to_string(m.id), e);
  }
  wire::Message read;
  try {
    read = wire::read_message(c.message.buffer, agreed, codes, values);
  } catch (const Error& e) {
    s.raise_wrong(m, action, e.message(), e.remedy());
  }
  try {
    s.release_sent(m.peer, c.prologue.received);
    s.post_ahead(m.peer, static_cast<size_t>(s.position[index]) + 1);
  } catch (const std::exception& e) {
    s.raise_lost(m.peer, "after " + to_string(m.id), e);
  }
  return read;
}

void Transport::end_step() {
  auto& s = *state_;
  if (s.plan == nullptr) return;
  if (s.direct()) s.direct()->end_step();
  for (int peer = 0; peer < s.group.size(); peer++) {
    auto& out = s.outgoing[peer];
    const int total = static_cast<int>(out.order.size());
    try {
      while (!out.in_flight.empty()) s.finish_oldest(out);
    } catch (const std::exception& e) {
      const auto& m = s.plan->sends[out.order[std::min<size_t>(out.num_done, total - 1)]];
      s.raise_lost(peer, "at the end of the step sending " + to_string(m.id), e);
    }
  }
  s.plan = nullptr;
}

void Transport::interrupt() noexcept {
  try {
    state_->waits.interrupt(state_->group.device_backend());
  } catch (const std::exception&) {
    // A backend that cannot: the wait ends with its time.
  }
}

void Transport::check_values() {
  auto& s = *state_;
  if (s.plan != nullptr && !s.told && s.direct()) s.direct()->check();
}

void Transport::tell_failure(const std::string& reason) noexcept {
  auto& s = *state_;
  // A process alone has nobody to tell and may go on with the next step.
  if (s.group.size() > 1) s.fail(s.group.rank(), reason, s.me() + " failed: " + reason);
  s.plan = nullptr;
}

}  // namespace plumb
