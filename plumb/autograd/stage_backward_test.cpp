#include "plumb/autograd/stage_backward.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "tests/message_of.h"

// Outside plumb's namespace, as a user's own function is.
namespace elsewhere {
struct CountedLinear : torch::autograd::Function<CountedLinear> {
  static inline int backwards = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return at::linear(x, w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list g) {
    backwards++;
    auto saved = ctx->get_saved_variables();
    return {at::mm(g[0], saved[1]), at::mm(g[0].t(), saved[0])};
  }
};
}  // namespace elsewhere

namespace plumb {
namespace {

using elsewhere::CountedLinear;

using Forward = std::function<Tensors(const Tensors&)>;

at::Tensor weight(at::IntArrayRef sizes) { return (at::randn(sizes) * 0.3).requires_grad_(true); }

struct Gradients {
  Tensors inputs, weights;
};

// Two "microbatches" each, so that accumulation into an existing .grad is covered too.
template <typename Run>
Gradients two_microbatches(const Tensors& weights, const Run& run) {
  for (const auto& w : weights) w.mutable_grad() = at::Tensor();
  Gradients g;
  for (int m = 0; m < 2; m++) {
    for (auto& t : run(m)) g.inputs.push_back(t);
  }
  for (const auto& w : weights) {
    g.weights.push_back(w.grad().defined() ? w.grad().clone() : at::Tensor());
    w.mutable_grad() = at::Tensor();
  }
  return g;
}

std::string difference(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < std::max(a.size(), b.size()); i++) {
    if (i >= a.size() || i >= b.size() || a[i].defined() != b[i].defined()) return "entry " + std::to_string(i);
    if (a[i].defined() && !at::equal(a[i], b[i])) return "values of entry " + std::to_string(i);
  }
  return "";
}

// Gradients of the whole backward and of the two halves, over boundary and leaves, equal backward()'s bit for bit.
void expect_equal_to_backward(const Forward& forward, const Tensors& inputs, const Tensors& weights) {
  auto values = [&](int m) {
    Tensors v;
    for (const auto& in : inputs) v.push_back(in.is_floating_point() ? (in * (m + 1.5)).detach() : in);
    return v;
  };
  auto flags = std::vector<bool>(inputs.size(), true);
  auto grads_of = [](const Tensors& outputs) {
    Tensors g;
    for (const auto& o : outputs)
      g.push_back(o.requires_grad() ? at::cos(at::arange(o.numel()).view(o.sizes())) : at::Tensor());
    return g;
  };
  auto eager = two_microbatches(weights, [&](int m) {
    Tensors leaves, out, grads, used;
    for (auto& v : values(m)) leaves.push_back(v.is_floating_point() ? v.requires_grad_(true) : v);
    // A first operator that keeps in-place stages legal on leaves: adds nothing to the arithmetic.
    Tensors aliased;
    for (auto& l : leaves) aliased.push_back(l.requires_grad() ? l.clone() : l);
    for (auto& o : forward(aliased)) {
      if (!o.requires_grad()) continue;
      used.push_back(o);
      grads.push_back(at::cos(at::arange(o.numel()).view(o.sizes())));
    }
    if (!used.empty()) torch::autograd::backward(used, grads);
    for (auto& l : leaves) out.push_back(l.grad());
    return out;
  });
  auto full = two_microbatches(weights, [&](int m) {
    InputBoundary boundary(values(m), flags);
    auto outputs = forward(boundary.inputs());
    return stage_backward(outputs, grads_of(outputs), boundary);
  });
  EXPECT_EQ(difference(full.inputs, eager.inputs), "") << "inputs, whole backward";
  EXPECT_EQ(difference(full.weights, eager.weights), "") << "weights, whole backward";
  for (bool keep : {false, true}) {
    auto halves = two_microbatches(weights, [&](int m) {
      InputBoundary boundary(values(m), flags);
      auto outputs = forward(boundary.inputs());
      Tensors before;
      for (auto& w : weights) before.push_back(w.grad().defined() ? w.grad().clone() : at::Tensor());
      auto half = stage_backward_input(outputs, grads_of(outputs), boundary, {}, keep);
      for (size_t i = 0; i < weights.size(); i++) {
        EXPECT_EQ(weights[i].grad().defined(), before[i].defined()) << "the input half touched weight " << i;
        if (before[i].defined()) EXPECT_TRUE(at::equal(weights[i].grad(), before[i])) << "weight " << i;
      }
      outputs.clear();
      stage_backward_weight(half.deferred);
      return half.input_grads;
    });
    EXPECT_EQ(difference(halves.inputs, eager.inputs), "") << "inputs, halves, keep_graph " << keep;
    EXPECT_EQ(difference(halves.weights, eager.weights), "") << "weights, halves, keep_graph " << keep;
  }
}

TEST(StageBackward, EqualsBackwardOnATransformerBlock) {
  at::manual_seed(1);
  const int d = 16;
  auto g1 = at::ones({d}).requires_grad_(true), b1 = weight({d}), qkv = weight({3 * d, d}), bq = weight({3 * d}),
       o = weight({d, d}), up = weight({4 * d, d}), bu = weight({4 * d}), down = weight({d, 4 * d});
  auto block = [&](const Tensors& in) -> Tensors {
    auto x = in[0];
    for (int layer = 0; layer < 2; layer++) {  // weights shared over the two layers
      auto p = at::linear(at::layer_norm(x, {d}, g1, b1), qkv, bq).split(d, -1);
      auto heads = [&](const at::Tensor& t) { return t.view({2, 8, 4, d / 4}).transpose(1, 2); };
      auto a = at::scaled_dot_product_attention(heads(p[0]), heads(p[1]), heads(p[2]), {}, 0.0, true);
      x = x + at::linear(a.transpose(1, 2).reshape({2, 8, d}), o);
      x = x + at::linear(at::gelu(at::linear(x, up, bu)), down);
    }
    return {x};
  };
  expect_equal_to_backward(block, {at::randn({2, 8, d})}, {g1, b1, qkv, bq, o, up, bu, down});
}

TEST(StageBackward, CountsAWeightUsedTwiceOnce) {
  auto w = weight({8, 8});
  expect_equal_to_backward(
      [&](const Tensors& in) -> Tensors { return {at::linear(at::tanh(at::linear(in[0], w)), w)}; },
      {at::randn({4, 8})}, {w});
}

TEST(StageBackward, HandlesAWeightReachedThroughOtherOperators) {
  auto w = weight({8, 8}), s = weight({8});
  expect_equal_to_backward(
      [&](const Tensors& in) -> Tensors {
        auto scaled = at::softmax(w, 0) * s;  // s and w meet before they meet the input
        return {at::mm(at::sin(at::mm(in[0], scaled)), scaled.t()) * s};
      },
      {at::randn({4, 8})}, {w, s});
}

TEST(StageBackward, HandlesWeightsThatDoNotMeetTheInput) {
  auto w = weight({8}), v = weight({8}), far = weight({3});
  expect_equal_to_backward(
      [&](const Tensors& in) -> Tensors {
        return {in[0] * w + at::exp(v), at::sin(far) * far, far};  // an output without the input; a weight as output
      },
      {at::randn({4, 8})}, {w, v, far});
}

TEST(StageBackward, PassesAnInputThrough) {
  auto w = weight({8});
  expect_equal_to_backward([&](const Tensors& in) -> Tensors { return {in[0], in[0] * w, in[1]}; },
                           {at::randn({4, 8}), at::randn({3})}, {w});
}

TEST(StageBackward, LeavesUnusedInputsAndFrozenWeightsWithoutGradient) {
  auto w = weight({8}), frozen = at::randn({8}), unused = weight({8});
  expect_equal_to_backward([&](const Tensors& in) -> Tensors { return {in[0] * w * frozen, in[0].argmax(-1)}; },
                           {at::randn({4, 8}), at::randn({2})}, {w, frozen, unused});
}

TEST(StageBackward, TakesViewsAsOutputs) {
  auto w = weight({8, 8});
  expect_equal_to_backward(
      [&](const Tensors& in) -> Tensors {
        auto y = at::linear(in[0], w);
        auto parts = y.chunk(2, 1);
        return {y.view({8, 4}), parts[0], parts[1], y.t()};
      },
      {at::randn({4, 8})}, {w});
}

TEST(StageBackward, SkipsAViewMadeWithoutGradMode) {
  const auto x = weight({3}), made = x * 2;
  at::NoGradGuard no_grad;
  const auto view = made.view({3, 1});
  ASSERT_TRUE(view.requires_grad()) << "as its base does";
  EXPECT_FALSE(gradient_meta(view).has_value());
  EXPECT_FALSE(stage_backward({view}, {at::ones({3, 1})}, Tensors{x})[0].defined());
}

TEST(StageBackward, TakesIntegerInputsAtTheFirstStage) {
  auto table = weight({10, 8}), w = weight({8, 8});
  expect_equal_to_backward([&](const Tensors& in) -> Tensors { return {at::linear(at::embedding(table, in[0]), w)}; },
                           {at::randint(10, {4, 3}, at::kLong)}, {table, w});
}

TEST(StageBackward, AllowsAnInPlaceFirstOperator) {
  auto w = weight({8});
  expect_equal_to_backward([&](const Tensors& in) -> Tensors { return {in[0].mul_(2).sin_() * w}; },
                           {at::randn({4, 8})}, {w});
}

TEST(StageBackward, AllowsWritesOfWeightsIntoViews) {
  auto w = weight({4}), v = weight({8}), late = weight({8});
  expect_equal_to_backward(
      [&](const Tensors& in) -> Tensors {
        auto y = in[0] * v;
        y.narrow(1, 0, 4).mul_(w);
        y.select(0, 1).add_(late);
        return {y * v};
      },
      {at::randn({4, 8})}, {w, v, late});
}

TEST(StageBackward, KeepsOneWeightsGradientApartFromAnothers) {
  // An addition hands the very same gradient tensor to both.
  auto a = weight({4, 8}), b = weight({4, 8});
  expect_equal_to_backward([&](const Tensors& in) -> Tensors { return {in[0] + (a + b)}; }, {at::randn({4, 8})},
                           {a, b});
}

}  // namespace

