#include "plumb/core/freed_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

// A sanitizer brings a heap of its own.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define GLIBC_HEAP
#include <malloc.h>
#endif

#include "plumb/pipeline/runtime/runtime.h"

namespace plumb {
namespace {

#ifdef GLIBC_HEAP
// Returns whether a block just under glibc's largest threshold still gets a mapping of its own, as in a fresh process.
bool maps_large_blocks() {
  const auto before = mallinfo2().hblks;
  void* volatile block = std::malloc(size_t(31) << 20);
  const bool mapped = mallinfo2().hblks > before;
  // Freed it would raise the threshold itself.
  if (!mapped) std::free(block);
  return mapped;
}

void run_a_graph_and_a_pipeline() {
  Graph graph = parse_graph(R"(graph {
    %x: f32[4, 4] = placeholder "x"
    %w: f32[4, 4] grad = get_attr "w"
    %y = aten::mm(%x, %w)
    output(%y)
  })");
  State state;
  state.add({"w", AttrKind::Parameter, at::ones({4, 4}).requires_grad_(true)});
  GraphModule module(std::move(graph), std::move(state), TreeSpec::positional_inputs(1), TreeSpec::leaf());
  module.run({at::ones({4, 4})})[0].toTensor().sum().backward();
  PipelineOptions options;
  options.loss = [](const Tensors& out, const Tensors&) { return out[0].sum(); };
  const at::Tensor w = at::ones({4}).requires_grad_(true);
  Pipeline pipeline(PipeTable::chain(1), parse_csv("0F0,0B0\n"),
                    {{0, std::make_shared<LambdaStage>([=](const Tensors& in) { return Tensors{in[0] * w}; },
                                                       std::vector<NamedTensor>{{"w", w}})}},
                    {}, options);
  pipeline.step({at::ones({2, 4})}, {});
}

// In a process of its own, which only this test has run in.
TEST(FreedMemoryDeathTest, OnlyWhoAsksChangesTheHeapsSettings) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        run_a_graph_and_a_pipeline();
        const bool as_it_was = maps_large_blocks();
        keep_freed_memory();
        keep_freed_memory();
        std::exit(as_it_was ? maps_large_blocks() ? 2 : 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
}  // namespace plumb
