#include "plumb/transforms/scale/scale_adds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/transforms/scale/unit_scale_testing.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::Not;
using namespace testing_unit_scale;

TEST(ScaleAdds, FindsASkipThatANormCastToTheTypeItHas) {
  // Norms of transformers look like this: the cast returns its input itself, so capture knows the skip by its name.
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %n: f32[4, 8] = aten::rms_norm(%x, [8])
      %f: f32[4, 8] = aten::gelu(%n)
      %c: f32[4, 8] = aten::to.dtype(%x, torch.float32)
      %y: f32[4, 8] = aten::add.Tensor(%c, %f)
      output(%y)
    })");
  EXPECT_EQ(text, same(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %x_branch: f32[4, 8], %x_skip: f32[4, 8] = plumb::residual_split(%x, 0.5)
      %n: f32[4, 8] = plumb::rms_norm(%x_branch, [8])
      %f: f32[4, 8] = plumb::gelu(%n)
      %y: f32[4, 8] = plumb::residual_add(%f, %x_skip, 0.5)
      output(%y)
    })"));
  EXPECT_THAT(after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %f: bf16[4, 8] = aten::to.dtype(%x, torch.bfloat16)
      %c: f32[4, 8] = aten::to.dtype(%x, torch.float32, False, True)
      %g: f32[4, 8] = aten::mul.Tensor(%c, %f)
      output(%g)
    })"),
              testing::AllOf(HasSubstr("aten::to.dtype(%x, torch.bfloat16)"), HasSubstr("copy=True")))
      << "a cast to another type and a copy stay";
}

TEST(ScaleAdds, FindASkipThatIsACopy) {
  // x.clone() + f(x), and Python's sum([x, f(x)]), which begins with 0 + x.
  for (const char* copy : {"aten::clone(%x)", "aten::contiguous(%x)", "aten::add.Tensor(%x, 0)"}) {
    const std::string text = after_scaling(std::string(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %c: f32[4, 8] = )") + copy + R"(
      %f: f32[4, 8] = aten::gelu(%x)
      %y: f32[4, 8] = aten::add.Tensor(%c, %f)
      output(%y)
    })");
    EXPECT_THAT(text, testing::AllOf(HasSubstr("plumb::gelu(%x_branch)"), Not(HasSubstr("%c")),
                                     HasSubstr("plumb::residual_add(%f, %x_skip, 0.5)")))
        << copy;
  }
  // The copy holds what a write through a view of unknown inverse changes.
  EXPECT_THAT(after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %h: f32[4, 8] = aten::tanh(%x)
      %c: f32[4, 8] = aten::clone(%h)
      %v: f32[1, 4, 8] = aten::unsqueeze(%h, 0)
      %m: f32[1, 4, 8] = aten::mul_.Scalar(%v, 2)
      %f: f32[4, 8] = aten::gelu(%h)
      %y: f32[4, 8] = aten::add.Tensor(%c, %f)
      output(%y)
    })"),
              HasSubstr("aten::clone(%h)"));
}

TEST(ScaleAdds, TakeNumbersThatWeightTheOperandsIntoTau) {
  const std::string twice = "%s: f32[4, 8] = aten::mul.Tensor(%x, 2)",
                    half = "%b: f32[4, 8] = aten::mul.Scalar(%f, 0.5)",
                    quarter = "%s: f32[4, 8] = aten::div.Tensor(%x, 4)";
  const struct {
    std::string products, operands, rescaled, tau;
  } cases[] = {
      {twice, "%s, %f", "rescale(%s, 0.5, 0.5)", ", 0.25)"},  // DeepNorm
      {half, "%x, %b", "rescale(%b, 2.0, 2.0)", "%x_skip, 0.25)"},
      {half, "%b, %x", "rescale(%b, 2.0, 2.0)", "%x_skip, 0.25)"},
      {quarter + "\n" + half, "%s, %b", "rescale(%s, 4.0, 4.0)", "%rescale_1)"},
      {"", "%x, %f, alpha=0.5", "mul.Tensor(%f, 0.5)", "%x_skip, 0.25)"},
      {half, "%x, %b, alpha=8", "rescale(%mul, 0.25, 0.25)", "%x_skip, 2.0)"},
  };
  for (const auto& [products, operands, rescaled, tau] : cases) {
    const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %f: f32[4, 8] = aten::gelu(%x)
      )" + products + R"(
      %y: f32[4, 8] = aten::add.Tensor()" + operands +
                                           R"()
      output(%y)
    })");
    EXPECT_THAT(text, testing::AllOf(HasSubstr("plumb::gelu(%x_branch)"), HasSubstr(rescaled), HasSubstr(tau)))
        << products << operands;
  }
  // No residual layer, a number that turns the sign or leaves float16's range, a product that something else reads:
  // numbers stay where they are.
  for (const char* rest : {"%s: f32[4, 8] = aten::mul.Tensor(%z, 2)\n %y: f32[4, 8] = aten::add.Tensor(%s, %f)",
                           "%s: f32[4, 8] = aten::mul.Tensor(%x, -2)\n %y: f32[4, 8] = aten::add.Tensor(%s, %f)",
                           "%s: f32[4, 8] = aten::mul.Tensor(%x, 1e-40)\n %y: f32[4, 8] = aten::add.Tensor(%s, %f)",
                           "%s: f32[4, 8] = aten::mul.Tensor(%x, 2)\n %r: f32[4, 8] = aten::add.Tensor(%s, %f)\n "
                           "%y: f32[4, 8] = aten::mul.Tensor(%r, %s)"}) {
    EXPECT_THAT(after_scaling(c10::str(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %z: f32[4, 8] = placeholder "z"
      %f: f32[4, 8] = aten::gelu(%x)
      )",
                                       rest, R"(
      output(%y)
    })")),
                testing::AllOf(HasSubstr(" = aten::mul.Tensor("), HasSubstr("(%s, %f")))
        << rest;
  }
}

