// The operators against compositions of torch's own, and their measured scales.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/scaling/functional.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

namespace U = plumb::functional;
namespace F = torch::nn::functional;
using at::Tensor;
using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Scaling : ::testing::Test {
  void SetUp() override { torch::manual_seed(1472); }
};

Tensor input(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble).requires_grad_(); }
double deviation(const Tensor& t) { return t.std().item<double>(); }

// y = output_scale * f(xs), where the gradient of xs[i] is that of f times grad_scales[i].
using Fn = std::function<Tensor(const std::vector<Tensor>&)>;
void expect_scaled(const Fn& fused, const Fn& plain, std::vector<Tensor> xs, double output_scale,
                   std::vector<double> grad_scales) {
  auto y = fused(xs);
  auto grad = torch::randn_like(y);
  auto got = torch::autograd::grad({y}, xs, {grad});
  auto reference = plain(xs);
  auto expected = torch::autograd::grad({reference}, xs, {grad});
  EXPECT_TRUE(torch::allclose(y, reference * output_scale, 1e-9, 1e-12));
  for (size_t i = 0; i < xs.size(); ++i) {
    EXPECT_TRUE(torch::allclose(got[i], expected[i] * grad_scales[i], 1e-9, 1e-12)) << "gradient of input " << i;
  }
}

TEST_F(Scaling, LinearScalesOutputAndGradientsByTheirFans) {
  auto fused = [](const auto& x) { return U::linear(x[0], x[1], x[2], std::nullopt); };
  auto plain = [](const auto& x) { return at::linear(x[0], x[1], x[2]); };
  expect_scaled(fused, plain, {input({2, 3, 16}), input({24, 16}), input({24})}, 1 / std::sqrt(16.),
                {1 / std::sqrt(24.), 1 / std::sqrt(6.), 1 / std::sqrt(6.)});
}

TEST_F(Scaling, LinearWithAConstraintTiesOutputAndInputGradientOnly) {
  auto fused = [](const auto& x) { return U::linear(x[0], x[1], std::nullopt, "gmean"); };
  auto plain = [](const auto& x) { return at::linear(x[0], x[1]); };
  const double tied = std::sqrt(1 / std::sqrt(16.) * 1 / std::sqrt(24.));
  expect_scaled(fused, plain, {input({6, 16}), input({24, 16})}, tied, {tied, 1 / std::sqrt(6.)});
}

TEST_F(Scaling, AUsersConstraintIsAFunctionOfTheScales) {
  auto smallest = [](std::span<const double> s) { return *std::min_element(s.begin(), s.end()); };
  auto fused = [&](const auto& x) { return U::linear(x[0], x[1], std::nullopt, ConstraintFn(smallest)); };
  auto plain = [](const auto& x) { return at::linear(x[0], x[1]); };
  const double tied = 1 / std::sqrt(24.);
  expect_scaled(fused, plain, {input({6, 16}), input({24, 16})}, tied, {tied, 1 / std::sqrt(6.)});
}

TEST_F(Scaling, LinearOfAnEmptyBatchHasZeroWeightGradient) {
  auto x = torch::zeros({0, 16}), w = torch::randn({24, 16}).requires_grad_();
  U::linear(x, w).sum().backward();
  EXPECT_TRUE(w.grad().eq(0).all().item<bool>());
}

TEST_F(Scaling, LinearReadoutShrinksItsOutputByTheWholeFanIn) {
  auto fused = [](const auto& x) { return U::linear_readout(x[0], x[1]); };
  auto plain = [](const auto& x) { return at::linear(x[0], x[1]); };
  expect_scaled(fused, plain, {input({6, 16}), input({24, 16})}, 1 / 16., {1 / std::sqrt(24.), 1 / std::sqrt(6.)});
}

TEST_F(Scaling, MatmulCountsTheRepeatsOfABroadcastOperand) {
  auto fused = [](const auto& x) { return U::matmul(x[0], x[1], std::nullopt); };
  auto plain = [](const auto& x) { return at::matmul(x[0], x[1]); };
  expect_scaled(fused, plain, {input({5, 4, 8}), input({8, 3})}, 1 / std::sqrt(8.),
                {1 / std::sqrt(3.), 1 / std::sqrt(20.)});
  expect_scaled(fused, plain, {input({4, 8}), input({5, 8, 3})}, 1 / std::sqrt(8.),
                {1 / std::sqrt(15.), 1 / std::sqrt(4.)});
  expect_scaled(fused, plain, {input({8}), input({8})}, 1 / std::sqrt(8.), {1, 1});
}

