#include "plumb/core/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/system_remedy.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

// Names of open files for the signal handler, one a slot. Files beyond the number of slots are left out.
constexpr int kSlots = 16;
std::atomic<const char*> open_files[kSlots];
std::atomic<bool> written = false;

int take_slot(const char* path) {
  for (int i = 0; i < kSlots; ++i) {
    const char* none = nullptr;
    if (open_files[i].compare_exchange_strong(none, path)) return i;
  }
  return -1;
}

std::string name_of(int file) { return "/proc/self/fd/" + std::to_string(file); }

// Follows links, also to a file that does not exist yet.
fs::path target_of(fs::path path) {
  std::error_code error;
  for (int links = 0; links < 40 && fs::is_symlink(path, error); ++links) {
    const fs::path next = fs::read_symlink(path, error);
    if (error) break;
    path = next.is_absolute() ? next : path.parent_path() / next;
  }
  return path;
}

// Returns a name beside the target that no other file has: process numbers repeat (in containers every first process is
// 1), and folders are shared. Not made of the file's name, which may be as long as names can be.
std::string random_name(const fs::path& folder) {
  uint64_t number = 0;
  if (::getentropy(&number, sizeof number) != 0) number = std::random_device()();
  char name[40];
  std::snprintf(name, sizeof name, ".plumb.%016llx.part", static_cast<unsigned long long>(number));
  return (folder / name).string();
}

// Calls `make` with new names as long as one is another file's.
template <class Make>
std::string make_named(const fs::path& folder, const Make& make) {
  std::string name;
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (make(name = random_name(folder)) || errno != EEXIST) break;
  }
  return name;
}

// Returns a file without a name, so that a process that is killed leaves nothing. Null where the file system has no
// such files or where it could not be given a name later.
std::FILE* unnamed_file(const fs::path& folder) {
  const int file = ::open(folder.empty() ? "." : folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  if (file < 0) return nullptr;
  std::FILE* stream = ::access(name_of(file).c_str(), F_OK) == 0 ? ::fdopen(file, "wb") : nullptr;
  if (!stream) ::close(file);
  return stream;
}

}  // namespace

void remove_temporary_files() noexcept {
  for (auto& slot : open_files) {
    if (const char* path = slot.load()) ::unlink(path);
  }
}

bool was_any_file_written() noexcept { return written; }

OutputFile::OutputFile(std::string path) : path_(std::move(path)) {
  const fs::path target = target_of(path_);
  target_ = target.string();
  struct stat old {};
  const bool exists = ::stat(target_.c_str(), &old) == 0;
  if (!exists && errno != ENOENT) fail(errno);  // links in a circle, say: nothing takes their place
  if (target_.empty()) fail(ENOENT);
  if (path_.find('\0') != path_.npos) fail(EINVAL);  // the system would end the name there
  if (exists ? S_ISDIR(old.st_mode) : target.filename().empty()) fail(EISDIR);
  if (exists && !S_ISREG(old.st_mode)) {
    if (::access(target_.c_str(), W_OK) != 0) fail(errno);
    return;
  }
  temporary_ = "a name that is made in commit()";
  file_ = unnamed_file(target.parent_path());
  unnamed_ = file_ != nullptr;
  if (!unnamed_) {
    temporary_ = make_named(target.parent_path(), [&](const std::string& tried) {
      return (file_ = std::fopen(tried.c_str(), "wbxe")) != nullptr;
    });
  }
  if (!file_) {
    temporary_.clear();
    fail(errno);
  }
  if (!unnamed_) slot_ = take_slot(temporary_.c_str());
  if (exists) (void)::fchmod(::fileno(file_), old.st_mode & 07777);  // file systems without permissions refuse
}

OutputFile::~OutputFile() {
  if (file_) std::fclose(file_);
  if (!temporary_.empty() && !unnamed_) ::unlink(temporary_.c_str());
  if (slot_ >= 0) open_files[slot_] = nullptr;
}

void OutputFile::fail(int reason) const {
  throw Error(ErrorKind::CannotWrite, path_ + ": cannot be written: " + std::strerror(reason), "",
              system_remedy(reason, "name a file in a folder that can be written and has room"));
}

void OutputFile::open_special() {
  const int file = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (file >= 0) file_ = ::fdopen(file, "wb");
  if (file_) return;
  error_ = errno ? errno : EIO;
  if (file >= 0) ::close(file);
}

size_t OutputFile::write(const void* data, size_t size) noexcept {
  if (!file_ && !error_) open_special();
  if (error_ || size == 0) return size;
  errno = 0;
  if (std::fwrite(data, 1, size, file_) != size) error_ = errno ? errno : EIO;
  return size;
}

void OutputFile::check() const {
  if (error_) fail(error_);
}

void OutputFile::commit() {
  write("", 0);
  check();
  const bool special = temporary_.empty();
  std::FILE* file = std::exchange(file_, nullptr);
  if (std::fflush(file) != 0) error_ = errno;
  if (!error_ && !special && ::fsync(::fileno(file)) != 0 && errno != EINVAL) error_ = errno;
  if (!error_ && unnamed_) {
    const std::string unnamed = name_of(::fileno(file));
    temporary_ = make_named(fs::path(target_).parent_path(), [&](const std::string& tried) {
      unnamed_ = ::linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, tried.c_str(), AT_SYMLINK_FOLLOW) != 0;
      return !unnamed_;
    });
    if (unnamed_) error_ = errno;
    if (!unnamed_) slot_ = take_slot(temporary_.c_str());
  }
  if (std::fclose(file) != 0 && !error_) error_ = errno;
  if (!error_ && !special && std::rename(temporary_.c_str(), target_.c_str()) != 0) error_ = errno;
  check();
  written = true;
  if (slot_ >= 0) open_files[slot_] = nullptr;
  slot_ = -1;
  temporary_.clear();
}

void write_file_atomically(const fs::path& path, std::string_view contents) {
  std::error_code left_to_the_file;  // which names the path and the reason
  if (path.has_parent_path()) fs::create_directories(path.parent_path(), left_to_the_file);
  OutputFile file(path.string());
  file.write(contents.data(), contents.size());
  file.commit();
}

}  // namespace plumb