TEST(ScaleAdds, LeaveStraightThroughEstimatorsAlone) {
  // The value of each sum is that of the rounded operand: any factor would let the other one through.
  for (const char* estimator : {"%q = aten::round(%x) %s = aten::sub.Tensor(%q, %x) %d = aten::detach(%s)",
                                "%q = aten::round(%x) %d = aten::detach(%q)",
                                "%v, %i: i64[4, 1] = aten::max.dim(%x, -1, True) %z = aten::zeros_like(%x) "
                                "%h = aten::scatter.value(%z, -1, %i, 1.0) %e = aten::detach(%x) "
                                "%d = aten::sub.Tensor(%h, %e)"}) {
    Report report;
    const std::string text = after_scaling(std::string(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      )") + estimator + R"(
      %y = aten::add.Tensor(%x, %d)
      %r = aten::tanh(%y)
      %o = aten::add.Tensor(%y, %r)
      output(%o)
    })",
                                           {}, {}, &report);
    EXPECT_THAT(text, HasSubstr("%y = aten::add.Tensor(%x, %d)")) << estimator;
    EXPECT_THAT(text, HasSubstr("plumb::residual_split(%y, 0.5)")) << estimator;
    EXPECT_THAT(report.find(ReportKind::LeftAlone, "y")->reason, HasSubstr("as in a straight-through estimator"));
  }
}

TEST(ScaleAdds, LeaveSumsAloneOfAShareAndTheRest) {
  for (const char* products : {"%l = aten::mul.Tensor(%rest, %n) %r = aten::mul.Tensor(%z, %h)",
                               "%l = aten::mul.Tensor(%h, %z) %r = aten::mul.Tensor(%n, %rest)"}) {
    Report report;
    const std::string text = after_scaling(std::string(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %h = aten::gelu(%x)
      %n = aten::tanh(%x)
      %z = aten::sigmoid(%x)
      %rest = aten::rsub.Scalar(%z, 1)
      )") + products + R"(
      %next = aten::add.Tensor(%l, %r)
      %two = aten::rsub.Scalar(%z, 2)
      %t = aten::mul.Tensor(%two, %n)
      %other = aten::add.Tensor(%t, %r)
      output(%next, %other)
    })",
                                           {}, {}, &report);
    EXPECT_THAT(text, HasSubstr("%next = aten::add.Tensor(%l, %r)"));
    EXPECT_THAT(report.find(ReportKind::LeftAlone, "next")->reason, HasSubstr("one minus it"));
    EXPECT_THAT(text, HasSubstr("%other = plumb::add(%t, %r"));
  }
}

