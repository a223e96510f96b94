// Programs from folders of transformers, through Python.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace plumb::cli {

struct ImportOptions {
  std::string folder, output, dtype = "auto";
  int64_t batch = 1, length = 0;  // 0: the config's longest, at most 2048
  bool training = true;
  std::optional<int64_t> fresh;  // a seed: fresh weights, in the file
};

// Runs plumb.hf in Python, which writes the file: Python is $PLUMB_PYTHON (the installed command sets it), else
// python3. Throws ExitCode after Python has printed its error, and Error(ExecutionFailed) if there is no Python.
void import_folder(const ImportOptions& options);

// A file to be written under this name, in a folder of its own under the system's for temporary files. Both are gone
// with the object. One at a time.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

  // Removes the existing one. Safe in a signal handler, before the process ends.
  static void remove() noexcept;

 private:
  std::string folder_, path_;
};

}  // namespace plumb::cli
