// Waits for c10d's works that another thread can end, and a limit for waits that have none of their own.
#pragma once

#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>

namespace plumb {

class InterruptibleWait {
 public:
  // Throws std::runtime_error if the work fails, or once interrupt() was called. `on_device`: the work is the device
  // backend's; the wait is then for the device's current stream, where the backend can.
  void wait(const c10::intrusive_ptr<c10d::Work>& work, std::chrono::milliseconds timeout, bool on_device = false) {
    hold(work, on_device);
    const auto let_go = c10::make_scope_exit([this] { hold({}, false); });
    if (interrupted() || !work->wait(timeout)) throw std::runtime_error("interrupted");
  }

  // Ends the wait of another thread, now or later. `device`: the backend whose works cannot be ended one by one.
  template <class Device>
  void interrupt(const Device& device) {
    const std::lock_guard<std::mutex> guard(lock_);
    interrupted_ = true;
    if (work_ && on_device_) {
      device->abort();
    } else if (work_) {
      work_->abort();
    }
  }

  bool interrupted() {
    const std::lock_guard<std::mutex> guard(lock_);
    return interrupted_;
  }

 private:
  void hold(c10::intrusive_ptr<c10d::Work> work, bool on_device) {
    const std::lock_guard<std::mutex> guard(lock_);
    work_ = std::move(work);
    on_device_ = on_device;
  }

  std::mutex lock_;
  bool interrupted_ = false;
  c10::intrusive_ptr<c10d::Work> work_;
  bool on_device_ = false;
};

// Returns the result of `work`, or nothing once `limit` is over. `work` then goes on, alone, for as long as it takes:
// it must hold all that it uses.
template <class Work>
std::optional<std::invoke_result_t<Work>> within(std::chrono::milliseconds limit, Work work) {
  auto task = std::make_shared<std::packaged_task<std::invoke_result_t<Work>()>>(std::move(work));
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace plumb
