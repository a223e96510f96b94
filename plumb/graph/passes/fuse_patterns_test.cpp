#include "plumb/graph/passes/fuse_patterns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/graph/pass.h"
#include "plumb/graph/passes/passes_testing.h"
#include "plumb/graph/pattern.h"

namespace plumb {
namespace {

const std::string kState = R"(
  %w: f32[8, 4] grad = get_attr "fc.weight"
  %b: f32[8] grad = get_attr "fc.bias")";

TEST(Raise, PutsLinearBackForAMatrixWithBias) {
  expect_rewrite("raise",
                 R"(graph {
  %x: f32[3, 4] = placeholder "x")" +
                     kState + R"(
  %t: f32[4, 8]{1, 4} = aten::t(%w)
  %y: f32[3, 8] = aten::addmm(%b, %x, %t) in "fc":"Linear"
  output(%y)
})",
                 R"(graph {
  %x = placeholder "x"
  %w = get_attr "fc.weight"
  %b = get_attr "fc.bias"
  %linear = aten::linear(%x, %w, %b) in "fc":"Linear"
  output(%linear)
})");
}

TEST(Raise, PutsLinearBackForCppsProductOfThreeDimensions) {
  const std::string text = R"(graph {
  %x: f32[2, 3, 4] = placeholder "x")" +
                           kState + R"(
  %t: f32[4, 8]{1, 4} = aten::t(%w)
  %m: f32[2, 3, 8] = aten::matmul(%x, %t)
  %y: f32[2, 3, 8] = aten::add_.Tensor(%m, %b)
  output(%y)
})";
  const std::string linear = R"(graph {
  %x = placeholder "x"
  %w = get_attr "fc.weight"
  %b = get_attr "fc.bias"
  %linear_1 = aten::linear(%x, %w, %b)
  output(%linear_1)
})";
  const std::string split = R"(graph {
  %x = placeholder "x"
  %w = get_attr "fc.weight"
  %b = get_attr "fc.bias"
  %linear = aten::linear(%x, %w)
  %y = aten::add_.Tensor(%linear, %b)
  output(%y)
})";
  // Whether the bias belongs in depends on the machine's matrix product: what was chosen has the same bits.
  const Graph g = parse_graph(text);
  const bool same = same_bits_with_bias(*g.find_value("x")->meta(), *g.find_value("w")->meta());
  expect_rewrite("raise", text, same ? linear : split);
  PrintOptions plain;
  plain.types = false;
  EXPECT_EQ(to_string(parse_graph(graph_after("raise", text, {{"inexact", "true"}})), plain),
            to_string(parse_graph(linear), plain));
}

TEST(Raise, LeavesABiasApartWhereItCannotBeTriedHere) {
  TensorMeta x, w;
  x.sizes = {2, 3, 4};
  x.strides = contiguous_strides(x.sizes);
  w.sizes = {8, 4};
  x.device = at::Device("meta");
  EXPECT_FALSE(same_bits_with_bias(x, w));
  x.device = at::kCPU;
  w.dtype = at::kDouble;
  EXPECT_FALSE(same_bits_with_bias(x, w));
  x.symbols = {"s0", "", ""};
  EXPECT_FALSE(same_bits_with_bias(x, x));
}

TEST(Raise, DoesNotDrawFromTheProcessesRandomNumbers) {
  TensorMeta x, w;
  x.sizes = {2, 5, 16};
  x.strides = contiguous_strides(x.sizes);
  w.sizes = {3, 16};
  at::manual_seed(4);
  const double want = at::rand({1}).item<double>();
  at::manual_seed(4);
  same_bits_with_bias(x, w);
  EXPECT_EQ(at::rand({1}).item<double>(), want);
}

TEST(Raise, LeavesProductsOfActivationsAlone) {
  expect_unchanged("raise", R"(graph {
  %q: f32[3, 4] = placeholder "q"
  %k: f32[5, 4] = placeholder "k"
  %t: f32[4, 5]{1, 4} = aten::t(%k)
  %y: f32[3, 5] = aten::matmul(%q, %t)
  output(%y)
}
)");
}

TEST(Raise, LeavesFormsWithAnInnerValueUsedElsewhereAlone) {
  expect_unchanged("raise", "graph {\n  %x: f32[3, 4] = placeholder \"x\"" + kState + R"(
  %t: f32[4, 8]{1, 4} = aten::t(%w)
  %y: f32[3, 8] = aten::addmm(%b, %x, %t)
  output(%y, %t)
}
)");
}

