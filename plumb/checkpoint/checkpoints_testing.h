// Checkpoints of small tensors whose values show the step.
#pragma once

#include <ATen/ATen.h>

#include "plumb/checkpoint/checkpoint.h"
#include "plumb/checkpoint/checkpoint_writer.h"
#include "plumb/core/folder_testing.h"

namespace plumb {

class Checkpoints : public FolderTest {
 protected:
  // Returns tensors whose values show the step.
  static CheckpointPart part(double step, int64_t size = 4) {
    return {{{"a.weight", at::full({2, size}, step)}, {"b.weight", at::full({size}, step + 0.5)}},
            {{"exp_avg/a.weight", at::full({2, size}, -step)}}};
  }
  static void expect_step(const Checkpoint& c, int64_t step) {
    EXPECT_EQ(c.step(), step);
    EXPECT_TRUE(at::equal(c.read("a.weight"), at::full({2, 4}, double(step))));
    EXPECT_TRUE(at::equal(c.read("b.weight"), at::full({4}, step + 0.5)));
    EXPECT_TRUE(at::equal(c.read_optimizer("exp_avg/a.weight"), at::full({2, 4}, -double(step))));
  }
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& e : std::filesystem::directory_iterator(folder_)) {
      if (e.path().filename().string()[0] != '.') names.push_back(e.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
};

}  // namespace plumb
