#include "plumb/pipeline/transport/shared_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/core/system_remedy.h"
#include "plumb/pipeline/launch/descriptor.h"

namespace plumb {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_SEAL;
constexpr const char* kRemedy = "look at what the other ranks printed; /proc has to be there";

[[noreturn]] void fail(ErrorKind kind, const std::string& what, int reason, const std::string& otherwise) {
  throw Error(kind, what + ": " + std::strerror(reason), "", system_remedy(reason, otherwise));
}

[[noreturn]] void fail_to_take(std::int64_t bytes, int reason) {
  fail(ErrorKind::CannotWrite, str(bytes, " bytes of memory that processes share cannot be had"), reason,
       "end other programs, or raise the limits of memory and file sizes");
}

// The system ends a process that goes beyond this limit by a signal.
void require_within_limit(std::int64_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<rlim_t>(bytes) > limit.rlim_cur) fail_to_take(bytes, EFBIG);
}

std::string text_of(const SharedMemory::Address& address) {
  return str("/proc/", address.process, "/fd/", address.descriptor);
}

}  // namespace

struct SharedMemory::Held {
  Descriptor descriptor;
  char* at = nullptr;  // the maker's
  std::int64_t size = 0;

  Held() = default;
  Held(const Held&) = delete;
  ~Held() {
    if (at != nullptr) ::munmap(at, static_cast<size_t>(size));
  }
};

SharedMemory::SharedMemory() : held_(std::make_shared<Held>()) {
  held_->descriptor = Descriptor(::memfd_create("plumb", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (held_->descriptor.get() < 0 || ::fcntl(held_->descriptor.get(), F_ADD_SEALS, kSeals) != 0)
    fail(ErrorKind::ExecutionFailed, "memory that processes share cannot be had", errno, "");
}

SharedMemory::SharedMemory(const Address& address) : held_(std::make_shared<Held>()) {
  const std::string path = text_of(address);
  held_->descriptor = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (held_->descriptor.get() < 0)
    fail(ErrorKind::Communication, "another rank's memory cannot be had, " + path, errno, kRemedy);
  // Only such memory has seals.
  const int seals = ::fcntl(held_->descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    throw Error(ErrorKind::Communication, path + ", which another rank names, is no memory of plumb's", "", kRemedy);
}

SharedMemory::Address SharedMemory::address() const { return {::getpid(), held_->descriptor.get()}; }

char* SharedMemory::grow(std::int64_t bytes) {
  if (bytes <= held_->size) return held_->at;
  take(0, bytes);
  return map(bytes);
}

char* SharedMemory::reserve(std::int64_t bytes) {
  require_within_limit(bytes);
  if (::ftruncate(held_->descriptor.get(), bytes) != 0) fail_to_take(bytes, errno);
  return map(bytes);
}

// Memory that the system has no room for would end its writer by a signal.
void SharedMemory::take(std::int64_t begin, std::int64_t bytes) {
  require_within_limit(begin + bytes);
  const int reason = ::posix_fallocate(held_->descriptor.get(), begin, bytes);
  if (reason != 0) fail_to_take(bytes, reason);
}

char* SharedMemory::map(std::int64_t bytes) {
  Held& held = *held_;
  void* at = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, held.descriptor.get(), 0);
  if (at == MAP_FAILED) fail_to_take(bytes, errno);
  if (held.at != nullptr) ::munmap(held.at, static_cast<size_t>(held.size));
  held.at = static_cast<char*>(at);
  held.size = bytes;
  return held.at;
}

std::int64_t SharedMemory::size() const {
  struct stat found {};
  if (::fstat(held_->descriptor.get(), &found) != 0)
    fail(ErrorKind::Communication, "another rank's memory cannot be read", errno, kRemedy);
  return found.st_size;
}

at::Tensor SharedMemory::bytes(std::int64_t begin, std::int64_t size) const {
  if (size == 0) return at::empty({0}, at::kByte);
  const auto length = static_cast<size_t>(size);
  void* at = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, held_->descriptor.get(), begin);
  if (at == MAP_FAILED) fail(ErrorKind::ExecutionFailed, "another rank's memory cannot be read", errno, kRemedy);
  return at::from_blob(at, {size}, [length](void* mapped) { ::munmap(mapped, length); }, at::kByte);
}

}  // namespace plumb