TEST(ScaleAdds, LeaveSumsAloneThatTensorsWithoutAGradientWeight) {
  Report report;
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] grad = placeholder "x"
      %positions: i64[4, 8] = placeholder "positions"
      %t = aten::mul.Tensor(%positions, 0.1)
      %a = aten::tanh(%x)
      %b = aten::gelu(%x)
      %c = aten::cos(%t)
      %s = aten::sin(%t)
      %ac = aten::mul.Tensor(%a, %c)
      %bs = aten::mul.Tensor(%s, %b)
      %turned = aten::sub.Tensor(%ac, %bs)
      %as = aten::mul.Tensor(%a, %s)
      %bc = aten::mul.Tensor(%b, %c)
      %bcc = aten::to.dtype(%bc, 6)
      %other = aten::add.Tensor(%as, %bcc)
      %half = aten::mul.Tensor(%a, 0.5)
      %number = aten::add.Tensor(%half, %bs)
      %gated = aten::mul.Tensor(%a, %b)
      %gate = aten::add.Tensor(%gated, %bs)
      output(%turned, %other, %number, %gate)
    })",
                                         {}, {}, &report);
  EXPECT_THAT(text, HasSubstr("%other = aten::add.Tensor(%as, %bcc)"));
  EXPECT_THAT(report.find(ReportKind::LeftAlone, "other")->reason, HasSubstr("as in a rotation"));
  for (const char* scaled : {"%number = plumb::add(%half, %bs", "%gate = plumb::add(%gated, %bs"})
    EXPECT_THAT(text, HasSubstr(scaled));
}

TEST(ScaleAdds, LeaveStraightThroughEstimatorsAloneInEverySpelling) {
  for (const char* estimator : {"%d = aten::detach(%x) %s = aten::sub.Tensor(%x, %d) %y = aten::add.Tensor(%q, %s)",
                                "%d = aten::detach(%x) %s = aten::sub.Tensor(%x, %d) %y = aten::add.Tensor(%s, %q)",
                                "%d = aten::detach(%x) %s = aten::sub.Tensor(%q, %d) %y = aten::add.Tensor(%s, %x)",
                                "%d = aten::detach(%x) %s = aten::add.Tensor(%q, %x) %y = aten::sub.Tensor(%s, %d)",
                                "%d = aten::detach(%x) %s = aten::add.Tensor(%x, %q) %y = aten::sub.Tensor(%s, %d)"}) {
    const std::string text = after_scaling(std::string(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %q = aten::round(%x)
      )") + estimator + R"(
      %r = aten::tanh(%y)
      %o = aten::add.Tensor(%y, %r)
      output(%o)
    })");
    EXPECT_THAT(text, Not(HasSubstr("plumb::add("))) << estimator;
    EXPECT_THAT(text, HasSubstr("plumb::residual_add(%r, %y_skip, 0.5)"))
        << "another sum of it is scaled: " << estimator;
    EXPECT_EQ(text.find("plumb::residual_add"), text.rfind("plumb::residual_add")) << estimator;
  }
}

TEST(ScaleAdds, TakeNoSumWithATensorThatIsWrittenInPlaceForAResidualLayer) {
  // A view of unknown inverse keeps functionalise from making the write pure.
  Report report;
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %h: f32[4, 8] = aten::gelu(%x)
      %v: f32[1, 4, 8] = aten::unsqueeze(%h, 0)
      %m: f32[1, 4, 8] = aten::mul_.Scalar(%v, 3)
      %f: f32[4, 8] = aten::gelu(%h)
      %y: f32[4, 8] = aten::add.Tensor(%h, %f)
      %g: f32[4, 8] = aten::gelu(%y)
      %z: f32[4, 8] = aten::add.Tensor(%y, %g)
      output(%z)
    })",
                                         {}, {}, &report);
  EXPECT_THAT(text, HasSubstr("= plumb::add(%h, %f"));
  EXPECT_THAT(text, HasSubstr("plumb::residual_add(%g, %y_skip")) << "what is not written is split as before";
  EXPECT_THAT(report.to_text(), HasSubstr("writes in place into the memory of the skip: no residual add"));
}

TEST(ScaleAdds, TakeNoSumOfAStreamWithAPositionEmbeddingForAResidualLayer) {
  // Every layer of DETR adds the same embedding to the queries, and the stream goes on without it: as a branch it would
  // be weighed by tau, and the queries would be the embedding alone.
  Report report;
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %p: f32[4, 8] = placeholder "pos"
      %q = aten::add.Tensor(%x, %p)
      %f = aten::gelu(%q)
      %y = aten::add.Tensor(%x, %f)
      %q2 = aten::add.Tensor(%y, %p)
      %f2 = aten::gelu(%q2)
      %z = aten::add.Tensor(%y, %f2)
      output(%z, %f2)
    })",
                                         {}, {}, &report);
  EXPECT_THAT(text, HasSubstr("%q2 = plumb::add(%y_branch, %p)"));
  EXPECT_THAT(text, HasSubstr("%y = plumb::residual_add(%f, %x_skip, 0.5)"));
  EXPECT_THAT(text, HasSubstr("%z = plumb::residual_add(%f2, %y_skip, 0.5)")) << "an output is no other use";
  EXPECT_EQ(report.find(ReportKind::Replaced, "q2")->reason,
            "one operand is computed from the other and used elsewhere too: no residual add");
}