TEST(Raise, LeavesFormsAloneWhoseInnerValueIsTheirInputToo) {
  expect_unchanged("raise", R"(graph {
  %w: f32[4, 4] grad = get_attr "w"
  %t: f32[4, 4]{1, 4} grad = aten::t(%w)
  %y: f32[4, 4] grad = aten::matmul(%t, %t)
  output(%y, %w)
}
)");
}

TEST(Raise, LeavesFormsWithAWriteInBetweenAlone) {
  expect_unchanged("raise", "graph {\n  %x: f32[3, 4] = placeholder \"x\"" + kState + R"(
  %t: f32[4, 8]{1, 4} = aten::t(%w)
  %n: f32[8, 4] = aten::mul_.Tensor(%w, 2) no_grad
  %y: f32[3, 8] = aten::addmm(%b, %x, %t)
  output(%y)
}
)");
}

TEST(Raise, LeavesOtherScalesOfTheSumAlone) {
  expect_unchanged("raise", "graph {\n  %x: f32[3, 4] = placeholder \"x\"" + kState + R"(
  %t: f32[4, 8]{1, 4} = aten::t(%w)
  %y: f32[3, 8] = aten::addmm(%b, %x, %t, beta=2)
  output(%y)
}
)");
}

TEST(Raise, LeavesWhatRoundsDifferentlyUnlessAsked) {
  const std::string rms = R"(graph {
  %x: f32[2, 3, 8] = placeholder "x"
  %w: f32[8] grad = get_attr "norm.weight"
  %f: f32[2, 3, 8] = aten::to.dtype(%x, torch.float32)
  %q: f32[2, 3, 8] = aten::pow.Tensor_Scalar(%f, 2)
  %v: f32[2, 3, 1] = aten::mean.dim(%q, [-1], True)
  %a: f32[2, 3, 1] = aten::add.Tensor(%v, 1e-05)
  %r: f32[2, 3, 1] = aten::rsqrt(%a)
  %n: f32[2, 3, 8] = aten::mul.Tensor(%f, %r)
  %o: f32[2, 3, 8] = aten::to.dtype(%n, torch.float32)
  %y: f32[2, 3, 8] = aten::mul.Tensor(%w, %o)
  %s: f32[2, 3, 8] = aten::sigmoid(%y)
  %z: f32[2, 3, 8] = aten::mul.Tensor(%s, %y)
  output(%z)
}
)";
  expect_unchanged("raise", rms);
  EXPECT_EQ(graph_after("raise", rms, {{"inexact", "true"}}), R"(graph {
  %x: f32[2, 3, 8] = placeholder "x"
  %w: f32[8] grad = get_attr "norm.weight"
  %f: f32[2, 3, 8] = aten::to.dtype(%x, torch.float32)
  %rms_norm_1: f32[2, 3, 8] = aten::rms_norm(%x, [8], %w, 1e-05)
  %silu: f32[2, 3, 8] = aten::silu(%rms_norm_1)
  output(%silu)
}
)");
}

// Every rule: what it makes computes the same but for rounding.
void expect_close(const std::string& text, const std::string& op) {
  GraphModule m = module_of(parse_graph(text));
  const auto inputs = sample_inputs(m.graph());
  const Seen was = observe(m, inputs);
  ASSERT_EQ(was.error, "");
  EXPECT_TRUE(run_checked("raise", m, {{"inexact", "true"}})) << text;
  EXPECT_THAT(to_string(m.graph()), testing::HasSubstr(op));
  const Seen is = observe(m, inputs);
  ASSERT_EQ(is.error, "");
  ASSERT_EQ(was.tensors.size(), is.tensors.size());
  for (size_t i = 0; i < is.tensors.size(); ++i) {
    if (!is.tensors[i].second.defined()) continue;
    EXPECT_TRUE(at::allclose(was.tensors[i].second, is.tensors[i].second, 1e-4, 1e-5))
        << op << ": " << is.tensors[i].first;
  }
}