TEST_F(Scaling, SecondGradientsAreThoseOfTheScaledFunctions) {
  struct Case {
    const char* name;
    Fn fused, plain;
    std::vector<Tensor> xs;
    double output, grad;
  };
  const double g = rules::gelu(1)[0], s = rules::silu(1)[0];
  const std::vector<Case> cases{
      {"gelu", [](auto& x) { return U::gelu(x[0]); }, [](auto& x) { return at::gelu(x[0]); }, {input({7})}, g, g},
      {"silu", [](auto& x) { return U::silu(x[0]); }, [](auto& x) { return at::silu(x[0]); }, {input({7})}, s, s},
      {"softmax",
       [](auto& x) { return U::softmax(x[0], 0); },
       [](auto& x) { return at::softmax(x[0], 0); },
       {input({7})},
       rules::softmax(7, 1)[0],
       rules::softmax(7, 1)[0]},
      {"rms_norm",
       [](auto& x) { return U::rms_norm(x[0], {7}); },
       [](auto& x) { return x[0] * (x[0].square().mean(-1, true) + 1e-5).rsqrt(); },
       {input({3, 7})},
       1,
       1},
      {"layer_norm",
       [](auto& x) { return U::layer_norm(x[0], {7}); },
       [](auto& x) { return at::layer_norm(x[0], {7}); },
       {input({3, 7})},
       1,
       1},
      {"matmul",
       [](auto& x) { return U::matmul(x[0], x[0]); },
       [](auto& x) { return at::matmul(x[0], x[0]); },
       {input({5, 5})},
       1 / std::sqrt(5.),
       1 / std::sqrt(5.)},
      {"cross_entropy",
       [](auto& x) { return U::cross_entropy(x[0], torch::arange(3), {}, -100, "sum"); },
       [](auto& x) {
         return F::cross_entropy(x[0], torch::arange(3), F::CrossEntropyFuncOptions().reduction(torch::kSum));
       },
       {input({3, 7})},
       1,
       rules::cross_entropy_grad(7, 0)},
  };
  for (const auto& c : cases) {
    auto y = c.fused(c.xs), reference = c.plain(c.xs);
    auto v = torch::randn_like(y), u = torch::randn_like(c.xs[0]);
    auto first = torch::autograd::grad({y}, c.xs, {v}, true, true)[0];
    auto expected_first = torch::autograd::grad({reference}, c.xs, {v}, true, true)[0];
    EXPECT_TRUE(torch::allclose(first, expected_first * c.grad, 1e-8, 1e-10)) << c.name;
    auto second = torch::autograd::grad({first}, c.xs, {u})[0];
    auto expected_second = torch::autograd::grad({expected_first}, c.xs, {u})[0];
    EXPECT_TRUE(torch::allclose(second, expected_second * c.grad, 1e-8, 1e-10)) << c.name;
  }
}

