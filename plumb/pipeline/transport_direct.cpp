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
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/transport_state.h"
#include "plumb/pipeline/within.h"

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The device's stream `to` for this thread, until the end of the scope.
class OnStream {
 public:
  OnStream(const c10::impl::VirtualGuardImpl& guard, c10::Stream to)
      : guard_(guard), device_(guard.exchangeDevice(to.device())), before_(guard.exchangeStream(to)) {}
  ~OnStream() {
    guard_.exchangeStream(before_);
    guard_.uncheckedSetDevice(device_);
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;
  c10::Stream before() const { return before_; }

 private:
  const c10::impl::VirtualGuardImpl& guard_;
  const c10::Device device_;
  const c10::Stream before_;
};

c10::Stream message_stream(const c10::impl::VirtualGuardImpl& guard, c10::Device device) {
  try {
    return guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  } catch (const std::exception&) {
    return guard.getStream(device);  // a device with one stream
  }
}

const PlannedMessage& message_of(const MessagePlan& plan, const MessagePlan::End& end) {
  return (end.sends ? plan.sends : plan.receives)[end.index];
}

}  // namespace

// Ends the backend's works once one has not met its other end in time: a thread that waits for the device, in any call,
// continues, and the transport gives the reason.
class Watch {
 public:
  explicit Watch(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}
  ~Watch() {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void add(c10::intrusive_ptr<c10d::Work> work, milliseconds timeout) {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      works_.push_back({std::move(work), Clock::now() + timeout});
    }
    changed_.notify_all();
  }
  bool late() const { return late_; }

 private:
  struct Watched {
    c10::intrusive_ptr<c10d::Work> work;
    Clock::time_point until;
  };

  void run() {
    std::unique_lock<std::mutex> lock(lock_);
    while (!closing_) {
      std::erase_if(works_, [](const Watched& w) { return w.work->isCompleted(); });
      if (works_.empty()) {
        changed_.wait(lock, [&] { return closing_ || !works_.empty(); });
        continue;
      }
      // Sends and receives of a rank wait for those before them: the oldest is late first.
      if (Clock::now() < works_.front().until) {
        changed_.wait_for(lock, milliseconds(20), [&] { return closing_; });
        continue;
      }
      late_ = true;
      works_.clear();
      lock.unlock();
      try {
        backend_->abort();
      } catch (const std::exception&) {
        // It has ended by itself.
      }
      lock.lock();
    }
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<Watched> works_;
  bool closing_ = false;
  std::atomic<bool> late_ = false;
  std::thread thread_;
};

struct DirectMessages {
  DirectMessages(c10::Device on, c10::intrusive_ptr<c10d::Backend> backend)
      : device(on), guard(on.type()), stream(message_stream(guard, on)), watch(std::move(backend)) {}

  void check_late() const {
    if (watch.late()) throw std::runtime_error("timed out");
  }

  // Values to send, and the event of their making.
  struct Made {
    std::vector<at::Tensor> values;
    std::optional<c10::Event> made;
  };
  struct Flight {
    c10::intrusive_ptr<c10d::Work> work;
    std::vector<at::Tensor> held;
    int peer;
    MessageId id;
    Clock::time_point begin = Clock::now();
  };

