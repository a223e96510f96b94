// NVRTC, NVIDIA's run-time compiler, opened at run time: torch's CUDA wheels bring it. It needs no GPU.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace plumb::cuda {

class Compiler {
 public:
  // Opens NVRTC: PLUMB_NVRTC in the environment (a path; nothing else is tried then), what torch's environment has
  // (nvidia/*/lib beside torch), the system's. `major` is the version to prefer, 0 where it does not matter. Throws
  // Error(Unsupported) that says what was tried.
  static Compiler open(int major = 0);

  // "13.5"
  const std::string& version() const { return version_; }
  const std::string& path() const { return path_; }
  // Returns whether it knows an architecture ("sm_90a": its number decides).
  bool knows(const std::string& architecture) const;

  // Returns a binary for `architecture`. Throws Error(ExecutionFailed) with the compiler's own words.
  std::vector<char> compile(const std::string& text, const std::string& architecture) const;

  // Options that decide the binary, beside text and version.
  static std::vector<std::string> options(const std::string& architecture);

 private:
  Compiler() = default;
  void load(const std::string& path);

  std::string path_, version_;
  std::vector<int> architectures_;
  struct Functions;
  std::shared_ptr<const Functions> functions_;  // functions of the NVRTC library, which stays open
};

}  // namespace plumb::cuda
