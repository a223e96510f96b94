#include "plumb/autograd/recompute/recompute.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/torch.h>

#include "plumb/autograd/recompute/live_bytes.h"
#include "plumb/autograd/recompute/recompute_testing.h"
#include "plumb/core/error.h"
#include "tests/test_device.h"

namespace plumb {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return there((at::randn(sizes) * 0.3).to(dtype)).requires_grad_(true);
}

// Seeds the CPU and the test device. torch's own function knows only torch's own devices.
void seed(uint64_t number) {
  at::manual_seed(number);
  if (test_device().is_cpu()) return;
  at::Generator generator = at::globalContext().defaultGenerator(test_device());
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(number);
}

struct Model {
  std::string name;
  Tensors leaves;  // the input first
  std::function<at::Tensor(const Tensors&)> forward;
  double kept_at_most;  // largest allowed share of the bytes held without recomputation
};

Model transformer_mlp(at::ScalarType dtype) {
  return {"gelu " + std::string(c10::toString(dtype)),
          {leaf({4, 16, 64}, dtype), leaf({64}, dtype), leaf({64}, dtype), leaf({256, 64}, dtype), leaf({256}, dtype),
           leaf({64, 256}, dtype)},
          [](const Tensors& t) {
            const auto h = at::linear(at::layer_norm(t[0], {64}, t[1], t[2]), t[3], t[4]);
            return t[0] + at::linear(at::gelu(h), t[5]);
          },
          0.6};
}

// As models of transformers have them: the norm by single operators, casts around them.
Model llama_mlp(at::ScalarType dtype) {
  return {"swiglu " + std::string(c10::toString(dtype)),
          {leaf({4, 16, 64}, dtype), leaf({64}, dtype), leaf({128, 64}, dtype), leaf({128, 64}, dtype),
           leaf({64, 128}, dtype)},
          [](const Tensors& t) {
            const auto x = t[0] * 1.0;
            const auto wide = x.to(at::kFloat);
            const auto norm = wide * at::rsqrt(wide.pow(2).mean({-1}, true) + 1e-5);
            const auto h = t[1] * norm.to(x.scalar_type());
            return x + at::linear(at::silu(at::linear(h, t[2])) * at::linear(h, t[3]), t[4]);
          },
          0.75};
}

Model attention() {
  return {"attention with dropout",
          {leaf({2, 2, 32, 16}), leaf({16, 16}), leaf({16, 16})},
          [](const Tensors& t) {
            const auto q = at::linear(t[0], t[1]), k = at::linear(t[0], t[2]);
            const auto p = at::softmax(at::matmul(q, k.transpose(-2, -1)) * 0.25, -1);
            // As torch's dropout on the CPU; on devices that is one operator, whose result is kept because it draws.
            return at::matmul(p * at::empty_like(p).bernoulli_(0.9).div_(0.9), t[0]);
          },
          0.9};
}

Model convnet() {
  return {"convolutions",
          {leaf({2, 3, 16, 16}), leaf({8, 3, 3, 3}), leaf({8}), leaf({8, 8, 3, 3}), leaf({8})},
          [mean = zeros_there({8}), var = ones_there({8})](const Tensors& t) {
            auto x = at::conv2d(t[0], t[1], {}, 1, at::IntArrayRef{1, 1});
            x = at::relu(at::batch_norm(x, t[2], {}, mean, var, true, 0.1, 1e-5, false));
            x = at::conv2d(x * at::sigmoid(x), t[3], {}, 1, at::IntArrayRef{1, 1});
            return at::silu(at::group_norm(x, 2, t[4])).mean({2, 3});
          },
          0.95};
}

// aten::rms_norm is made of single operators on the CPU: several nodes of one call save what it was given.
Model rms_norms() {
  return {"rms norms in a row",
          {leaf({2, 40, 96}), leaf({96}), leaf({96, 96})},
          [](const Tensors& t) {
            auto x = at::linear(t[0], t[2]);
            for (int i = 0; i < 3; ++i) x = x + at::rms_norm(x, {96}, t[1], 1e-6);
            return at::linear(x, t[2]);
          },
          0.95};
}

