// Files that are read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace plumb {

// An open file that closes itself. Regular files alone: a FIFO or a device may have no end, or keep its reader waiting.
// Throws Error(BadFile) that names the path and the system's reason.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  uint64_t size() const { return size_; }  // when it was opened
  // Reads `size` bytes at `offset`. Throws if the file ends before, as it may by now.
  void read_at(uint64_t offset, void* into, uint64_t size) const;

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& remedy = "") const;
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

// Returns the whole file, of at most `most` bytes: texts are no larger, and a file of holes has any size.
std::string read_file(const std::filesystem::path& path, uint64_t most = uint64_t{1} << 30);

// Returns read_file() of a file in an untrusted folder. Throws Error(BadFile) for a symbolic link that leads out of the
// folder, except into the `blobs` of the hub's cache that the folder is a snapshot of.
std::string read_file_of_folder(const std::filesystem::path& folder, const std::string& name, uint64_t most);

}  // namespace plumb