TEST(Raise, FindsActivationsNormsAndAttention) {
  const std::string x = "graph { %x: f32[2, 3, 8] = placeholder \"x\" ";
  expect_close(
      x + R"(%q = aten::pow.Tensor_Scalar(%x, 3) %c = aten::mul.Tensor(%q, 0.044715) %a = aten::add.Tensor(%x, %c)
    %i = aten::mul.Tensor(%a, 0.7978845608028654) %e = aten::tanh(%i) %p = aten::add.Scalar(%e, 1) %h = aten::mul.Scalar(%x, 0.5)
    %y = aten::mul.Tensor(%h, %p) output(%y) })",
      "aten::gelu(%x, approximate=\"tanh\")");
  expect_close(x + R"(%d = aten::div.Tensor(%x, 1.4142135623730951) %e = aten::erf(%d) %p = aten::add.Tensor(%e, 1.0)
    %h = aten::mul.Tensor(%x, %p) %y = aten::mul.Tensor(%h, 0.5) output(%y) })",
               "aten::gelu(%x)");
  expect_close(x + R"(%m = aten::amax(%x, [-1], True) %d = aten::sub.Tensor(%x, %m) %e = aten::exp(%d)
    %s = aten::sum.dim_IntList(%e, [-1], True) %y = aten::div.Tensor(%e, %s) output(%y) })",
               "aten::softmax.int(%x, -1)");
  expect_close(x + R"(%w: f32[8] grad = get_attr "w" %b: f32[8] grad = get_attr "b" %m = aten::mean.dim(%x, [-1], True)
    %d = aten::sub.Tensor(%x, %m) %q = aten::pow.Tensor_Scalar(%d, 2) %v = aten::mean.dim(%q, [-1], True)
    %a = aten::add.Tensor(%v, 1e-5) %s = aten::sqrt(%a) %n = aten::div.Tensor(%d, %s) %g = aten::mul.Tensor(%w, %n)
    %y = aten::add.Tensor(%g, %b) output(%y) })",
               "aten::layer_norm(%x, [8], %w, %b");
  expect_close(
      R"(graph { %q: f32[2, 3, 5, 4] = placeholder "q" %k: f32[2, 3, 5, 4] = placeholder "k" %v: f32[2, 3, 5, 4] = placeholder "v"
    %mask: f32[5, 5] = get_attr "mask" %t = aten::transpose.int(%k, -2, -1) %p = aten::matmul(%q, %t) %s = aten::div.Tensor(%p, 2.0)
    %z = aten::add.Tensor(%s, %mask) %a = aten::softmax.int(%z, -1) %y = aten::matmul(%a, %v) output(%y) })",
      "aten::scaled_dot_product_attention(%q, %k, %v, %mask, scale=0.5)");
}

TEST(Raise, LeavesFormsOfIntegersAloneWhoseOperatorTakesNone) {
  const std::string x = "graph { %x: i64[2, 3, 8] = placeholder \"x\" ";
  for (const char* lines :
       {"%s = aten::sigmoid(%x) %y = aten::mul.Tensor(%x, %s)",
        "%d = aten::div.Tensor(%x, 1.4142135623730951) %e = aten::erf(%d) %p = aten::add.Tensor(%e, 1.0) "
        "%h = aten::mul.Tensor(%x, %p) %y = aten::mul.Tensor(%h, 0.5)",
        "%m = aten::amax(%x, [-1], True) %d = aten::sub.Tensor(%x, %m) %e = aten::exp(%d) "
        "%s = aten::sum.dim_IntList(%e, [-1], True) %y = aten::div.Tensor(%e, %s)"})
    expect_unchanged("raise", x + lines + " output(%y) }", {{"inexact", "true"}});
}

TEST(Raise, LeavesAttentionAloneWhoseMaskMakesMoreScoresOrHasOneDimension) {
  for (const char* mask : {"3, 1, 4, 4", "4", "1"}) {
    expect_unchanged("raise",
                     "graph { %q: f32[1, 2, 4, 8] = placeholder \"q\" %m: f32[" + std::string(mask) +
                         R"(] = placeholder "m" %t = aten::transpose.int(%q, -2, -1) %p = aten::matmul(%q, %t)
    %s = aten::mul.Tensor(%p, 0.5) %z = aten::add.Tensor(%s, %m) %a = aten::softmax.int(%z, -1) %y = aten::matmul(%a, %q)
    output(%y) })",
                     {{"inexact", "true"}});
  }
}

