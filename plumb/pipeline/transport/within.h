// A limit for waits that have none of their own.
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace plumb {

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
