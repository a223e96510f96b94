#include <gtest/gtest.h>

#include "plumb/transforms/optimise/optimise_testing.h"

namespace plumb {
namespace {

using namespace testing_models;
using namespace testing_optimise;

TEST(Optimise, MakesFactorsPartOfTheProduct) {
  State state;
  parameter(state, "w", randn_there({16, 32}));
  parameter(state, "b", randn_there({16}));
  auto module = module_of(R"(graph {
    %x: f32[8, 32] = placeholder "x"
    %w: f32[16, 32] grad = get_attr "w"
    %b: f32[16] grad = get_attr "b"
    %y: f32[8, 16] = aten::linear(%x, %w, %b)
    %z: f32[8, 16] = aten::mul.Tensor(%y, 0.25)
    %s: f32[8, 16] = plumb::scale_bwd(%z, 3.0)
    output(%s)
  })",
                          state);
  auto fast = compile(module);
  EXPECT_EQ(count(*fast, "plumb::linear"), 1u);
  EXPECT_EQ(fast->graph().size(), 5u) << to_string(fast->graph());
  expect_close(*module, *fast, {randn_there({8, 32})});
}

TEST(Optimise, MakesAnOperandsFactorPartOfTheProduct) {
  auto module = module_of(R"(graph {
    %x: f32[3, 8, 32] = placeholder "x"
    %y: f32[3, 32, 5] = placeholder "y"
    %a: f32[3, 8, 32] = aten::div.Tensor(%x, 5.0)
    %b: f32[3, 32, 5] = plumb::scale_bwd(%y, 2.0)
    %z: f32[3, 8, 5] = aten::matmul(%a, %b)
    output(%z)
  })");
  auto fast = compile(module);
  EXPECT_EQ(fast->graph().size(), 4u) << to_string(fast->graph());
  expect_close(*module, *fast, {randn_there({3, 8, 32}), randn_there({3, 32, 5})});
}

TEST(Optimise, LeavesFactorsAloneThatWouldRoundOtherwiseWhenItMustBeExact) {
  auto module = module_of(R"(graph {
    %x: f32[8, 32] = placeholder "x"
    %y: f32[32, 5] = placeholder "y"
    %z: f32[8, 5] = aten::mm(%x, %y)
    %t: f32[8, 5] = aten::mul.Tensor(%z, 0.3)
    output(%t)
  })");
  auto exact = compile(module, {.exact = true});
  EXPECT_EQ(to_string(exact->graph()), to_string(module->graph()));
  EXPECT_EQ(exact->reports.back().count(ReportKind::LeftAlone), 1u);
  EXPECT_EQ(count(*compile(module), "plumb::matmul"), 1u);
}

TEST(Optimise, MakesTheFactorOfALayersInputPartOfItButNotOfItsBias) {
  at::manual_seed(4);
  State state;
  parameter(state, "w", randn_there({16, 32}));
  parameter(state, "b", randn_there({16}));
  auto module = module_of(R"(graph {
    %x: f32[8, 32] = placeholder "x"
    %w: f32[16, 32] grad = get_attr "w"
    %b: f32[16] grad = get_attr "b"
    %a: f32[8, 32] = aten::mul.Tensor(%x, 3.0)
    %y: f32[8, 16] = aten::linear(%a, %w, %b)
    %z: f32[8, 16] = plumb::scale_bwd(%y, 0.5)
    output(%z)
  })",
                          state);
  auto fast = compile(module);
  EXPECT_EQ(to_string(fast->graph()), R"(graph {
  %x: f32[8, 32] = placeholder "x"
  %w: f32[16, 32] grad = get_attr "w"
  %b: f32[16] grad = get_attr "b"
  %z: f32[8, 16] = plumb::linear(%x, %w, %b, constraint=None, scales=[3.0, 1.5, 1.5, 1.0, 0.5])
  output(%z)
}
)");
  expect_close(*module, *fast, {randn_there({8, 32})});
  EXPECT_EQ(count(*compile(module, {.exact = true}), "aten::mul"), 1u) << "three is no power of two";
}