// Every way to write a norm that Python has, and what is made of it.
TEST(Raise, FindsNormsInEverySpelling) {
  const std::string x = "graph { %x: f32[2, 3, 8] = placeholder \"x\" %w: f32[8] grad = get_attr \"w\" ";
  const std::string v =
      "%v: f32[2, 3, 1] = aten::mean.dim(%q, [-1], True) %a: f32[2, 3, 1] = aten::add.Tensor(%v, 1e-5) ";
  for (const std::string square : {"aten::pow.Tensor_Scalar(%x, 2)", "aten::square(%x)", "aten::mul.Tensor(%x, %x)"}) {
    for (const std::string divided :
         {"%r = aten::rsqrt(%a) %n: f32[2, 3, 8] = aten::mul.Tensor(%r, %x)",
          "%r = aten::pow.Tensor_Scalar(%a, -0.5) %n: f32[2, 3, 8] = aten::mul.Tensor(%x, %r)",
          "%s = aten::sqrt(%a) %n: f32[2, 3, 8] = aten::div.Tensor(%x, %s)",
          "%s = aten::sqrt(%a) %r = aten::reciprocal(%s) %n: f32[2, 3, 8] = aten::mul.Tensor(%x, %r)"}) {
      const std::string body = x + "%q: f32[2, 3, 8] = " + square + v + divided;
      expect_close(body + " output(%n) }", "aten::rms_norm(%x, [8], eps=1e-05)");
      expect_close(body + " %y: f32[2, 3, 8] = aten::mul.Tensor(%n, %w) output(%y) }",
                   "aten::rms_norm(%x, [8], %w, 1e-05)");
      expect_close(body + " %y: f32[2, 3, 8] = aten::mul.Tensor(%w, %n) %z = aten::add.Tensor(%x, %y) output(%z) }",
                   "aten::rms_norm(%x, [8], %w, 1e-05)");
      expect_close(
          body + " %p: f32[8] = aten::add.Tensor(%w, 1.0) %y: f32[2, 3, 8] = aten::mul.Tensor(%n, %p) output(%y) }",
          "aten::rms_norm(%x, [8], %p, 1e-05)");
    }
  }
  const std::string centered = x +
                               "%b: f32[8] grad = get_attr \"b\" %m: f32[2, 3, 1] = aten::mean.dim(%x, [2], True) "
                               "%d: f32[2, 3, 8] = aten::sub.Tensor(%x, %m) ";
  for (const std::string variance :
       {"%v = aten::var.correction(%x, [2], correction=0, keepdim=True)", "%v = aten::var.dim(%x, [2], False, True)",
        "%z = aten::sub.Tensor(%x, %m) %q = aten::square(%z) %v = aten::mean.dim(%q, [2], True)",
        "%q = aten::mul.Tensor(%d, %d) %v = aten::mean.dim(%q, [2], True)"}) {
    const std::string body = centered + variance +
                             " %a = aten::add.Tensor(%v, 1e-5) %r = aten::rsqrt(%a) "
                             "%n: f32[2, 3, 8] = aten::mul.Tensor(%d, %r) ";
    expect_close(body + "output(%n) }", "aten::layer_norm(%x, [8])");
    expect_close(body + "%y: f32[2, 3, 8] = aten::mul.Tensor(%w, %n) output(%y) }", "aten::layer_norm(%x, [8], %w)");
    expect_close(body + "%y: f32[2, 3, 8] = aten::mul.Tensor(%w, %n) %o = aten::add.Tensor(%b, %y) output(%o) }",
                 "aten::layer_norm(%x, [8], %w, %b)");
  }
}

