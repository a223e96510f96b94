// A file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>

namespace plumb {

// The file has no name while it is written (where the file system knows such files; else one beside `path`, and it is
// removed if commit() is not reached). commit() names it `path`. A symbolic link stays, and its target is replaced; one
// that leads back to itself is an error. A device, a FIFO or another file that is not regular is written to directly,
// from the first write on. Throws Error(CannotWrite) that names the path and the system's reason.
class OutputFile {
 public:
  explicit OutputFile(std::string path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  // Returns `size` even if nothing could be written, and does not throw: torch's zip writer ends the process if writing
  // its end fails. check() and commit() throw the error.
  size_t write(const void* data, size_t size) noexcept;
  void check() const;
  void commit();

 private:
  [[noreturn]] void fail(int reason) const;
  void open_special();
  std::string path_, target_, temporary_;  // temporary_ is empty for a device
  std::FILE* file_ = nullptr;
  bool unnamed_ = false;  // it gets the name temporary_ in commit() only
  int error_ = 0, slot_ = -1;
};

// Writes these bytes through an OutputFile: readers see the old file or the new one, never half of it. A failed write
// leaves the old file as it was and nothing beside it. Folders that do not exist yet are made.
void write_file_atomically(const std::filesystem::path& path, std::string_view contents);

// Removes the files of this process that were not committed yet. Safe in a signal handler, before the process ends.
void remove_temporary_files() noexcept;
// Returns whether a file of this process was committed. Safe in a signal handler.
bool was_any_file_written() noexcept;

}  // namespace plumb
