// The test device's memory: the host's, mapped twice. Tensors hold the address at which no access is allowed.
#pragma once

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "tests/device/streams.h"

namespace plumb_test {

class Arena {
 public:
  static Arena& get() {
    static Arena* arena = new Arena;  // tensors may die after static destruction began
    return *arena;
  }

  void* allocate(size_t asked) {
    size_t bytes = (asked + kAlign - 1) / kAlign * kAlign;
    std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [begin, size] = *it;
      if (size < bytes) continue;
      free_.erase(it);
      if (size > bytes) free_[begin + bytes] = size - bytes;
      used_[begin] = {bytes, asked};
      live_ += asked;
      peak_ = std::max(peak_, live_);
      return forbidden_ + begin;
    }
    TORCH_CHECK(false, "testdevice is out of memory");
    return nullptr;  // without optimization the compiler does not see that the check throws
  }

  // How many bytes had been asked for.
  size_t release(void* address) {
    std::lock_guard lock(mutex_);
    auto used = used_.find(static_cast<char*>(address) - forbidden_);
    size_t begin = used->first;
    auto [size, asked] = used->second;
    check_release(open_ + begin, asked);
    used_.erase(used);
    live_ -= asked;
    auto next = free_.lower_bound(begin);
    if (next != free_.end() && begin + size == next->first) size += next->second, next = free_.erase(next);
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == begin) begin = before->first, size += before->second, free_.erase(before);
    }
    free_[begin] = size;
    return asked;
  }

  size_t live() {
    std::lock_guard lock(mutex_);
    return live_;
  }

  // The most since the start.
  size_t peak() {
    std::lock_guard lock(mutex_);
    return peak_;
  }

  // Returns the address at which the host may access the memory of tensors at `address`.
  void* host(const void* address) {
    if (!address) return nullptr;
    const auto* at = static_cast<const char*>(address);
    TORCH_CHECK(at >= forbidden_ && at < forbidden_ + kBytes, "this is no memory of testdevice");
    return open_ + (at - forbidden_);
  }

  // Lets the host access the memory at the addresses of tensors, for kernels that it runs in a device's place.
  void open(bool wanted) { mprotect(forbidden_, kBytes, wanted ? PROT_READ | PROT_WRITE : PROT_NONE); }

 private:
  static constexpr size_t kBytes = size_t(8) << 30, kAlign = 64;

  Arena() {
    const int file = memfd_create("testdevice", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "testdevice found no memory");
    open_ = map(file, PROT_READ | PROT_WRITE);
    forbidden_ = map(file, PROT_NONE);
    close(file);
    free_[0] = kBytes;
  }

  static char* map(int file, int rights) {
    void* at = mmap(nullptr, kBytes, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "testdevice found no addresses");
    return static_cast<char*>(at);
  }

  std::mutex mutex_;
  char *open_, *forbidden_;
  std::map<size_t, size_t> free_;                     // begin -> bytes
  std::map<size_t, std::pair<size_t, size_t>> used_;  // begin -> bytes, bytes asked for
  size_t live_ = 0, peak_ = 0;
};

}  // namespace plumb_test