TEST(ScaleAdds, TakeABiasOfLogitsThatLayersShareForNoResidualLayer) {
  Report report;
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 4] = placeholder "x"
      %b: f32[4, 4] = placeholder "bias"
      %s = aten::add.Tensor(%x, %b)
      %p = aten::softmax.int(%s, -1)
      %f = aten::matmul(%p, %x)
      %y = aten::add.Tensor(%x, %f)
      %k = aten::matmul(%y, %y)
      %s2 = aten::add.Tensor(%k, %b)
      %d = aten::div.Tensor(%s2, 2)
      %p2 = aten::softmax.int(%d, -1)
      %f2 = aten::matmul(%p2, %y)
      %z = aten::add.Tensor(%y, %f2)
      output(%z)
    })",
                                         {}, {}, &report);
  EXPECT_THAT(text, HasSubstr("%s2 = plumb::add(%k, %b)"));
  EXPECT_THAT(text, HasSubstr("%z = plumb::residual_add(%f2, %y_skip, 0.01)"));
  EXPECT_EQ(report.find(ReportKind::Replaced, "s2")->reason, "a bias of attention's logits: no residual add");
}

TEST(ScaleAdds, TakeStreamsThatSharesMixForTheSkip) {  // hyper-connections
  const std::string streams = R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %c: f32[4, 4] = placeholder "c"
      %s: f32[4, 1] = aten::sum.dim_IntList(%c, [1], True)
      %h: f32[4, 4] = aten::div.Tensor(%c, %s)
      %mix: f32[4, 8] = aten::matmul(%h, %x)
      %f: f32[4, 8] = aten::gelu()",
                    sum = R"()
      %y: f32[4, 8] = aten::add.Tensor(%f, %mix)
      output(%y)
    })";
  const std::string text = after_scaling(streams + "%x" + sum);
  EXPECT_THAT(text, HasSubstr("aten::matmul(%h, %x_skip)"));
  EXPECT_THAT(text, HasSubstr("= plumb::residual_add(%f, %mix, 0.5)"));
  EXPECT_THAT(after_scaling(streams + "%c" + sum), Not(HasSubstr("residual"))) << "the branch is no function of them";
}

TEST(ScaleAdds, TakeAStreamThatAParameterWeightsForTheSkip) {
  State state;
  state.add({"w", AttrKind::Parameter, torch::ones({8}).requires_grad_()});
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %w: f32[8] grad = get_attr "w"
      %s: f32[4, 8] = aten::mul.Tensor(%w, %x)
      %f: f32[4, 8] = aten::gelu(%x)
      %y: f32[4, 8] = aten::add.Tensor(%s, %f)
      output(%y)
    })",
                                         state);
  EXPECT_THAT(text, HasSubstr("aten::mul.Tensor(%w, %x_skip)"));
  EXPECT_THAT(text, HasSubstr("= plumb::residual_add(%f, %s, 0.5)"));
}

TEST(ScaleAdds, LeaveABiasAsItIs) {
  State state;
  state.add({"b", AttrKind::Parameter, torch::zeros({8}).requires_grad_()});
  state.add({"positions", AttrKind::Parameter, torch::randn({1, 16, 8}).requires_grad_()});
  Report report;
  const std::string text = after_scaling(R"(graph {
      %x: f32[2, 16, 8] = placeholder "x"
      %b: f32[8] grad = get_attr "b"
      %p: f32[1, 16, 8] grad = get_attr "positions"
      %with_bias: f32[2, 16, 8] = aten::add.Tensor(%b, %x)
      %y: f32[2, 16, 8] = aten::add.Tensor(%with_bias, %p)
      output(%y)
    })",
                                         state, {}, &report);
  EXPECT_THAT(text, HasSubstr("plumb::scale_bwd(%b, 0.17677"));  // 1 / sqrt(32)
  EXPECT_THAT(text, HasSubstr("= aten::add.Tensor(%scale_bwd, %x)"));
  EXPECT_THAT(text, HasSubstr("= plumb::add(%with_bias, %p"));
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "with_bias")->reason, "it adds a bias");
}

TEST(ScaleAdds, FollowGradientsThroughComplexNumbers) {
  // FNet mixes tokens by a Fourier transform and keeps its real part: a residual layer, and no straight-through
  // estimator.
  Report report;
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %c: c64[4, 8] = aten::fft_fft(%x)
      %f: f32[4, 8] = aten::real(%c)
      %y: f32[4, 8] = aten::add.Tensor(%x, %f)
      output(%y)
    })",
                                         {}, {}, &report);
  EXPECT_THAT(text, HasSubstr("plumb::residual_add(%f, %x_skip, 0.5)"));
  EXPECT_TRUE(report.find(ReportKind::LeftAlone, "c")) << "a Fourier transform changes the scale";
}