std::vector<Model> zoo() {
  at::manual_seed(3);
  return {rms_norms(),
          transformer_mlp(at::kFloat),
          transformer_mlp(at::kBFloat16),
          llama_mlp(at::kFloat),
          llama_mlp(at::kBFloat16),
          attention(),
          convnet()};
}

struct Trained {
  Tensors values;
  int64_t held = 0;
  RecomputeReport report;
};

Trained train(const Model& model, Recompute recompute, bool check = false) {
  Trained trained;
  for (const auto& t : model.leaves) t.mutable_grad() = at::Tensor();
  const LiveBytes meter;
  seed(7);
  at::Tensor out;
  if (recompute == Recompute::Cheap) {
    CheapRecompute cheap(check);
    out = model.forward(model.leaves);
    cheap.finish();
    trained.report = cheap.report();
  } else {
    out = model.forward(model.leaves);
  }
  trained.held = meter.live();
  (out * out).sum().backward();
  trained.values.push_back(out.detach());
  for (const auto& t : model.leaves) trained.values.push_back(t.grad());
  return trained;
}

void expect_same(const Tensors& a, const Tensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", tensor " << i;
}

TEST(Recompute, KeepsLessAndChangesNoBit) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  for (const Model& model : zoo()) {
    const Trained kept = train(model, Recompute::None), again = train(model, Recompute::Cheap);
    expect_same(kept.values, again.values, model.name);
    EXPECT_LT(static_cast<double>(again.held), model.kept_at_most * static_cast<double>(kept.held)) << model.name;
    // Whatever is not held any more is reported, except what other results still hold.
    EXPECT_GE(again.report.total().bytes, kept.held - again.held) << model.name;
  }
}

TEST(Recompute, FindsNoDifferenceWhenItChecks) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  for (const Model& model : zoo()) {
    const Trained kept = train(model, Recompute::None), again = train(model, Recompute::Cheap, /*check=*/true);
    expect_same(kept.values, again.values, model.name);
    EXPECT_EQ(again.report.differing, 0) << model.name;
    EXPECT_GT(again.report.total().tensors, 0) << model.name;
  }
}

TEST(Recompute, NamesWhatItDidNotKeep) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  at::manual_seed(3);
  const auto report = train(transformer_mlp(at::kFloat), Recompute::Cheap).report;
  ASSERT_EQ(report.by_operator.size(), 2u);
  EXPECT_EQ(report.by_operator.at("aten::gelu").bytes, 4 * 16 * 256 * 4);
  EXPECT_EQ(report.by_operator.at("aten::native_layer_norm").bytes, 4 * 16 * 64 * 4);
  EXPECT_EQ(report.text(),
            "computed again, not kept: 0.0781 MiB of 2 results (aten::gelu 0.0625 MiB of 1, aten::native_layer_norm "
            "0.0156 MiB of 1)");
}

TEST(Recompute, NormalizesAgainWithTheBitsOfTheNorm) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  at::manual_seed(3);
  for (const bool affine : {true, false}) {
    for (int64_t width : {1, 7, 33, 64, 250, 1024}) {
      for (const std::string layout : {"rows", "transposed", "of a 1 by 1 image"}) {
        const Model model{"norm of " + std::to_string(width) + ", " + layout,
                          {leaf({96, width}), leaf({width, width}), leaf({width}), leaf({width}), leaf({width, width})},
                          [&](const Tensors& t) {
                            const auto h = at::mm(t[0], t[1]);
                            const auto x = layout == "rows" ? h * 2
                                           : layout == "transposed"
                                               ? h.reshape({8, 12, width}).transpose(0, 1) * 2
                                               : (h * 2).view({96, width, 1, 1}).permute({0, 2, 3, 1});
                            const auto y = affine ? at::layer_norm(x, {width}, t[2], t[3])
                                                  : at::layer_norm(x, {width}) + (t[2] + t[3]).sum() * 0;
                            return at::matmul(y, t[4]);
                          },
                          1};
        expect_same(train(model, Recompute::None).values, train(model, Recompute::Cheap, /*check=*/true).values,
                    model.name);
        const Trained again = train(model, Recompute::Cheap, /*check=*/true);
        EXPECT_EQ(again.report.differing, 0) << model.name;
        if (affine && width >= 33) EXPECT_TRUE(again.report.by_operator.count("aten::native_layer_norm")) << model.name;
      }
    }
  }
}