TEST_F(Scaling, EveryOperatorKeepsUnitScaleWithoutAConstraint) {
  auto check = [](const char* name, const Tensor& y, std::vector<Tensor> xs) {
    EXPECT_NEAR(deviation(y.detach()), 1, 0.1) << name << " output";
    auto grads = torch::autograd::grad({y}, xs, {torch::randn_like(y)});
    for (size_t i = 0; i < xs.size(); ++i) EXPECT_NEAR(deviation(grads[i]), 1, 0.1) << name << " gradient " << i;
  };
  auto x = input({256, 512}), w = input({384, 512}), b = torch::zeros(384, torch::kDouble).requires_grad_();
  check("linear", U::linear(x, w, b, std::nullopt), {x, w, b});
  check("gelu", U::gelu(x, 1, std::nullopt), {x});
  check("silu", U::silu(x, 1, std::nullopt), {x});
  auto z = input({256, 512});
  check("silu_glu", U::silu_glu(x, z), {x, z});
  check("add", U::add(x, z, std::nullopt), {x, z});
  auto one_row = input({512});
  check("add broadcast", U::add(x, one_row, std::nullopt), {x, one_row});
  check("dropout", U::dropout(x, 0.3), {x});
  auto scale = input({512}), shift = torch::zeros(512, torch::kDouble).requires_grad_();
  check("layer_norm", U::layer_norm(x, {512}, scale, shift), {x, scale, shift});
  check("rms_norm", U::rms_norm(x, {512}, scale), {x, scale});
  auto image = input({8, 16, 24, 24}), kernel = input({32, 16, 3, 3});
  U::ConvOptions free;
  free.constraint = std::nullopt;
  check("conv2d", U::conv2d(image, kernel, std::nullopt, free), {image, kernel});
  auto signal = input({16, 24, 200}), taps = input({32, 24, 5});
  free.stride = {2};
  check("conv1d strided", U::conv1d(signal, taps, std::nullopt, free), {signal, taps});
  auto volume = input({4, 8, 10, 10, 10}), cube = input({8, 8, 3, 3, 3});
  free.stride = {1};
  free.padding = std::vector<int64_t>{0};
  check("conv3d", U::conv3d(volume, cube, std::nullopt, free), {volume, cube});
  auto table = input({1000, 64});
  check("embedding", U::embedding(torch::randint(1000, {4000}), table), {table});
}

TEST_F(Scaling, ConvolutionsKeepUnitScaleAtTheirBordersToo) {
  U::ConvOptions options;
  options.constraint = std::nullopt;
  options.padding = std::vector<int64_t>{2};
  options.stride = {2};
  auto image = input({64, 16, 9, 9}), kernel = input({32, 8, 5, 5});
  options.groups = 2;
  auto y = U::conv2d(image, kernel, std::nullopt, options);
  EXPECT_NEAR(deviation(y.detach()), 1, 0.05);
  auto grads = torch::autograd::grad({y}, {image, kernel}, {torch::randn_like(y)});
  EXPECT_NEAR(deviation(grads[0]), 1, 0.05);
  EXPECT_NEAR(deviation(grads[1]), 1, 0.05);
}

TEST_F(Scaling, OperatorsBeyondThePapersKeepUnitScale) {
  auto check = [](const char* name, const Tensor& y, std::vector<Tensor> xs) {
    EXPECT_NEAR(deviation(y.detach()), 1, 0.1) << name << " output";
    auto grads = torch::autograd::grad({y}, xs, {torch::randn_like(y)});
    for (size_t i = 0; i < xs.size(); ++i) EXPECT_NEAR(deviation(grads[i]), 1, 0.1) << name << " gradient " << i;
  };
  auto x = input({16, 32, 24, 24});
  auto pool = [](int64_t kernel, std::vector<int64_t> stride = {}, int64_t padding = 0) {
    U::PoolOptions options({kernel});
    options.stride = std::move(stride);
    options.padding = {padding};
    options.constraint = std::nullopt;
    return options;
  };
  check("relu", U::relu(x, std::nullopt), {x});
  check("tanh", U::tanh(x, 1, std::nullopt), {x});
  check("sigmoid", U::sigmoid(x, 1, std::nullopt), {x});
  check("avg_pool2d", U::avg_pool2d(x, pool(3)), {x});
  check("avg_pool2d overlapping", U::avg_pool2d(x, pool(3, {1}, 1)), {x});
  check("max_pool2d", U::max_pool2d(x, pool(2)), {x});
  check("max_pool2d overlapping", U::max_pool2d(x, pool(3, {2})), {x});
  auto w = input({32, 16, 4, 4});
  U::ConvTransposeOptions spread;
  spread.stride = {2};
  spread.padding = {1};
  spread.constraint = std::nullopt;
  auto b = input({16});
  check("conv_transpose2d", U::conv_transpose2d(x, w, b, spread), {x, w, b});
  auto z = input({16, 512, 4, 4}), scale = torch::ones(512, torch::kDouble).requires_grad_(),
       shift = torch::zeros(512, torch::kDouble).requires_grad_();
  check("group_norm", U::group_norm(z, 8, scale, shift), {z, scale, shift});
  check("batch_norm", U::batch_norm(z, {}, {}, scale, shift, /*training=*/true), {z, scale, shift});
}

