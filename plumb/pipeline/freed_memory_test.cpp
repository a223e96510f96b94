#include "plumb/core/freed_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "plumb/pipeline/runtime.h"

namespace plumb {
namespace {

#ifdef __GLIBC__
TEST(FreedMemory, APipelinesLargeTensorsComeFromTheHeap) {
  const Pipeline pipeline(
      PipelineLayout::chain(1), parse_csv("0F0,0B0\n"),
      {{0, std::make_shared<LambdaStage>([](const Tensors& in) { return in; }, std::vector<NamedTensor>{})}}, {}, {});
  const auto before = mallinfo2();
  const at::Tensor large = at::empty({16 << 20}, at::kByte);  // of its own mapping, were the threshold what it was
  EXPECT_EQ(mallinfo2().hblks, before.hblks);
}
#endif

TEST(FreedMemory, MayBeAskedForAgain) {
  keep_freed_memory();
  keep_freed_memory();
  EXPECT_EQ(at::ones({3}).sum().item<float>(), 3);
}

}  // namespace
}  // namespace plumb
