// A folder of a test's own, and bytes of files in it.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace plumb::testing_recording {

namespace fs = std::filesystem;

inline std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void spill(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

class Recording : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "plumb_recording_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    at::manual_seed(4);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path file(const std::string& name = "run.history") const { return folder_ / name; }
  fs::path folder_;
};

}  // namespace plumb::testing_recording