TEST(Recompute, TakesWhatAutocastLeavesAndTheCastsItMakes) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  at::manual_seed(3);
  Model model = transformer_mlp(at::kFloat);
  model.forward = [whole = model.forward](const Tensors& t) {
    at::autocast::set_autocast_enabled(test_device().type(), true);
    at::autocast::increment_nesting();
    const at::Tensor out = whole(t);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(test_device().type(), false);
    return out;
  };
  const Trained kept = train(model, Recompute::None), again = train(model, Recompute::Cheap, /*check=*/true);
  expect_same(kept.values, again.values, "autocast");
  EXPECT_EQ(again.report.differing, 0);
  EXPECT_EQ(again.report.by_operator.at("aten::gelu").bytes, 4 * 16 * 256 * 2) << "in bfloat16";
  EXPECT_TRUE(again.report.by_operator.count("aten::_to_copy"));
  EXPECT_LT(again.held, kept.held * 3 / 4);
}

// One product behind gelu, and what a test does with it.
struct Written {
  at::Tensor x = leaf({64, 64}), w = leaf({64, 64});
  at::Tensor h = x * 2, y = at::gelu(h), out;
};

TEST(Recompute, KeepsAResultThatWasWrittenBeforeItWasSaved) {
  at::manual_seed(3);
  auto gradient = [](bool cheap) {
    at::manual_seed(5);
    std::optional<CheapRecompute> scope;
    if (cheap) scope.emplace();
    Written m;
    m.y.mul_(3);
    m.out = at::mm(m.y, m.w);
    if (scope) scope->finish();
    scope.reset();
    m.y = at::Tensor();
    m.out.sum().backward();
    return m.w.grad();
  };
  EXPECT_TRUE(at::equal(gradient(false), gradient(true)));
}

Written written_in_a_scope() {
  at::manual_seed(3);
  Written m;
  CheapRecompute scope;
  m.y = at::gelu(m.h);
  m.out = at::mm(m.y, m.w);
  scope.finish();
  return m;
}

TEST(Recompute, RefusesAnInputThatWasWrittenSince) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  Written m = written_in_a_scope();
  m.y = at::Tensor();
  m.h.detach().mul_(2);
  try {
    m.out.sum().backward();
    FAIL() << "the gradient would be wrong";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("'self' of aten::gelu"), std::string::npos) << e.message();
    EXPECT_NE(e.message().find("version 1, expected version 0"), std::string::npos) << e.message();
  }
}

TEST(Recompute, NoticesWritesThatNoVersionShowsWhenItChecks) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  at::manual_seed(3);
  Written m;
  CheapRecompute scope(/*check=*/true);
  m.y = at::gelu(m.h);
  m.y.variable_data().mul_(3);
  m.out = at::mm(m.y, m.w);
  scope.finish();
  EXPECT_EQ(scope.report().differing, 1);
  EXPECT_EQ(scope.report().total().tensors, 0);
  const at::Tensor kept = m.y.detach().clone();
  m.y = at::Tensor();
  m.out.sum().backward();
  EXPECT_TRUE(at::allclose(m.w.grad(), at::mm(kept.t(), ones_there({64, 64}))));
}

TEST(Recompute, GivesTheSameTwiceFromAGraphThatIsRetained) {
  at::manual_seed(3);
  const Model model = llama_mlp(at::kFloat);
  CheapRecompute scope;
  const at::Tensor out = model.forward(model.leaves).sum();
  scope.finish();
  const auto first = torch::autograd::grad({out}, model.leaves, {}, /*retain_graph=*/true);
  const auto second = torch::autograd::grad({out}, model.leaves);
  expect_same(first, second, "second backward");
}

