#include "tests/device/streams.h"

#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <iomanip>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>

namespace plumb_test {
namespace {

constexpr int kDevices = 2, kStreams = 2;
thread_local std::array<c10::StreamId, kDevices> current{};

class Queue {
 public:
  void add(Task task) {
    std::unique_lock lock(mutex_);
    if (!busy_) {
      busy_ = true;
      lock.unlock();
      task();
      task = nullptr;
      done();
      return;
    }
    tasks_.push_back(std::move(task));
  }

  // As add(), but never run by the caller.
  void add_later(Task task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!busy_) hand_over();
  }

  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return !busy_;
  }

  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy_; });
  }

 private:
  // Hands tasks that arrived meanwhile to the thread.
  void done() {
    const std::lock_guard lock(mutex_);
    busy_ = false;
    if (!tasks_.empty()) hand_over();
    changed_.notify_all();
  }

  void hand_over() {
    busy_ = true;
    if (!started_) std::thread([this] { run(); }).detach();
    started_ = true;
    changed_.notify_all();
    work_ = true;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return work_; });
      while (!tasks_.empty()) {
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
      }
      work_ = busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false, work_ = false, started_ = false;
};

Queue& queue_of(c10::Stream stream) {
  static auto& all = *new std::array<Queue, size_t(kDevices) * kStreams>;  // their threads never end
  return all.at(size_t(stream.device_index()) * kStreams + size_t(stream.id()));
}

// --- memory of transfers

struct Use {
  const char *begin, *end;
  bool receives, begun;
  bool meets(const void* at, size_t bytes) const {
    return static_cast<const char*>(at) < end && begin < static_cast<const char*>(at) + bytes;
  }
};
std::mutex uses_lock;
auto& uses() {
  static auto& all = *new std::multimap<const void*, Use>;
  return all;
}

std::mutex noted_lock;
std::string& noted() {
  static auto& all = *new std::string;
  return all;
}

}  // namespace

c10::Stream current_stream(c10::DeviceIndex device) {
  const c10::Device of(c10::DeviceType::PrivateUse1, device);
  return c10::Stream(c10::Stream::UNSAFE, of, current.at(size_t(device)));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  current.at(size_t(stream.device_index())) = stream.id();
  return before;
}

void enqueue(c10::Stream stream, Task task) {
  queue_of(stream).add_later([task = std::move(task)] {
    try {
      task();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "testdevice: %s\n", e.what());
      std::abort();
    }
  });
}
bool is_idle(c10::Stream stream) { return queue_of(stream).is_idle(); }
void drain(c10::Stream stream) { queue_of(stream).drain(); }

std::shared_future<void> marker(c10::Stream stream) {
  const auto done = std::make_shared<std::promise<void>>();
  std::shared_future<void> future = done->get_future().share();
  queue_of(stream).add([done] { done->set_value(); });
  return future;
}

InTransfer::InTransfer(const void* at, size_t bytes, bool receives) : at_(at) {
  const char* begin = static_cast<const char*>(at);
  const std::lock_guard lock(uses_lock);
  uses().emplace(at, Use{begin, begin + bytes, receives, receives});
}

InTransfer::~InTransfer() {
  const std::lock_guard lock(uses_lock);
  if (const auto it = uses().find(at_); it != uses().end()) uses().erase(it);
}

void InTransfer::begin() {
  const std::lock_guard lock(uses_lock);
  if (const auto it = uses().find(at_); it != uses().end()) it->second.begun = true;
}

void check_access(const void* at, size_t bytes, bool writes) {
  const std::lock_guard lock(uses_lock);
  for (const auto& [begin, use] : uses()) {
    TORCH_CHECK(!use.meets(at, bytes) || !use.begun || (!use.receives && !writes), "testdevice: memory is ",
                writes ? "written" : "read", " that a transfer ", use.receives ? "receives into" : "sends",
                ": nobody waited for it");
  }
}

void check_release(const void* at, size_t bytes) {
  const std::lock_guard lock(uses_lock);
  for (const auto& [begin, use] : uses()) {
    if (!use.meets(at, bytes)) continue;
    std::fprintf(stderr, "testdevice: memory is let go that a transfer %s\n", use.receives ? "receives into" : "sends");
    std::abort();
  }
}

double clock_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void note_activity(const std::string& what, double begin, double end) {
  std::ostringstream line;
  line << std::fixed << std::setprecision(6) << what << " " << begin << " " << end << "\n";
  const std::lock_guard lock(noted_lock);
  noted() += line.str();
}

std::string activities() {
  const std::lock_guard lock(noted_lock);
  return noted();
}

}  // namespace plumb_test
