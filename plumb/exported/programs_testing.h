// The programs of testdata/make_programs.py, made by Python and kept in the build folder; and files to break.
#pragma once

#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "plumb/core/folder_testing.h"
#include "plumb/exported/tensor_files/pickle_file.h"

namespace plumb::testing {

namespace fs = std::filesystem;

using folder_testing::slurp;
using folder_testing::spill;

inline const fs::path& programs_script() {
  static const fs::path path = fs::path(PLUMB_SOURCE_DIR) / "plumb/exported/testdata/make_programs.py";
  return path;
}

// Runs Python; what it printed goes to `said`.
inline int python(const std::string& arguments, std::string* said = nullptr) {
  const fs::path log = fs::path(PLUMB_BINARY_DIR) / ("tests/python." + std::to_string(::getpid()) + ".log");
  const std::string command = "OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 '" PLUMB_TEST_PYTHON "' " + arguments +
                              " > '" + log.string() + "' 2>&1";
  const int status = std::system(command.c_str());
  if (said) *said = slurp(log);
  fs::remove(log);
  return status;
}

// Returns the settings that choose torch's kernels, and so the last bits of results: the CPU's, the environment's.
inline std::string kernel_settings() {
  std::set<std::string> lines;  // a shell changes the order of variables
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view each = *entry;
    for (const char* start : {"ATEN_", "DNNL_", "LD_PRELOAD=", "MKL_", "ONEDNN_", "TORCH_"}) {
      if (each.starts_with(start)) lines.emplace(each);
    }
  }
  std::ifstream cpu("/proc/cpuinfo");
  for (std::string line; std::getline(cpu, line) && !line.empty();) {
    if (line.starts_with("model name") || line.starts_with("flags")) lines.insert(line);
  }
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// Returns the folder of programs; made when it is missing, the scripts have changed, or they ran with other kernels.
// Suites run side by side: the first makes it, the others wait.
inline const fs::path& programs() {
  static const fs::path folder = [] {
    const fs::path where = fs::path(PLUMB_BINARY_DIR) / "tests/programs";
    const std::unique_ptr<FILE, int (*)(FILE*)> lock(std::fopen((where.string() + ".lock").c_str(), "a"), std::fclose);
    if (!lock || ::flock(::fileno(lock.get()), LOCK_EX) != 0) throw std::runtime_error("cannot lock " + where.string());
    const fs::path stamp = where / "stamp";
    const std::string script = slurp(programs_script()) + slurp(programs_script().parent_path() / "run_programs.py") +
                               slurp(fs::path(PLUMB_SOURCE_DIR) / "examples/gpt.py") + kernel_settings();
    if (slurp(stamp) == script) return where;
    fs::remove_all(where);
    fs::create_directories(where);
    std::string said;
    if (python("'" + programs_script().string() + "' make '" + where.string() + "'", &said) != 0)
      throw std::runtime_error("make_programs.py failed:\n" + said);
    spill(stamp, script);
    return where;
  }();
  return folder;
}

inline std::vector<std::string> program_names() {
  std::vector<std::string> names;
  constexpr std::string_view ending = ".expect.pt";
  for (const auto& entry : fs::directory_iterator(programs())) {
    const std::string file = entry.path().filename().string();
    if (file.ends_with(ending)) names.push_back(file.substr(0, file.size() - ending.size()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Python's word on a program: cases of inputs, outputs, gradients, buffers.
struct Expected {
  explicit Expected(const std::string& name)
      : dict(unpickle_file(programs() / (name + ".expect.pt")).toGenericDict()) {}
  std::vector<c10::impl::GenericDict> cases() const {
    std::vector<c10::impl::GenericDict> all;
    for (const c10::IValue& e : dict.at("cases").toListRef()) all.push_back(e.toGenericDict());
    return all;
  }
  c10::impl::GenericDict dict;
};

inline std::vector<c10::IValue> items(const c10::IValue& list) {
  auto ref = list.toListRef();
  return std::vector<c10::IValue>(ref.begin(), ref.end());
}

// Equal bit for bit: dtype, shape and every byte; numbers and None likewise.
inline ::testing::AssertionResult same(const c10::IValue& a, const c10::IValue& b) {
  if (!a.isTensor() || !b.isTensor()) {
    if (a.tagKind() != b.tagKind()) return ::testing::AssertionFailure() << a.tagKind() << " and " << b.tagKind();
    return a == b ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << a << " and " << b;
  }
  const at::Tensor x = a.toTensor().detach().contiguous(), y = b.toTensor().detach().contiguous();
  if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes())
    return ::testing::AssertionFailure() << x.toString() << x.sizes() << " and " << y.toString() << y.sizes();
  if (x.numel() && std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) != 0)
    return ::testing::AssertionFailure() << "differ by up to "
                                         << (x.to(at::kDouble) - y.to(at::kDouble)).abs().max().item<double>();
  return ::testing::AssertionSuccess();
}

}  // namespace plumb::testing