TEST(ScaleAdds, TakeARoutersSoftmaxForNoAttention) {
  // A choice among probabilities, the sharing out of what was chosen, a mask of what was not, a probability an expert.
  for (const char* router :
       {"%p = aten::softmax.int(%x, -1) %q = aten::div.Tensor(%p, 2) %v, %i = aten::topk(%q, 2)",
        "%c, %i = aten::topk(%x, 2) %v = aten::softmax.int(%c, -1)",
        "%c, %i = aten::max.dim(%x, -1, True) %l = aten::lt.Tensor(%x, %c) "
        "%k = aten::masked_fill.Tensor(%c, %l, %c) %v = aten::softmax.int(%k, -1)",
        "%p: f32[4, 8] = aten::softmax.int(%x, -1) %v: f32[4, 1] = aten::slice.Tensor(%p, 1, 2, 3)",
        "%p: f32[4, 8] = aten::softmax.int(%x, -1) %o: f32[4] = aten::select.int(%p, -1, 2) "
        "%v: f32[4, 1] = aten::unsqueeze(%o, 1)"}) {
    const std::string text = after_scaling(std::string(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %f = aten::gelu(%x)
      )") + router + R"(
      %s = aten::sum.dim_IntList(%v, [-1], True)
      %m = aten::mul.Tensor(%f, %s)
      %y = aten::add.Tensor(%x, %m)
      output(%y)
    })");
    EXPECT_THAT(text, HasSubstr("plumb::residual_split(%x, 0.5)")) << router;
    EXPECT_THAT(text, Not(HasSubstr("0.01"))) << router;
  }
  EXPECT_THAT(after_scaling(R"(graph {
      %x: f32[4, 4] = placeholder "x"
      %p: f32[4, 4] = aten::softmax.int(%x, -1)
      %s: f32[4, 3] = aten::slice.Tensor(%p, 1, 1)
      %r: f32[3, 4] = aten::slice.Tensor(%x, 0, 1)
      %m = aten::matmul(%s, %r)
      %y = aten::add.Tensor(%x, %m)
      output(%y)
    })"),
              HasSubstr("plumb::residual_split(%x, 0.01)"))
      << "attention without its first token is attention";
  EXPECT_THAT(after_scaling(R"(graph {
      %x: f32[4, 4] = placeholder "x"
      %l = aten::maximum(%x, %x)
      %p = aten::softmax.int(%l, -1)
      %m = aten::matmul(%p, %x)
      %y = aten::add.Tensor(%x, %m)
      output(%y)
    })"),
              HasSubstr("plumb::residual_split(%x, 0.01)"))
      << "what attention does to its logits is no choice";
}

TEST(ScaleAdds, LeaveAReluAloneBehindASumWithWhatAnotherLetThrough) {  // residual networks of images
  const std::string text = after_scaling(R"(graph {
      %x: f32[2, 3, 8, 8] = placeholder "x" %y: f32[2, 3, 4, 4] = placeholder "y"
      %r = aten::relu(%x) %p = aten::max_pool2d(%r, [2, 2]) %s = aten::sin(%p) %a = aten::add.Tensor(%s, %p)
      %t = aten::relu(%a) %b = aten::add.Tensor(%s, %y) %u = aten::relu(%b)
      output(%t, %u) })");
  for (const char* relu : {"%r = plumb::relu(", "%t = aten::relu(", "%u = plumb::relu("})
    EXPECT_THAT(text, HasSubstr(relu));
}

TEST(ScaleAdds, LeaveSumsAloneThatAreExponents) {  // scans and decays in the space of logarithms
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x" %y: f32[4, 8] = placeholder "y"
      %c = aten::cumsum(%x, 1) %d = aten::sub.Tensor(%y, %c) %l = aten::logcumsumexp(%d, 1)
      %a = aten::add.Tensor(%c, %l) %m = aten::maximum(%a, %y) %s = aten::sub.Tensor(%a, %m) %e = aten::exp(%s)
      %b = aten::add.Tensor(%x, %y) %n = aten::neg(%b) %f = aten::exp(%n) %g = aten::mul.Tensor(%b, %f)
      output(%e, %g, %a) })");
  EXPECT_THAT(text, testing::AllOf(HasSubstr("%a = aten::add.Tensor("), HasSubstr("%b = plumb::add(")));
}

}  // namespace
}  // namespace plumb
