#include "plumb/pipeline/transport/direct_messages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/transport/no_sigpipe.h"

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

}  // namespace

// Ends the backend's works once one has not met its other end in time: a thread that waits for the device, in any call,
// continues, and the transport gives the reason.
class DirectMessages::Watch {
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

DirectMessages::DirectMessages(const ProcessGroup& group, InterruptibleWait& waits, Headers headers)
    : group_(group),
      waits_(waits),
      headers_(std::move(headers)),
      device_(*group.device()),
      guard_(device_.type()),
      stream_(message_stream(guard_, device_)),
      watch_(std::make_unique<Watch>(group.device_backend())) {}

DirectMessages::~DirectMessages() = default;

void DirectMessages::check_late() const {
  if (watch_->late()) throw std::runtime_error("timed out");
}

// NCCL connects all ranks when the first coalesced messages come, though only two ranks may have them: a collective of
// all connects them here. A backend that has no collectives needs no more than its messages.
void DirectMessages::connect(const ProcessGroup& group) {
  const auto backend = group.device_backend();
  if (!backend || !backend->supportsCoalescing()) return;
  const auto done = within(group.timeout(), [backend, device = *group.device()] {
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
              str("rank ", group.world_rank(group.rank()), " cannot connect ", backend->getBackendName(),
                  " to its peers: no answer within ", group.timeout().count(), " ms"),
              "", "look at what the other ranks printed");
}

void DirectMessages::begin_step(const MessagePlan& plan) {
  plan_ = &plan;
  sends_.clear();
  sends_.resize(plan.sends.size());
  receives_.assign(plan.receives.size(), {});
  next_ = 0;
}

std::int64_t DirectMessages::send(int index, const std::vector<MessageValue>& values) {
  Made made;
  made.values = wire::direct_values(values, device_);
  std::int64_t bytes = 0;
  for (const auto& value : made.values) bytes += static_cast<std::int64_t>(value.nbytes());
  if (!made.values.empty()) {
    made.made.emplace(device_.type());
    made.made->record(guard_.getStream(device_));
  }
  sends_[index] = std::move(made);
  post(std::nullopt, "sending " + to_string(plan_->sends[index].id));
  return bytes;
}

// Returns whether the group of messages may be posted; where `wait` is, waits for the headers that are missing.
bool DirectMessages::is_ready(const std::vector<MessagePlan::End>& ends, bool wait, const std::string& action) {
  for (const auto& end : ends) {
    if (end.sends) {
      if (!sends_[end.index]) return false;
      continue;
    }
    if (receives_[end.index].made) continue;
    if (!wait && !headers_.has_arrived(end.index)) return false;
    headers_.receive(end.index, action);
  }
  return true;
}

void DirectMessages::post_group(const std::vector<MessagePlan::End>& ends) {
  auto& backend = *group_.device_backend();
  const OnStream on(guard_, stream_);
  std::vector<Flight> flights;
  std::vector<std::pair<bool, at::Tensor>> transfers;  // whether it is sent
  int peer = -1;
  for (const auto& end : ends) {
    const auto index = static_cast<size_t>(end.index);
    const auto& message = message_of(end);
    Flight flight{nullptr, {}, message.peer, message.id};
    peer = message.peer;
    if (end.sends) {
      auto& made = *sends_[index];
      if (made.made) made.made->block(stream_);
      flight.held = std::move(made.values);
    } else {
      flight.held = receives_[index].values;
      receives_[index].posted = true;
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
  for (const auto& work : works) watch_->add(work, group_.timeout());
  for (size_t i = 0; i < ends.size(); i++) {
    if (!ends[i].sends) receives_[ends[i].index].works = works;
    for (const auto& work : works) {
      auto flight = flights[i];
      flight.work = work;
      if (!flight.held.empty()) in_flight_.push_back(std::move(flight));
    }
  }
}

void DirectMessages::post(std::optional<int> until, const std::string& action) {
  const auto missing = [&] { return until && (*until < 0 || !receives_[*until].posted); };
  while (next_ < plan_->order.size()) {
    const auto& ends = plan_->order[next_];
    if (!is_ready(ends, missing(), action)) break;
    const auto& message = message_of(ends.front());
    try {
      post_group(ends);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& e) {
      headers_.raise_lost(message.peer, "posting " + to_string(message.id), e);
    }
    next_++;
  }
  if (missing() && next_ < plan_->order.size()) {
    throw Error(ErrorKind::Internal, action + " waits for a message that stands behind one that is not sent yet");
  }
  while (!in_flight_.empty() && in_flight_.front().work->isCompleted()) finish_first();
}

// Finishes the first message in flight.
void DirectMessages::finish_first() {
  const auto flight = std::move(in_flight_.front());
  in_flight_.pop_front();
  try {
    check_late();
    if (const auto wrong = flight.work->exception()) std::rethrow_exception(wrong);
  } catch (const std::exception& e) {
    headers_.raise_lost(flight.peer, "with the values of " + to_string(flight.id) + " under way", e);
  }
}

void DirectMessages::check() {
  // Those of another peer may have ended before.
  std::stable_partition(in_flight_.begin(), in_flight_.end(), [](const auto& f) { return f.work->isCompleted(); });
  while (!in_flight_.empty() && (in_flight_.front().work->isCompleted() || watch_->late())) finish_first();
}

void DirectMessages::make(int index, const at::Tensor& header) {
  const OnStream on(guard_, stream_);
  receives_[index].values = wire::make_direct_values(header, device_);
  receives_[index].made = true;
}

std::vector<at::Tensor> DirectMessages::take(int index) {
  const Incoming taken = std::exchange(receives_[index], {});
  const c10::Stream user = guard_.getStream(device_);
  try {
    // With a time NCCL's works have the host wait.
    for (const auto& work : taken.works) waits_.wait(work, kNoTimeout, /*on_device=*/true);
  } catch (const std::exception&) {
    check_late();
    throw;
  }
  check_late();
  if (user != stream_) {
    for (const auto& value : taken.values) value.record_stream(user);
  }
  return taken.values;
}

void DirectMessages::end_step() {
  post(-1, "the end of the step");
  if (next_ < plan_->order.size()) throw Error(ErrorKind::Internal, "the step ended before all its messages were sent");
  while (!in_flight_.empty()) {
    // Its end is the watch's to see to.
    while (!in_flight_.front().work->isCompleted() && !watch_->late())
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    finish_first();
  }
}

void DirectMessages::abort(const ProcessGroup& group) noexcept {
  const auto backend = group.device_backend();
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

}  // namespace plumb
