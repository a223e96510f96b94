#include "plumb/partition/stage_specializer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/capture/captured_model.h"
#include "plumb/core/error.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

// The boundary hides the length, which the second stage uses.
struct PooledImpl : torch::nn::Module {
  PooledImpl() {
    up = register_module("up", torch::nn::Linear(4, 6));
    drop = register_module("drop", torch::nn::Dropout(0.5));
    down = register_module("down", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    return down(drop(up(x)).sum(1)) / static_cast<double>(x.size(1)) + at::arange(3);
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::Dropout drop{nullptr};
};
TORCH_MODULE(Pooled);

struct Cut {
  Pooled model;
  SplitOptions options;
  std::shared_ptr<Pipe> pipe;
  std::shared_ptr<StageSpecializer> specializer;

  explicit Cut(bool training = false) {
    at::manual_seed(0);
    model->train(training);
    const at::Tensor x = at::ones({2, 5, 4});
    options.points.emplace_back("down", SplitPoint::Beginning);
    auto copy = model;
    pipe = pipeline(*capture(copy, x), options);
    specializer = specialize_on_sizes(*pipe, model, options, x);
  }
  at::Tensor run(const at::Tensor& x, const ModelSizes& sizes) const {
    std::vector<c10::IValue> values{x};
    for (int s = 0; s < 2; ++s) values = specializer->stage(s, sizes, *pipe->stage(s))->run(values);
    return values[0].toTensor();
  }
};

TEST(StageSpecializer, GivesAStageAGraphForSizesThatItsInputsDoNotShow) {
  const Cut cut;
  for (const std::vector<int64_t> sizes : {std::vector<int64_t>{7, 3, 4}, {2, 9, 4}, {2, 5, 4}, {7, 3, 4}}) {
    const at::Tensor x = at::randn(sizes);
    Pooled model = cut.model;
    EXPECT_TRUE(at::equal(cut.run(x, {{0, sizes}}), model->forward(x))) << at::IntArrayRef(sizes);
  }
  EXPECT_EQ(cut.specializer->captures(), 3);  // one for both stages, none for sizes that come again
}

TEST(StageSpecializer, SharesTheStagesTensorsWhateverBecameOfThem) {
  const Cut cut;
  const at::Tensor x = at::randn({3, 5, 4});
  const ModelSizes sizes{{0, {3, 5, 4}}};
  auto stage = cut.specializer->stage(1, sizes, *cut.pipe->stage(1));
  EXPECT_TRUE(stage->state().get("down.weight").tensor.is_same(cut.model->down->weight));
  cut.pipe->stage(1)->state().set("down.weight", at::ones({3, 6}).requires_grad_());
  share_state(*cut.pipe->stage(1), *stage);
  const at::Tensor h = at::randn({3, 6});
  EXPECT_TRUE(at::equal(stage->run({h})[0].toTensor(),
                        at::linear(h, at::ones({3, 6}), cut.model->down->bias) / 5.0 + at::arange(3)));
}

TEST(StageSpecializer, CapturesAsAtTheCutAndLeavesTheModelAsItIs) {
  const Cut cut(/*training=*/true);
  Pooled model = cut.model;
  model->eval();
  const at::Tensor before = at::detail::getDefaultCPUGenerator().get_state();
  std::shared_ptr<GraphModule> stage;
  {
    const c10::InferenceMode inference;
    stage = cut.specializer->stage(0, {{0, {3, 5, 4}}}, *cut.pipe->stage(0));
  }
  EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  EXPECT_FALSE(model->is_training() || model->drop->is_training());
  EXPECT_TRUE(stage->is_training());
  EXPECT_THAT(to_string(stage->graph()), testing::HasSubstr("dropout(%"));
  EXPECT_TRUE(stage->run({at::ones({3, 5, 4})})[0].toTensor().requires_grad());
}

TEST(StageSpecializer, RefusesWhatItCannotDoAndSaysWhy) {
  Cut cut;
  const auto refuses = [&](int index, std::vector<int64_t> sizes, ErrorKind kind, const char* text) {
    const Error error = error_of([&] { cut.specializer->stage(index, {{0, std::move(sizes)}}, *cut.pipe->stage(1)); });
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_THAT(error.what(), testing::HasSubstr(text));
  };
  refuses(2, {2, 5, 4}, ErrorKind::InvalidArgument, "the pipe has no stage 2");
  refuses(1, {2, 5}, ErrorKind::TensorMismatch, "number of dimensions may not change");
  refuses(1, {2, 5, 7}, ErrorKind::ExecutionFailed, "stage 1 needs a graph for 'x0' f32[2, 5, 7]: ");
  cut.model = nullptr;
  refuses(1, {3, 5, 4}, ErrorKind::InvalidState, "no longer exists\n  try: keep the model");
}

TEST(StageSpecializer, RefusesAModelThatIsCutOtherwise) {
  const Cut cut;
  SplitOptions other;
  other.points.emplace_back("up", SplitPoint::End);
  StageSpecializer specializer(*cut.pipe, {at::ones({2, 5, 4})}, [&](const std::vector<c10::IValue>& in) {
    auto copy = cut.model;
    return pipeline(*capture(copy, in[0].toTensor()), other);
  });
  const Error error = error_of([&] { specializer.stage(0, {{0, {3, 5, 4}}}, *cut.pipe->stage(0)); });
  EXPECT_EQ(error.kind(), ErrorKind::Partition);
  EXPECT_THAT(error.what(), testing::HasSubstr("the model is cut otherwise"));
}

TEST(StageSpecializer, SizesTravelAsOneRow) {
  const ModelSizes sizes{{0, {3, 5}}, {2, {}}, {7, {1}}};
  EXPECT_EQ(unpack_sizes(pack_sizes(sizes)), sizes);
  EXPECT_TRUE(unpack_sizes(pack_sizes({})).empty());
  for (const std::vector<int64_t>& row : {std::vector<int64_t>{0, 3, 1}, {-1, 0}, {0}, {0, 1, 5, 2}, {0, 1, -5}})
    EXPECT_THAT(message_of([&] { unpack_sizes(row); }), testing::HasSubstr("damaged"));
}

}  // namespace
}  // namespace plumb