// In plumb's own namespace, as plumb's operators are: may run once for its input and once for its weight.
struct OwnLinear : torch::autograd::Function<OwnLinear> {
  static inline int input_products = 0, weight_products = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return at::linear(x, w);
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, Tensors g) {
    auto saved = ctx->get_saved_variables();
    Tensors out(2);
    if (ctx->needs_input_grad(0)) input_products++, out[0] = at::mm(g[0], saved[1]);
    if (ctx->needs_input_grad(1)) weight_products++, out[1] = at::mm(g[0].t(), saved[0]);
    return out;
  }
};

namespace {

TEST(StageBackward, RunsACustomFunctionOnce) {
  auto w = weight({8, 8}), v = weight({8, 8}), s = weight({8, 8});
  auto forward = [&](const Tensors& in) -> Tensors {
    // s reaches the custom function through another operator, and an ordinary one directly.
    return {at::linear(CountedLinear::apply(at::linear(in[0], v), at::sin(w) * s), w) + at::linear(in[0], s)};
  };
  expect_equal_to_backward(forward, {at::randn({4, 8})}, {w, v, s});
  CountedLinear::backwards = 0;
  InputBoundary boundary({at::randn({4, 8})}, {true});
  auto outputs = forward(boundary.inputs());
  auto half = stage_backward_input(outputs, {at::ones_like(outputs[0])}, boundary);
  stage_backward_weight(half.deferred);
  EXPECT_EQ(CountedLinear::backwards, 1);
}

TEST(StageBackward, DividesPlumbsOwnFunctions) {
  auto w = weight({8, 8});
  InputBoundary boundary({at::randn({4, 8})}, {true});
  Tensors outputs{OwnLinear::apply(boundary.inputs()[0], w)};
  OwnLinear::input_products = OwnLinear::weight_products = 0;
  auto half = stage_backward_input(outputs, {at::ones_like(outputs[0])}, boundary);
  EXPECT_EQ(OwnLinear::input_products, 1);
  EXPECT_EQ(OwnLinear::weight_products, 0);
  stage_backward_weight(half.deferred);
  EXPECT_EQ(OwnLinear::input_products, 1);
  EXPECT_EQ(OwnLinear::weight_products, 1);
}

TEST(StageBackward, RunsHooksOnce) {
  auto w = weight({8, 8}), v = weight({8, 8}), s = weight({8});
  int calls = 0, weight_calls = 0;
  w.register_hook([&](const at::Tensor& g) { return weight_calls++, g * 0.5; });
  auto forward = [&](const Tensors& in) -> Tensors {
    auto y = at::linear(in[0], v);
    auto z = at::linear(y, w);
    z.register_hook([&](const at::Tensor& g) { return calls++, g * 2; });
    return {z * s};
  };
  expect_equal_to_backward(forward, {at::randn({4, 8})}, {w, v, s});
  calls = weight_calls = 0;
  InputBoundary boundary({at::randn({4, 8})}, {true});
  auto outputs = forward(boundary.inputs());
  auto half = stage_backward_input(outputs, {at::ones_like(outputs[0])}, boundary);
  stage_backward_weight(half.deferred);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(weight_calls, 1);
}

TEST(StageBackward, RunsHooksThatCameBetweenTheHalves) {
  auto w = weight({8, 8});
  InputBoundary boundary({at::randn({4, 8})}, {true});
  const auto out = at::linear(boundary.inputs()[0], w);
  auto half = stage_backward_input({out}, {at::ones_like(out)}, boundary);
  int calls = 0;
  w.register_hook([&](const at::Tensor& g) { return calls++, g * 0.5; });
  stage_backward_weight(half.deferred, /*retain_graph=*/true);
  const auto once = w.grad().clone();
  EXPECT_EQ(calls, 1);
  torch::autograd::DetectAnomalyGuard detect_anomaly;  // looks at nodes while the engine runs them
  stage_backward_weight(half.deferred);
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(at::equal(w.grad(), once * 2));
}

TEST(StageBackward, AddsWhatComesToAWeightInAnyOrderAsBackwardDoes) {
  // Three uses: the order of the sum shows in the bits. The last is an output twice, which no input's gradient reaches.
  at::manual_seed(5);
  auto w = weight({16, 16}), s = weight({16});
  expect_equal_to_backward(
      [&](const Tensors& in) -> Tensors {
        const auto u = w.t() * s;
        return {at::linear(at::linear(at::linear(in[0], w), w), w), at::linear(in[0], u), u, u};
      },
      {at::randn({8, 16}) * 1e3}, {w, s});
}

TEST(StageBackward, DefersEverythingWhereNoInputHasAGradient) {
  auto w = weight({4});
  InputBoundary boundary({at::ones({4})}, {false});
  Tensors outputs{boundary.inputs()[0] * w};
  auto half = stage_backward_input(outputs, {at::ones({4})}, boundary);
  EXPECT_FALSE(half.input_grads[0].defined());
  EXPECT_FALSE(w.grad().defined());
  EXPECT_TRUE(half.deferred.pending());
  stage_backward_weight(half.deferred);
  EXPECT_TRUE(at::equal(w.grad(), at::ones({4})));
}

TEST(StageBackward, StartsFromGradientsTheInputsHaveAlready) {
  // x is used here twice and once in a later stage: the order of the sum is backward()'s, latest use first.
  at::manual_seed(3);
  auto w = weight({64});
  auto x = at::randn({64}), g = at::randn({64}) * 1e3, later = at::randn({64}) * 1e-3;
  auto leaf = x.clone().requires_grad_(true);
  auto out = leaf.sin() * w + leaf;
  auto third = leaf * 1.0;
  torch::autograd::backward({out, third}, {g, later});
  auto expected_w = w.grad().clone();
  for (bool halves : {false, true}) {
    w.mutable_grad() = at::Tensor();
    InputBoundary boundary({x}, {true});
    auto& in = boundary.inputs()[0];
    Tensors outputs{in.sin() * w + in};
    Tensors grads;
    if (halves) {
      auto half = stage_backward_input(outputs, {g}, boundary, {later});
      stage_backward_weight(half.deferred);
      grads = half.input_grads;
    } else {
      grads = stage_backward(outputs, {g}, boundary, {later});
    }
    EXPECT_TRUE(at::equal(grads[0], leaf.grad()));
    EXPECT_TRUE(at::equal(w.grad(), expected_w));
  }
}

TEST(StageBackward, ReturnsAGradientWhoseInputIsUsedElsewhereOnly) {
  InputBoundary boundary({at::ones({4})}, {true});
  auto w = weight({4});
  Tensors outputs{w * 2};
  auto grads = stage_backward(outputs, {at::ones({4})}, boundary, {at::full({4}, 3.0)});
  EXPECT_TRUE(at::equal(grads[0], at::full({4}, 3.0)));
}

TEST(StageBackward, FreesWhatOnlyTheInputHalfNeeded) {
  auto w = weight({8, 8});
  std::weak_ptr<int> saved;
  InputBoundary boundary({at::randn({4, 8})}, {true});
  auto hidden = at::linear(boundary.inputs()[0], w).exp();
  auto storage = c10::weak_intrusive_ptr<c10::StorageImpl>(hidden.storage().getWeakStorageImpl());
  Tensors outputs{hidden.sum(0)};  // exp keeps its result
  hidden = at::Tensor();
  EXPECT_FALSE(storage.expired());
  auto half = stage_backward_input(outputs, {at::ones({8})}, boundary);
  EXPECT_TRUE(storage.expired());
  stage_backward_weight(half.deferred);
  EXPECT_TRUE(w.grad().defined());
}

TEST(StageBackward, KeepsAKeptGraphWhole) {
  auto w = weight({8, 8});
  auto x = at::randn({4, 8}).requires_grad_(true);
  auto y = at::linear(x, w).exp();
  auto g = at::randn({4, 8});
  auto half = stage_backward_input({y}, {g}, {x}, /*keep_graph=*/true);
  stage_backward_weight(half.deferred, /*retain_graph=*/true);
  stage_backward_weight(half.deferred, /*retain_graph=*/true);
  auto twice = w.grad().clone();
  w.mutable_grad() = at::Tensor();
  torch::autograd::backward({y}, {g});
  EXPECT_TRUE(at::equal(half.input_grads[0], x.grad()));
  EXPECT_TRUE(at::equal(twice, w.grad() + w.grad()));
}

TEST(StageBackward, TakesLeafInputsAndUnsetsTheirGradient) {
  auto w = weight({8});
  auto x = at::randn({8}).requires_grad_(true);
  auto grads = stage_backward({x * w}, {at::ones({8})}, Tensors{x, at::Tensor(), at::ones({2}, at::kLong)});
  ASSERT_EQ(grads.size(), 3u);
  EXPECT_TRUE(at::equal(grads[0], w));
  EXPECT_FALSE(grads[1].defined());
  EXPECT_FALSE(grads[2].defined());
  EXPECT_FALSE(x.grad().defined());
}

TEST(StageBackward, GivesATensorThatComesTwiceOneGradient) {
  auto w = weight({8});
  auto x = at::randn({8}).requires_grad_(true);
  auto grads = stage_backward({x * w}, {at::ones({8})}, Tensors{x, x});
  EXPECT_TRUE(at::equal(grads[0], w));
  EXPECT_FALSE(grads[1].defined());
  auto half = stage_backward_input({x * w}, {at::ones({8})}, Tensors{x, x});
  EXPECT_TRUE(at::equal(half.input_grads[0], w));
  EXPECT_FALSE(half.input_grads[1].defined());
}

TEST(StageBackward, AddsToTheGradientThatALeafHasAlready) {
  auto w = weight({8});
  auto x = at::randn({8}).requires_grad_(true);
  x.mutable_grad() = at::full({8}, 3.0);
  auto grads = stage_backward({x * w}, {at::ones({8})}, Tensors{x});
  EXPECT_TRUE(at::equal(grads[0], w + 3.0));
  EXPECT_FALSE(x.grad().defined());
}

TEST(StageBackward, GivesOnesToALossWithoutGradient) {
  auto w = weight({8});
  InputBoundary boundary({at::randn({8})}, {true});
  auto grads = stage_backward({(boundary.inputs()[0] * w).sum()}, {}, boundary);
  EXPECT_TRUE(at::equal(grads[0], w));
}

TEST(StageBackward, NamesAWrongGradient) {
  auto w = weight({8});
  InputBoundary boundary({at::randn({4, 8})}, {true});
  Tensors outputs{boundary.inputs()[0] * w};
  EXPECT_THAT(message_of([&] { stage_backward(outputs, {at::ones({3})}, boundary); }),
              testing::HasSubstr("output 0 of the stage is float[4, 8], its gradient float[3]"));
  EXPECT_THAT(message_of([&] { stage_backward(outputs, {at::Tensor()}, boundary); }), testing::HasSubstr("got none"));
  EXPECT_THAT(message_of([&] { stage_backward(outputs, {at::ones({3}), at::ones({3})}, boundary); }),
              testing::HasSubstr("1 outputs and 2 output gradients"));
}

TEST(StageBackward, NamesAnInputThatIsNoLeaf) {
  auto x = at::randn({4}).requires_grad_(true) * 2;
  EXPECT_THAT(message_of([&] { stage_backward({x * 2}, {at::ones({4})}, Tensors{x}); }),
              testing::HasSubstr("not a leaf"));
}

TEST(StageBackward, DescribesAFailureOfAutograd) {
  auto w = weight({4});
  InputBoundary boundary({at::randn({4})}, {true});
  auto y = (boundary.inputs()[0] * w).exp();
  Tensors outputs{y * w};
  y.mul_(2);  // destroys what exp and the product saved
  auto message = message_of([&] { stage_backward_input(outputs, {at::ones({4})}, boundary); });
  EXPECT_THAT(message, testing::HasSubstr("input half of the stage backward failed"));
  EXPECT_THAT(message, testing::HasSubstr("outputs (float[4])"));
}

TEST(StageBackward, TheWeightHalfGivesTheseWeightsTheirGradientsAndNoOthers) {
  auto v = weight({8}), w = weight({8}), unused = weight({8});
  InputBoundary boundary({at::randn({8})}, {true});
  auto half = stage_backward_input({boundary.inputs()[0] * v * w}, {at::ones({8})}, boundary, {}, /*keep_graph=*/true);
  stage_backward_weight(half.deferred, Tensors{w, unused, at::Tensor()}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(w.grad(), boundary.inputs()[0] * v));
  EXPECT_FALSE(v.grad().defined() || unused.grad().defined());
  stage_backward_weight(half.deferred, Tensors{}, /*retain_graph=*/true);
  EXPECT_TRUE(at::equal(w.grad(), boundary.inputs()[0] * v));
  stage_backward_weight(half.deferred);
  EXPECT_TRUE(at::equal(v.grad(), boundary.inputs()[0] * w));
}

TEST(StageBackward, RefusesASecondWeightHalf) {
  auto w = weight({4});
  InputBoundary boundary({at::randn({4})}, {true});
  auto half = stage_backward_input({boundary.inputs()[0] * w}, {at::ones({4})}, boundary);
  stage_backward_weight(half.deferred);
  EXPECT_FALSE(half.deferred.pending());
  EXPECT_THAT(message_of([&] { stage_backward_weight(half.deferred); }), testing::HasSubstr("has run already"));
}

}  // namespace
}  // namespace plumb
