// Inputs of capture_call() besides tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/capture/capture.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using at::Tensor;
using testing::HasSubstr;

const Tensor x = at::arange(12, at::kFloat).view({3, 4});

TEST(CaptureInputs, AGraphRefusesOtherNumbersAndTextsThanItWasMadeFor) {
  torch::nn::Module none;
  const auto f = [](Tensor x, double scale, int64_t shift, bool minus, std::string how) {
    const Tensor y = x * scale + shift;
    return how == "square" ? y * y : minus ? -y : y;
  };
  auto graph = capture_call(none, f, {}, x, 2.0, int64_t{3}, true, std::string("as it is"));
  const auto run = [&](std::vector<c10::IValue> inputs) { return graph->forward(std::move(inputs)).toTensor(); };
  EXPECT_TRUE(at::equal(run({x, 2.0, 3, true, "as it is"}), f(x, 2.0, 3, true, "as it is")));
  EXPECT_THAT(message_of([&] { run({x, 2.5, 3, true, "as it is"}); }), HasSubstr("input 'x1' is fixed to 2"));
  EXPECT_THAT(message_of([&] { run({x, 2.0, 4, true, "as it is"}); }), HasSubstr("input 'x2' is fixed to 3"));
  EXPECT_THAT(message_of([&] { run({x, 2.0, 3, false, "as it is"}); }), HasSubstr("input 'x3' is fixed to True"));
  EXPECT_THAT(message_of([&] { run({x, 2.0, 3, true, "square"}); }), HasSubstr("input 'x4' is fixed to 'as it is'"));
  EXPECT_THAT(message_of([&] { run({x, x, 3, true, "as it is"}); }),
              HasSubstr("input 'x1' should be a number, got f32"));
  EXPECT_THAT(message_of([&] { run({x, c10::IValue(), 3, true, "as it is"}); }), HasSubstr("should be a number"));
  EXPECT_THAT(message_of([&] { run({x, 2.0, 3.0, true, "as it is"}); }),
              HasSubstr("input 'x2' should be a whole number, got Double"));
}

TEST(CaptureInputs, TensorsInListsTuplesAndDictsAreInputs) {
  torch::nn::Module none;
  using Dict = c10::Dict<std::string, Tensor>;
  using Pair = std::tuple<Tensor, std::vector<int64_t>>;
  const auto f = [](std::vector<Tensor> list, Pair pair, Dict dict, std::optional<Tensor> maybe) {
    const Tensor y =
        list[0] - 2 * list[1] + std::get<0>(pair).reshape(std::get<1>(pair)) - 3 * dict.at("a") / dict.at("b");
    return maybe ? y * *maybe : y;
  };
  const auto dict = [](Tensor a, Tensor b) {
    Dict made;
    made.insert("a", std::move(a));
    made.insert("b", std::move(b));
    return made;
  };
  auto graph = capture_call(none, f, {}, std::vector<Tensor>{x, x + 1}, Pair{x.view({12}), {3, 4}}, dict(x, x + 2),
                            std::optional<Tensor>());
  EXPECT_TRUE(graph->state().names(AttrKind::Constant).empty());
  const std::vector<Tensor> list{x * 5, x - 7};
  const Pair pair{(x * x).view({12}), {3, 4}};
  const Tensor want = f(list, pair, dict(x + 3, x + 4), {});
  EXPECT_TRUE(at::equal(graph->forward({list, pair, dict(x + 3, x + 4), {}}).toTensor(), want));
  Dict turned;  // an order of insertion is no part of a dict's value
  turned.insert("b", x + 4);
  turned.insert("a", x + 3);
  EXPECT_TRUE(at::equal(graph->forward({list, pair, turned, {}}).toTensor(), want));
  Dict other_keys;
  other_keys.insert("b", x);
  other_keys.insert("c", x);
  EXPECT_THAT(message_of([&] { graph->forward({list, pair, other_keys, {}}); }),
              HasSubstr("expected are those of {a: *, b: *}"));
  const Pair other{(x * x).view({12}), {4, 3}};
  EXPECT_THAT(message_of([&] { graph->forward({list, other, dict(x, x), {}}); }), HasSubstr("is fixed to 3"));
}

TEST(CaptureInputs, AValueThatNoRunCanCheckIsRefused) {
  torch::nn::Module none;
  const auto f = [](Tensor x, at::Device device) { return x.to(device) * 2; };
  EXPECT_THAT(message_of([&] { capture_call(none, f, {}, x, at::Device(at::kCPU)); }),
              HasSubstr("input 1 is a Device"));
}

struct AsksModeImpl : torch::nn::Module {
  AsksModeImpl() { register_module("layer", layer); }
  Tensor forward(Tensor x) {
    const Tensor y = layer(x);
    if (fails && !is_training()) throw std::runtime_error("for training only");
    return asks && !is_training() ? y.softmax(-1) : y;
  }
  torch::nn::Linear layer{4, 4};
  bool asks = true, fails = false;
};
TORCH_MODULE(AsksMode);

TEST(CaptureInputs, AForwardThatAsksForItsTrainingModeMakesAGraphThatRefusesTheOther) {
  AsksMode model;
  for (const bool training : {true, false}) {
    model->train(training);
    auto graph = capture(model, x);
    EXPECT_EQ(model->is_training(), training);
    EXPECT_EQ(model->layer->is_training(), training);
    EXPECT_THAT(message_of([&] { graph->train(!training); }), HasSubstr("the forward reads its training mode"));
    EXPECT_TRUE(at::equal((*graph)(x), model(x)));
  }
  model->train();
  model->fails = true;
  EXPECT_THAT(message_of([&] { capture(model, x)->eval(); }), HasSubstr("cannot change to evaluation mode"));
  EXPECT_TRUE(model->is_training());
  model->asks = model->fails = false;
  auto graph = capture(model, x);
  graph->eval();
  EXPECT_TRUE(at::equal((*graph)(x), model(x)));
}

}  // namespace
}  // namespace plumb
