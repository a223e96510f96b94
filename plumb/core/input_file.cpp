#include "plumb/core/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/system_remedy.h"

namespace plumb {

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  if (path_.find('\0') != path_.npos) fail("a file's name has no zero byte");
  // Without waiting: opening a FIFO would otherwise last until a process writes to it.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat info {};
  if (descriptor_ < 0 || ::fstat(descriptor_, &info) != 0) {
    fail(std::string("cannot be opened: ") + std::strerror(errno),
         system_remedy(errno, "check the path and its permissions"));
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(descriptor_);
    fail(S_ISDIR(info.st_mode) ? "is a folder" : "is not a regular file", "name a regular file");
  }
  size_ = static_cast<uint64_t>(info.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::fail(const std::string& what, const std::string& remedy) const {
  throw Error(ErrorKind::BadFile, path_ + ": " + what, "", remedy);
}

void InputFile::read_at(uint64_t offset, void* into, uint64_t size) const {
  auto* to = static_cast<char*>(into);
  while (size) {
    const ssize_t got =
        ::pread(descriptor_, to, std::min<uint64_t>(size, uint64_t{1} << 30), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(std::string("cannot be read: ") + std::strerror(errno));
    if (got == 0) fail("ends before byte " + std::to_string(offset + size));
    to += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<uint64_t>(got);
  }
}

std::string read_file(const std::filesystem::path& path, uint64_t most) {
  const InputFile file(path.string());
  if (file.size() > most) {
    throw Error(ErrorKind::BadFile,
                path.string() + ": has " + std::to_string(file.size()) + " bytes; " + std::to_string(most) +
                    " are the most that are read of such a file",
                "", "look whether this is the file that was meant");
  }
  std::string bytes(file.size(), '\0');
  file.read_at(0, bytes.data(), bytes.size());
  return bytes;
}

std::string read_file_of_folder(const std::filesystem::path& folder, const std::string& name, uint64_t most) {
  namespace fs = std::filesystem;
  std::error_code missing, ignored;
  const fs::path real = fs::canonical(folder / name, missing), root = fs::canonical(folder, ignored);
  const auto is_in = [&](const fs::path& top) {
    return std::mismatch(top.begin(), top.end(), real.begin(), real.end()).first == top.end();
  };
  bool inside = missing || is_in(root);
  // models--NAME/snapshots/REVISION/tokenizer.json is a link to models--NAME/blobs/HASH.
  for (fs::path at = root; !inside && at.has_relative_path(); at = at.parent_path())
    inside = at.parent_path().filename() == "snapshots" && is_in(at.parent_path().parent_path() / "blobs");
  if (!inside) {
    throw Error(ErrorKind::BadFile,
                (folder / name).string() + ": is a symbolic link that leads out of the folder, to " + real.string(), "",
                "a copy of that file in the folder, if it belongs there");
  }
  return read_file(folder / name, most);
}

}  // namespace plumb