  const c10::Device device;
  const c10::impl::VirtualGuardImpl guard;
  const c10::Stream stream;
  std::vector<std::optional<Made>> sends;  // of this step, by index in the plan
  size_t next = 0;                         // of plan.order
  std::deque<Flight> in_flight;
  Watch watch;
};

// NCCL connects all ranks when the first coalesced messages come, though only two ranks may have them: a collective of
// all connects them here. A backend that has no collectives needs no more than its messages.
void Transport::connect_device() {
  const auto& shared = state_->group.state();
  const auto backend = shared.device_backend;
  if (!backend || !backend->supportsCoalescing()) return;
  const auto done = within(state_->group.timeout(), [backend, device = shared.device] {
    try {
      std::vector<at::Tensor> one{at::zeros({1}, at::device(device))};
      backend->allreduce(one)->wait();
    } catch (const std::exception&) {
      // A faulty backend that has them fails at the first message.
    }
    return true;
  });
  if (done) return;
  throw Error(ErrorKind::Communication,
              str(state_->me(), " cannot connect ", backend->getBackendName(), " to its peers: no answer within ",
                  state_->group.timeout().count(), " ms"),
              "", "look at what the other ranks printed");
}

bool Transport::State::direct() const { return direct_ != nullptr && plan != nullptr && !plan->order.empty(); }

void Transport::State::begin_direct() {
  const auto& shared = group.state();
  if (shared.device_backend && !direct_) direct_.reset(new DirectMessages(shared.device, shared.device_backend));
  if (!direct_) return;
  direct_->sends.clear();
  direct_->sends.resize(plan->sends.size());
  direct_->next = 0;
}

void Transport::State::submit(int index, const std::vector<MessageValue>& values) {
  auto& d = *direct_;
  DirectMessages::Made made;
  made.values = wire::direct_values(values, d.device);
  for (const auto& value : made.values) sent += static_cast<std::int64_t>(value.nbytes());
  if (!made.values.empty()) {
    made.made.emplace(d.device.type());
    made.made->record(d.guard.getStream(d.device));
  }
  d.sends[index] = std::move(made);
  post_direct(std::nullopt, "sending " + to_string(plan->sends[index].id));
}

// Returns whether the group of messages may be posted; where `wait` is, waits for the headers that are missing.
bool Transport::State::is_ready(const std::vector<MessagePlan::End>& ends, bool wait, const std::string& action) {
  for (const auto& end : ends) {
    if (end.sends) {
      if (!direct_->sends[end.index]) return false;
      continue;
    }
    if (came[end.index].message.buffer.defined()) continue;
    if (!wait && !has_arrived(end.index)) return false;
    come(end.index, action);
  }
  return true;
}

void Transport::State::post_group(const std::vector<MessagePlan::End>& ends) {
  auto& d = *direct_;
  auto& backend = *group.state().device_backend;
  const OnStream on(d.guard, d.stream);
  std::vector<DirectMessages::Flight> flights;
  std::vector<std::pair<bool, at::Tensor>> transfers;  // whether it is sent
  int peer = -1;
  for (const auto& end : ends) {
    const auto index = static_cast<size_t>(end.index);
    const auto& message = message_of(*plan, end);
    DirectMessages::Flight flight{nullptr, {}, message.peer, message.id};
    peer = message.peer;
    if (end.sends) {
      auto& made = *d.sends[index];
      if (made.made) made.made->block(d.stream);
      flight.held = std::move(made.values);
    } else {
      flight.held = came[index].direct;
      came[index].posted = true;
    }
    for (const auto& value : flight.held) transfers.emplace_back(end.sends, wire::bytes_of(value));
    flights.push_back(std::move(flight));
  }
  if (transfers.empty()) return;
  // Both ends know from the headers how many there are, and so coalesce alike.
  const NoSigpipe guard;
  const bool together = transfers.size() > 1 && backend.supportsCoalescing();
  if (together) backend.startCoalescing();
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (auto& [sends, bytes] : transfers) {
    std::vector<at::Tensor> tensors{bytes};
    works.push_back(sends ? backend.send(tensors, peer, 0) : backend.recv(tensors, peer, 0));
  }
  if (together) works.assign(1, backend.endCoalescing());
  for (const auto& work : works) d.watch.add(work, group.timeout());
  for (size_t i = 0; i < ends.size(); i++) {
    if (!ends[i].sends) came[ends[i].index].works = works;
    for (const auto& work : works) {
      auto flight = flights[i];
      flight.work = work;
      if (!flight.held.empty()) d.in_flight.push_back(std::move(flight));
    }
  }
}

void Transport::State::post_direct(std::optional<int> until, const std::string& action) {
  auto& d = *direct_;
  const auto missing = [&] { return until && (*until < 0 || !came[*until].posted); };
  while (d.next < plan->order.size()) {
    const auto& ends = plan->order[d.next];
    if (!is_ready(ends, missing(), action)) break;
    const auto& message = message_of(*plan, ends.front());
    try {
      post_group(ends);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& e) {
      raise_lost(message.peer, "posting " + to_string(message.id), e);
    }
    d.next++;
  }
  if (missing() && d.next < plan->order.size()) {
    throw Error(ErrorKind::Internal, action + " waits for a message that stands behind one that is not sent yet");
  }
  while (!d.in_flight.empty() && d.in_flight.front().work->isCompleted()) finish_first();
}

// Finishes the first message in flight.
void Transport::State::finish_first() {
  auto& in_flight = direct_->in_flight;
  const auto flight = std::move(in_flight.front());
  in_flight.pop_front();
  try {
    direct_->check_late();
    if (const auto wrong = flight.work->exception()) std::rethrow_exception(wrong);
  } catch (const std::exception& e) {
    raise_lost(flight.peer, "with the values of " + to_string(flight.id) + " under way", e);
  }
}

void Transport::State::check_direct() {
  auto& in_flight = direct_->in_flight;
  // Those of another peer may have ended before.
  std::stable_partition(in_flight.begin(), in_flight.end(), [](const auto& f) { return f.work->isCompleted(); });
  while (!in_flight.empty() && (in_flight.front().work->isCompleted() || direct_->watch.late())) finish_first();
}

void Transport::State::make_direct(int index, const std::string& action) {
  auto& c = came[index];
  const auto& m = plan->receives[index];
  const OnStream on(direct_->guard, direct_->stream);
  try {
    c.direct = wire::make_direct_values(c.message.buffer, direct_->device);
  } catch (const Error& e) {
    raise_wrong(m, action, e.message(), e.remedy());
  } catch (const std::exception& e) {
    raise_wrong(m, action, "there is no room for its values: " + std::string(e.what()).substr(0, 200),
                "send less at once, or give this rank's device more memory");
  }
}

void Transport::State::use_direct(const Came& c) {
  auto& d = *direct_;
  const c10::Stream user = d.guard.getStream(d.device);
  try {
    for (const auto& work : c.works) wait({{}, work}, /*on_device=*/true);
  } catch (const std::exception&) {
    d.check_late();
    throw;
  }
  d.check_late();
  if (user != d.stream) {
    for (const auto& value : c.direct) value.record_stream(user);
  }
}

void Transport::State::end_direct() {
  auto& d = *direct_;
  post_direct(-1, "the end of the step");
  if (d.next < plan->order.size()) throw Error(ErrorKind::Internal, "the step ended before all its messages were sent");
  while (!d.in_flight.empty()) {
    // Its end is the watch's to see to.
    while (!d.in_flight.front().work->isCompleted() && !d.watch.late())
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    finish_first();
  }
}

// Works end with an error, whatever they wait for; buffers may go.
void Transport::State::abort_direct() noexcept {
  const auto backend = group.state().device_backend;
  if (!backend) return;
  try {
    // It may wait for the device.
    within(std::min(group.timeout(), milliseconds(2000)), [backend] {
      try {
        backend->abort();
      } catch (const std::exception&) {
        // It has ended by itself.
      }
      return true;
    });
  } catch (const std::exception&) {
  }
}

void Transport::State::DeleteDirect::operator()(DirectMessages* d) const { delete d; }

}  // namespace plumb
