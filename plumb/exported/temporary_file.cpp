#include "plumb/exported/temporary_file.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "plumb/core/error.h"

namespace plumb {

namespace {

// What a signal handler may look at: one open file a slot. More files at once than slots are left out.
constexpr int kSlots = 16;
std::atomic<const char*> open_files[kSlots];

int take_slot(const char* path) {
  for (int i = 0; i < kSlots; ++i) {
    const char* none = nullptr;
    if (open_files[i].compare_exchange_strong(none, path)) return i;
  }
  return -1;
}

}  // namespace

void remove_temporary_files() noexcept {
  for (auto& slot : open_files) {
    if (const char* path = slot.load()) ::unlink(path);
  }
}

TemporaryFile::TemporaryFile(std::string path) : path_(std::move(path)) {
  static std::atomic<unsigned> counter{0};
  temporary_ = path_ + "." + std::to_string(::getpid()) + "." + std::to_string(counter++) + ".part";
  file_ = std::fopen(temporary_.c_str(), "wbxe");
  if (!file_) fail("cannot be written");
  slot_ = take_slot(temporary_.c_str());
}

TemporaryFile::~TemporaryFile() {
  if (file_) std::fclose(file_);
  if (slot_ >= 0) open_files[slot_] = nullptr;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void TemporaryFile::fail(const char* what) {
  throw Error(ErrorKind::CannotWrite, path_ + ": " + what + ": " + std::strerror(errno), "",
              "check the folder, its permissions and the space left");
}

size_t TemporaryFile::write(const void* data, size_t size) {
  const size_t done = size && !error_ ? std::fwrite(data, 1, size, file_) : 0;
  if (done != size && !error_) error_ = errno ? errno : EIO;
  return done;
}

void TemporaryFile::check() {
  errno = error_;
  if (error_) fail("cannot be written");
}

void TemporaryFile::commit() {
  check();
  std::FILE* file = file_;
  file_ = nullptr;
  const bool flushed = std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  const int error = errno;
  if (std::fclose(file) != 0 || !flushed) {
    if (!flushed) errno = error;
    fail("cannot be written");
  }
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be put in place");
  if (slot_ >= 0) open_files[slot_] = nullptr;
  slot_ = -1;
  temporary_.clear();
}

}  // namespace plumb