TEST_F(Scaling, WindowsOfEveryRankGoThroughTheirOperators) {
  auto line = input({2, 4, 12}), image = input({2, 4, 12, 12}), volume = input({2, 4, 6, 6, 6});
  EXPECT_EQ(U::avg_pool1d(line, {{3}}).sizes(), at::IntArrayRef({2, 4, 4}));
  EXPECT_EQ(U::max_pool1d(line, {{2}}).sizes(), at::IntArrayRef({2, 4, 6}));
  EXPECT_EQ(U::avg_pool3d(volume, {{2}}).sizes(), at::IntArrayRef({2, 4, 3, 3, 3}));
  EXPECT_EQ(U::max_pool3d(volume, {{3}}).sizes(), at::IntArrayRef({2, 4, 2, 2, 2}));
  EXPECT_EQ(U::conv_transpose1d(line, input({4, 6, 3})).sizes(), at::IntArrayRef({2, 6, 14}));
  EXPECT_EQ(U::conv_transpose3d(volume, input({4, 6, 2, 2, 2})).sizes(), at::IntArrayRef({2, 6, 7, 7, 7}));
  U::PoolOptions dilated({2});
  dilated.dilation = {2};
  EXPECT_EQ(U::max_pool2d(image, dilated).sizes(), at::IntArrayRef({2, 4, 5, 5}));
  EXPECT_THROW(U::avg_pool2d(image, dilated), Error);
  dilated.constraint = Constraint([](std::span<const double> scales) { return scales[0]; });
  EXPECT_THROW(U::max_pool2d(image, dilated), Error);
}

TEST_F(Scaling, LossesKeepTorchsValueAndGiveAUnitGradient) {
  auto logits = input({512, 64});
  auto labels = torch::randint(64, {512});
  for (const char* reduction : {"mean", "sum"}) {
    auto loss = U::cross_entropy(logits, labels, {}, -100, reduction);
    auto expected = at::cross_entropy_loss(logits, labels, {}, std::string(reduction) == "mean" ? 1 : 2);
    EXPECT_TRUE(torch::allclose(loss, expected));
    EXPECT_NEAR(deviation(torch::autograd::grad({loss}, {logits})[0]), 1, 0.1);
  }
  auto weight = torch::rand(64, torch::kDouble) + 0.5;
  labels.index_put_({torch::arange(0, 8)}, -100);
  auto loss = U::cross_entropy(logits, labels, weight, -100, "mean", 0.1, 2.0);
  EXPECT_TRUE(torch::allclose(loss, at::cross_entropy_loss(logits * 2, labels, weight, 1, -100, 0.1)));
  loss = U::cross_entropy(logits, labels, weight, -100, "mean", 0.1);
  auto grad = torch::autograd::grad({loss}, {logits})[0];
  EXPECT_TRUE(grad.slice(0, 0, 8).eq(0).all().item<bool>());
  EXPECT_NEAR(deviation(grad.slice(0, 8)), 1, 0.1);
  auto image = input({4, 10, 6, 6});
  auto map = torch::randint(10, {4, 6, 6});
  loss = U::cross_entropy(image, map);
  EXPECT_TRUE(torch::allclose(loss, at::cross_entropy_loss(image, map)));
  EXPECT_NEAR(deviation(torch::autograd::grad({loss}, {image})[0]), 1, 0.15);
}

TEST_F(Scaling, DropoutScalesOnlyWhenItDrops) {
  auto x = input({1000});
  EXPECT_TRUE(torch::equal(U::dropout(x, 0.5, /*training=*/false), x));
  EXPECT_TRUE(torch::equal(U::dropout(x, 0.0), x));
  EXPECT_TRUE(U::dropout(x, 1.0).eq(0).all().item<bool>());
}

TEST_F(Scaling, ResidualBranchAndSkipHaveTheWeightsOfTau) {
  const double tau = 0.3, norm = std::sqrt(1 + tau * tau);
  auto x = input({64});
  auto [residual, skip] = U::residual_split(x, tau);
  auto y = U::residual_add(residual * 2, skip, tau);
  EXPECT_TRUE(torch::allclose(y, x * (2 * tau + 1) / norm));
  auto g = torch::randn_like(x);
  EXPECT_TRUE(torch::allclose(torch::autograd::grad({y}, {x}, {g})[0], g * (2 * tau + 1) / norm));
}

