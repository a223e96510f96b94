// A file that appears under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

namespace plumb {

// Written beside `path`, renamed by commit(), removed if commit() was not reached. Throws Error (BadFile).
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  // Returns how much was written. Does not throw, so that C code may call it: check() and commit() do.
  size_t write(const void* data, size_t size);
  void check();
  void commit();

 private:
  [[noreturn]] void fail(const char* what);
  std::string path_, temporary_;
  std::FILE* file_ = nullptr;
  int error_ = 0, slot_ = -1;
};

// Removes the files of this process that were not committed yet. Safe in a signal handler, before the process ends.
void remove_temporary_files() noexcept;

}  // namespace plumb
