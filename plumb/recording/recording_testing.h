// A folder of a test's own, and bytes of files in it.
#pragma once

#include <ATen/ATen.h>

#include "plumb/core/folder_testing.h"

namespace plumb::testing_recording {

namespace fs = std::filesystem;

using folder_testing::slurp;
using folder_testing::spill;

class Recording : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    at::manual_seed(4);
  }
  fs::path file(const std::string& name = "run.history") const { return folder_ / name; }
};

}  // namespace plumb::testing_recording