TEST_F(Scaling, WritingInPlaceIntoHalfOfAResidualSplitIsRefusedUnderAutogradAndHarmlessWithout) {
  auto x = input({64});
  {
    auto [residual, skip] = U::residual_split(x, 1.0);
    EXPECT_THROW(residual.add_(1), c10::Error);
  }
  torch::NoGradGuard no_grad;
  auto before = x.clone();
  auto [residual, skip] = U::residual_split(x, 1.0);
  residual.add_(1);
  EXPECT_TRUE(torch::equal(skip, before));
  EXPECT_TRUE(torch::equal(x, before));
}

TEST_F(Scaling, ScaleFwdAndScaleBwdEachTouchOneDirection) {
  auto x = input({9});
  auto g = torch::randn_like(x);
  auto y = U::scale_fwd(x, 3.5);
  EXPECT_TRUE(torch::equal(y, x * 3.5));
  EXPECT_TRUE(torch::equal(torch::autograd::grad({y}, {x}, {g})[0], g));
  y = U::scale_bwd(x, 3.5);
  EXPECT_TRUE(torch::equal(y, x));
  EXPECT_TRUE(torch::equal(torch::autograd::grad({y}, {x}, {g})[0], g * 3.5));
}

TEST_F(Scaling, MetaTensorsGoThroughEveryOperator) {
  auto meta = [](at::IntArrayRef sizes) { return torch::empty(sizes, torch::kMeta).requires_grad_(); };
  auto x = meta({2, 3, 16}), w = meta({24, 16});
  EXPECT_EQ(U::linear(x, w).sizes(), at::IntArrayRef({2, 3, 24}));
  EXPECT_EQ(U::matmul(meta({4, 8}), meta({5, 8, 3})).sizes(), at::IntArrayRef({5, 4, 3}));
  EXPECT_EQ(U::conv2d(meta({2, 3, 9, 9}), meta({8, 3, 3, 3})).sizes(), at::IntArrayRef({2, 8, 7, 7}));
  auto y = U::residual_apply([](const Tensor& t) { return U::gelu(U::rms_norm(t, {16})); }, x, 0.5);
  auto grads =
      torch::autograd::grad({U::cross_entropy(U::linear(y, w).flatten(0, 1),
                                              torch::empty({6}, torch::dtype(torch::kLong).device(torch::kMeta)))},
                            {x, w});
  EXPECT_EQ(grads[0].sizes(), x.sizes());
  EXPECT_EQ(grads[1].sizes(), w.sizes());
}

TEST_F(Scaling, MisuseIsNamed) {
  auto message = [](const std::function<void()>& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_THAT(e.kind(), AnyOf(ErrorKind::InvalidArgument, ErrorKind::UnknownName, ErrorKind::TensorMismatch));
      return e.what();
    }
    return "no error";
  };
  auto x = torch::randn({4, 8});
  EXPECT_THAT(message([&] { U::linear(x, torch::randn({3, 7})); }), HasSubstr("[4, 8] does not fit weight [3, 7]"));
  EXPECT_THAT(message([&] { U::linear(x, torch::randn({3, 8}), {}, "median"); }),
              HasSubstr("no constraint named 'median'"));
  EXPECT_THAT(message([&] { U::gelu(x, 1, "to_left_grad_scale"); }), HasSubstr("does not fit"));
  EXPECT_THAT(message([&] { U::gelu(x, -1); }), HasSubstr("mult must be a positive number"));
  EXPECT_THAT(message([&] { U::mse_loss(x, x, "average"); }), HasSubstr("'average' is not known"));
  EXPECT_THAT(message([&] { U::mse_loss(x, x[0]); }), HasSubstr("must have one shape"));
  EXPECT_THAT(message([&] { U::dropout(x, 1.5); }), HasSubstr("between 0 and 1"));
  EXPECT_THAT(message([&] { U::cross_entropy(x, torch::zeros({3}, torch::kLong)); }), HasSubstr("does not fit input"));
}

}  // namespace
}  // namespace plumb