TEST(Raise, FindsANormWhoseCastInputIsAResidualToo) {
  EXPECT_EQ(graph_after("raise", R"(graph {
  %x: bf16[2, 8] = placeholder "x"
  %w: bf16[8] grad = get_attr "norm.weight"
  %f: f32[2, 8] = aten::to.dtype(%x, torch.float32)
  %q: f32[2, 8] = aten::pow.Tensor_Scalar(%f, 2)
  %v: f32[2, 1] = aten::mean.dim(%q, [-1], True)
  %a: f32[2, 1] = aten::add.Tensor(%v, 1e-06)
  %r: f32[2, 1] = aten::rsqrt(%a)
  %n: f32[2, 8] = aten::mul.Tensor(%f, %r)
  %o: bf16[2, 8] = aten::to.dtype(%n, torch.bfloat16)
  %y: bf16[2, 8] = aten::mul.Tensor(%w, %o)
  %s: f32[2, 8] = aten::add.Tensor(%f, %y)
  output(%s)
})",
                        {{"inexact", "true"}}),
            R"(graph {
  %x: bf16[2, 8] = placeholder "x"
  %w: bf16[8] grad = get_attr "norm.weight"
  %f: f32[2, 8] = aten::to.dtype(%x, torch.float32)
  %to: f32[8] grad = aten::to.dtype(%w, torch.float32)
  %rms_norm_1: f32[2, 8] = aten::rms_norm(%f, [8], %to, 1e-06)
  %to_1: bf16[2, 8] = aten::to.dtype(%rms_norm_1, torch.bfloat16)
  %s: f32[2, 8] = aten::add.Tensor(%f, %to_1)
  output(%s)
}
)");
}

TEST(Raise, LeavesNormsAloneThatAreNotOverTheLastDimensionsOrUseAnActivationAsWeight) {
  const std::string x = "graph { %x: f32[2, 3, 8] = placeholder \"x\" %w: f32[2, 3, 8] = placeholder \"w\" ";
  const auto text = [&](const std::string& dims) {
    return graph_after("raise",
                       x + "%q = aten::square(%x) %v = aten::mean.dim(%q, " + dims +
                           ", True) %a = aten::add.Tensor(%v, 1e-5) %r = aten::rsqrt(%a) %n: f32[2, 3, 8] = "
                           "aten::mul.Tensor(%x, %r) %y: f32[2, 3, 8] = aten::mul.Tensor(%w, %n) output(%y) }",
                       {{"inexact", "true"}});
  };
  EXPECT_THAT(text("[1]"), testing::Not(testing::HasSubstr("rms_norm")));
  EXPECT_THAT(text("[-1]"), testing::HasSubstr("aten::rms_norm(%x, [8], eps=1e-05)"));
  EXPECT_THAT(text("[1, 2]"), testing::HasSubstr("aten::rms_norm(%x, [3, 8], eps=1e-05)"));
}

TEST(Raise, MakesAViewBehindANormOfOtherStridesAReshape) {
  const std::string text = R"(graph {
  %x: f32[2, 4, 5, 4]{80, 4, 16, 1} = placeholder "x"
  %q: f32[2, 4, 5, 4]{80, 4, 16, 1} = aten::square(%x)
  %v: f32[2, 4, 5, 1] = aten::mean.dim(%q, [-1], True)
  %a: f32[2, 4, 5, 1] = aten::add.Tensor(%v, 1e-06)
  %r: f32[2, 4, 5, 1] = aten::rsqrt(%a)
  %n: f32[2, 4, 5, 4]{80, 4, 16, 1} = aten::mul.Tensor(%x, %r)
  %c: f32[2, 4, 5, 4]{80, 4, 16, 1} = aten::cos(%n)
  %t: f32[2, 5, 4, 4] = aten::transpose.int(%c, 1, 2)
  %y: f32[2, 5, 16] = aten::view(%t, [2, 5, 16])
  output(%y)
})";
  const std::string after = graph_after("raise", text, {{"inexact", "true"}});
  EXPECT_THAT(after, testing::HasSubstr("%y: f32[2, 5, 16] = aten::reshape(%t, [2, 5, 16])"));
}

TEST(Pattern, BindsEachPlaceholderToOneThing) {
  Pattern square("graph { %x = placeholder \"x\" %y = aten::mul.Tensor(%x, %x) output(%y) }");
  Graph g = parse_graph(R"(graph { %a = placeholder "a" %b = placeholder "b" %c = aten::mul.Tensor(%a, %a)
    %d = aten::mul.Tensor(%a, %b) output(%c, %d) })");
  auto match = square.match(g.find_value("c")->producer());
  ASSERT_TRUE(match);
  EXPECT_EQ(match->at("x").value(), g.find_value("a"));
  EXPECT_FALSE(square.match(g.find_value("d")->producer()));
  EXPECT_FALSE(square.match(g.find_value("a")->producer()));
  EXPECT_THROW(match->at("y"), Error);
  EXPECT_THROW(Pattern("graph { %x = placeholder \"x\" output(%x) }"), Error);
}

}  // namespace
}  // namespace plumb