TEST(Optimise, SeesFactorsThroughViews) {
  at::manual_seed(4);
  State state;
  parameter(state, "w", randn_there({16, 12}));
  parameter(state, "b", randn_there({16}));
  const std::string before = R"(graph {
    %x: f32[2, 3, 5, 4] = placeholder "x"
    %w: f32[16, 12] grad = get_attr "w"
    %b: f32[16] grad = get_attr "b"
    %m: f32[2, 3, 5, 4] = aten::div.Tensor(%x, 5.0)
    %t: f32[2, 5, 3, 4]{60, 4, 20, 1} = aten::transpose.int(%m, 1, 2)
    %r: f32[2, 5, 12] = aten::reshape(%t, [2, 5, 12])
    %y: f32[2, 5, 16] = plumb::linear(%r, %w, %b)
  )";
  auto module = module_of(before + "  output(%y)\n}", state);
  auto fast = compile(module);
  EXPECT_EQ(fast->graph().size(), module->graph().size() - 1) << to_string(fast->graph());
  expect_close(*module, *fast, {randn_there({2, 3, 5, 4})});
  // Every operator that only rearranges is looked through.
  auto other_views = module_of(R"(graph {
    %x: f32[5, 12, 1] = placeholder "x"
    %w: f32[16, 12] grad = get_attr "w"
    %b: f32[16] grad = get_attr "b"
    %m: f32[5, 12, 1] = aten::div.Tensor(%x, 5.0)
    %s: f32[5, 12] = aten::squeeze.dim(%m, 2)
    %t: f32[12, 5]{1, 12} = aten::t(%s)
    %u: f32[5, 12] = aten::numpy_T(%t)
    %y: f32[5, 16] = plumb::linear(%u, %w, %b)
    output(%y)
  })",
                               state);
  auto quick = compile(other_views);
  EXPECT_EQ(quick->graph().size(), other_views->graph().size() - 1) << to_string(quick->graph());
  expect_close(*other_views, *quick, {randn_there({5, 12, 1})});
  // Another reader of any of these values sees the factor.
  for (const char* other : {"%m", "%t", "%r"}) {
    auto seen = module_of(before + "  output(%y, " + other + ")\n}", state);
    EXPECT_FALSE(optimise(*derive(*seen))) << other;
  }
}

TEST(Optimise, MakesTheFactorOfAttentionPartOfTheLayerBehindIt) {
  at::manual_seed(4);
  State state;
  parameter(state, "w", randn_there({32, 32}));
  parameter(state, "b", randn_there({32}));
  const std::string before = R"(graph {
    %q: f32[2, 4, 16, 8] = placeholder "q"
    %k: f32[2, 4, 16, 8] = placeholder "k"
    %v: f32[2, 4, 16, 8] = placeholder "v"
    %w: f32[32, 32] grad = get_attr "w"
    %b: f32[32] grad = get_attr "b"
    %a: f32[2, 4, 16, 8]{512, 8, 32, 1} = plumb::scaled_dot_product_attention(%q, %k, %v, is_causal=True)
    %t: f32[2, 16, 4, 8] = aten::transpose.int(%a, 1, 2)
    %r: f32[2, 16, 32] = aten::reshape(%t, [2, 16, 32])
    %y: f32[2, 16, 32] = plumb::linear(%r, %w, %b)
  )";
  const Tensors inputs = {randn_there({2, 4, 16, 8}), randn_there({2, 4, 16, 8}), randn_there({2, 4, 16, 8})};
  auto module = module_of(before + "  output(%y)\n}", state);
  auto fast = compile(module);
  EXPECT_NE(to_string(fast->graph()).find("is_causal=True, scales=[1.0])"), std::string::npos)
      << to_string(fast->graph());
  expect_close(*module, *fast, inputs);
  EXPECT_FALSE(optimise(*fast)) << "its factor is gone";
  // One operator less runs: the result of torch's attention is used directly.
  auto nodes = [&](GraphModule& m) {
    size_t n = 0;
    Tensors given;
    for (const at::Tensor& x : inputs) given.push_back(x.detach().requires_grad_());
    for (auto node = run(m, given)[0].grad_fn(); node && node->num_outputs(); node = node->next_edge(0).function)
      n += node->name() == "plumb::attention_scale_backward";
    return n;
  };
  EXPECT_EQ(nodes(*module), 1u);
  EXPECT_EQ(nodes(*fast), 0u);
  EXPECT_FALSE(optimise(*derive(*module), {.exact = true}));
  EXPECT_FALSE(optimise(*derive(*module_of(before + "  output(%y, %a)\n}", state))));
}

TEST(Optimise, DropsAFactorOfOneThatNobodyCanSee) {
  auto module = module_of(R"(graph {
    %x: f32[8, 32] = placeholder "x"
    %a: f32[8, 32] = aten::cos(%x)
    %b: f32[8, 32] = aten::mul.Tensor(%a, 1.0)
    %c: f32[8, 32] = aten::cos(%b)
    %d: f32[8, 32] = aten::mul.Tensor(%c, 1.0)
    output(%d)
  })");
  auto fast = compile(module, {.exact = true});
  EXPECT_EQ(count(*fast, "aten::mul"), 1u) << "the result is a tensor of its own";
  expect_same_bits(*module, *fast, {randn_there({8, 32})});
}

}  // namespace
}  // namespace plumb
