#include "plumb/core/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "plumb/core/error.h"

namespace plumb {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& reason) {
  throw Error(ErrorKind::CannotWrite, "cannot write \"" + path.string() + "\": " + reason, "",
              "name a file in a folder that can be written and has room");
}

// Where a link leads, so that the rename replaces the file and not the link.
std::filesystem::path target_of(const std::filesystem::path& path) {
  std::error_code none;
  if (!std::filesystem::is_symlink(path, none)) return path;
  std::error_code error;
  std::filesystem::path target = std::filesystem::weakly_canonical(path, error);
  if (error) fail(path, error.message());
  return target;
}

}  // namespace

void write_file_atomically(const std::filesystem::path& path, std::string_view contents) {
  const std::filesystem::path target = target_of(path);
  std::error_code error;
  if (target.filename().empty() || std::filesystem::is_directory(target, error)) fail(path, "it names a folder");
  if (target.has_parent_path()) {
    std::filesystem::create_directories(target.parent_path(), error);
    if (error) fail(path, error.message());
  }
  // Threads of this process and other processes may write the same file at the same time.
  static std::atomic<unsigned> count = 0;
  const std::string beside = target.string() + "." + std::to_string(getpid()) + "." + std::to_string(count++) + ".part";
  const int file = open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) fail(path, std::strerror(errno));
  int reason = 0;
  struct stat old {};
  if (stat(target.c_str(), &old) == 0 && fchmod(file, old.st_mode & 07777) != 0) reason = errno;
  while (!contents.empty() && reason == 0) {
    const ssize_t n = write(file, contents.data(), contents.size());
    if (n < 0 && errno != EINTR) reason = errno;
    if (n > 0) contents.remove_prefix(static_cast<size_t>(n));
  }
  if (reason == 0 && fsync(file) != 0 && errno != EINVAL) reason = errno;
  if (close(file) != 0 && reason == 0) reason = errno;
  if (reason == 0 && rename(beside.c_str(), target.c_str()) != 0) reason = errno;
  if (reason != 0) {
    unlink(beside.c_str());
    fail(path, std::strerror(reason));
  }
}

}  // namespace plumb