TEST(Recompute, LeavesSecondDerivativesAsTheyAre) {
  auto second = [](bool cheap) {
    at::manual_seed(3);
    const Model model = llama_mlp(at::kDouble);
    std::optional<CheapRecompute> scope;
    if (cheap) scope.emplace();
    const at::Tensor out = model.forward(model.leaves).square().sum();
    if (scope) scope->finish();
    const auto first = torch::autograd::grad({out}, {model.leaves[0]}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum()}, model.leaves);
  };
  expect_same(second(false), second(true), "second derivatives");
}

TEST(Recompute, TakesFrozenWeightsHooksAndResultsThatLiveOn) {
  at::manual_seed(3);
  Model model = transformer_mlp(at::kFloat);
  model.leaves[3].set_requires_grad(false);
  at::Tensor seen;
  model.forward = [&](const Tensors& t) {
    const auto y = at::gelu(at::linear(at::layer_norm(t[0], {64}, t[1], t[2]), t[3], t[4]));
    if (y.requires_grad()) y.register_hook([](const at::Tensor& g) { return g * 2; });
    seen = y;  // lives on: used as it is
    return at::linear(y, t[5]) + at::linear(y * y, t[5]);
  };
  auto gradients = [&](Recompute recompute) {
    Tensors values = train(model, recompute).values;
    values.erase(values.begin() + 4);  // the frozen one's
    return values;
  };
  expect_same(gradients(Recompute::None), gradients(Recompute::Cheap), "frozen");
}

TEST(Recompute, LeavesSmallResultsAndOperatorsThatDrawAlone) {
  at::manual_seed(3);
  const at::Tensor small = leaf({8, 8}), w = leaf({8, 8}), x = leaf({64, 64}), v = leaf({64, 64});
  CheapRecompute scope;
  const at::Tensor a = at::mm(at::gelu(small * 2), w);
  const at::Tensor b = at::mm(at::rrelu(at::mm(x, v), 0.1, 0.3, true), v);
  scope.finish();
  EXPECT_EQ(scope.report().total().tensors, 0);
}

TEST(Recompute, SaysThatATensorIsNotThere) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  Written m = written_in_a_scope();
  auto& node = dynamic_cast<torch::autograd::generated::MmBackward0&>(*m.out.grad_fn());
  const at::Tensor saved = node.self_.unpack();
  EXPECT_EQ(saved.sizes(), m.y.sizes());
  try {
    saved.sum();
    FAIL() << "it read memory that is not there";
  } catch (const std::exception& e) {
    EXPECT_NE(std::string(e.what()).find("not kept for the backward"), std::string::npos) << e.what();
  }
}

// Two nodes save a result, and a third takes it after the decision about it.
TEST(Recompute, FillsOneResultForEveryNodeThatSavedIt) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  at::manual_seed(3);
  const Model model{"three uses",
                    {leaf({64, 64}), leaf({64, 64}), leaf({64, 64})},
                    [](const Tensors& t) {
                      const auto y = at::gelu(t[0] * 2);
                      const auto first = at::mm(y, t[1]) + at::mm(t[2], y);
                      return at::mm(at::silu(first), t[1]) + at::mm(y, t[2]) + y * y;
                    },
                    1};
  expect_same(train(model, Recompute::None).values, train(model, Recompute::Cheap).values, model.name);
  EXPECT_EQ(train(model, Recompute::Cheap).report.by_operator.at("aten::gelu").tensors, 1);
}

TEST(Recompute, IsReadFromAWord) {
  EXPECT_EQ(parse_recompute("cheap"), Recompute::Cheap);
  EXPECT_EQ(parse_recompute(to_string(Recompute::None)), Recompute::None);
  EXPECT_THROW(parse_recompute("full"), Error);
}

}  // namespace
}  // namespace plumb
