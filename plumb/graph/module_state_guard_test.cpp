#include "plumb/graph/module_state_guard.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace plumb {
namespace {

State state_with(const at::Tensor& parameter, const at::Tensor& buffer) {
  State state;
  state.add({"w", AttrKind::Parameter, parameter, true});
  state.add({"b", AttrKind::Buffer, buffer, true});
  return state;
}

TEST(ModuleStateGuard, PutsBackContentsThatWereAboutToBeWritten) {
  const at::Tensor w = at::ones({2}), b = at::zeros({4});
  {
    ModuleStateGuard guard(state_with(w, b), {});
    const at::Tensor part = b.slice(0, 1, 3);
    guard.before_write(part);
    part.fill_(7);
    EXPECT_TRUE(guard.was_written(1));
    EXPECT_FALSE(guard.was_written(0));
  }
  EXPECT_TRUE(at::equal(b, at::zeros({4})));
}

TEST(ModuleStateGuard, PutsBackTheMemoryOfATensorThatWasResizedOrGivenAnother) {
  at::Tensor w = at::ones({2}), b = at::zeros({0});
  const void* memory = w.data_ptr();
  {
    ModuleStateGuard guard(state_with(w, b), {});
    guard.before_write(b);
    b.resize_({4}).fill_(7);
    guard.before_write(w);
    w.set_(at::zeros({3, 3}));
    w.fill_(1);
    EXPECT_EQ(guard.find_moved(), -1);
  }
  EXPECT_EQ(b.sizes(), (std::vector<int64_t>{0}));
  EXPECT_EQ(w.data_ptr(), memory);
  EXPECT_TRUE(at::equal(w, at::ones({2})));
}

TEST(ModuleStateGuard, FindsATensorThatWasGivenOtherMemoryUnseen) {
  at::Tensor w = at::ones({2}), b = at::zeros({2});
  {
    ModuleStateGuard guard(state_with(w, b), {});
    EXPECT_EQ(guard.find_moved(), -1);
    b.set_data(at::ones({2}));
    EXPECT_EQ(guard.find_moved(), 1);
  }
  EXPECT_TRUE(at::equal(b, at::zeros({2})));
}

TEST(ModuleStateGuard, LeavesAloneTensorsThatNobodyWrote) {
  const at::Tensor w = at::ones({2}), b = at::zeros({2});
  const auto version = b._version();
  { ModuleStateGuard guard(state_with(w, b), {}); }
  EXPECT_EQ(b._version(), version);
}

TEST(ModuleStateGuard, ForgetsWhatWasNotWrittenAfterAll) {
  const at::Tensor w = at::ones({2}), b = at::zeros({4});
  ModuleStateGuard guard(state_with(w, b), {});
  guard.before_write(w);
  guard.before_write(b);
  b.fill_(1);
  EXPECT_TRUE(guard.was_not_written(w));
  EXPECT_FALSE(guard.was_written(0));
  EXPECT_FALSE(guard.was_not_written(b));
  guard.put_contents_back();
  EXPECT_TRUE(at::equal(b, at::zeros({4})));
}

TEST(ModuleStateGuard, PutsBackParametersThatTheGraphWrites) {
  const at::Tensor w = at::ones({2}), b = at::zeros({2});
  const State state = state_with(w, b);
  const Graph graph = parse_graph(R"(graph {
    %w: f32[2] = get_attr "w"
    %added: f32[2] = aten::add_.Scalar(%w, 1)
    output(%added)
  })");
  {
    ModuleStateGuard guard(state, {});
    guard.keep_written(graph, state);
    EXPECT_TRUE(guard.was_written(0));
    w.fill_(7);
    b.fill_(7);  // by a function that the graph cannot look into
  }
  EXPECT_TRUE(at::equal(w, at::ones({2})));
  EXPECT_TRUE(at::equal(b, at::zeros({2})));
}

TEST(ModuleStateGuard, WatchesATiedTensorUnderItsFirstName) {
  const at::Tensor tied = at::ones({2});
  ModuleStateGuard guard(state_with(tied, tied), {});
  guard.before_write(tied);
  EXPECT_TRUE(guard.was_written(0));
  EXPECT_FALSE(guard.was_written(1));
}

TEST(ModuleStateGuard, WatchesConstantsThatAreMetLater) {
  const at::Tensor constant = at::ones({2});
  {
    ModuleStateGuard guard(State(), {});
    guard.watch(5, constant);
    guard.before_write(constant);
    constant.zero_();
    EXPECT_TRUE(guard.was_written(5));
  }
  EXPECT_TRUE(at::equal(constant, at::ones({2})));
}

TEST(ModuleStateGuard, PutsBackGradientsAndTheRandomState) {
  at::Tensor w = at::ones({2}).requires_grad_(), b = at::zeros({2});
  const at::Tensor grad = at::full({2}, 3.0);
  w.mutable_grad() = grad;
  at::manual_seed(3);
  const at::Tensor drawn = at::rand({3});
  at::manual_seed(3);
  {
    ModuleStateGuard guard(state_with(w, b), {});
    w.mutable_grad() = at::zeros({2});
    at::rand({10});
  }
  EXPECT_TRUE(w.grad().is_same(grad));
  EXPECT_TRUE(at::equal(at::rand({3}), drawn));
}

TEST(ModuleStateGuard, PutsBuffersAndRandomStateBackAsOftenAsAsked) {
  const at::Tensor w = at::ones({2}), b = at::zeros({4});
  const State state = state_with(w, b);
  ModuleStateGuard guard(state, {});
  guard.keep_written(Graph(), state);
  const at::Tensor drawn = at::rand({2});
  for (int run = 0; run < 2; ++run) {
    b.fill_(7);
    guard.put_contents_back();
    guard.put_generators_back();
    EXPECT_TRUE(at::equal(b, at::zeros({4})));
    EXPECT_TRUE(at::equal(at::rand({2}), drawn));
  }
  EXPECT_EQ(guard.generators().size(), 1u);
}

}  // namespace
}  // namespace plumb
