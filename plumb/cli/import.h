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
// python3. Raises ExitCode after Python has said what is wrong, and Error(ExecutionFailed) if there is no Python.
void import_folder(const ImportOptions& options);

// A folder of its own under the system's for temporary files, gone with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace plumb::cli
