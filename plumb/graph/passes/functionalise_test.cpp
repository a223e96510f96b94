#include "plumb/graph/passes/functionalise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/graph/pass.h"
#include "plumb/graph/passes/passes_testing.h"

namespace plumb {
namespace {

TEST(Functionalise, TurnsAnInPlaceSumIntoASum) {
  expect_rewrite("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %y: f32[4, 4] = placeholder "y"
  %h: f32[4, 4] = aten::mul.Tensor(%x, %y)
  %a: f32[4, 4] = aten::add_.Tensor(%h, %x, alpha=2)
  %r: f32[4, 4] = aten::relu_(%a)
  %z: f32[4, 4] = aten::mul.Tensor(%h, %r)
  output(%z, %h)
})",
                 R"(graph {
  %x = placeholder "x"
  %y = placeholder "y"
  %h = aten::mul.Tensor(%x, %y)
  %a = aten::add.Tensor(%h, %x, alpha=2)
  %r = aten::relu(%a)
  %z = aten::mul.Tensor(%r, %r)
  output(%z, %r)
})");
}

TEST(Functionalise, KnowsThePureOperatorByItsArguments) {
  // pow.Scalar has the number first.
  expect_rewrite("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f32[4, 4] = aten::abs(%x)
  %a: f32[4, 4] = aten::pow_.Scalar(%h, -0.5)
  %b: f32[4, 4] = aten::pow_.Tensor(%a, %x)
  output(%b)
})",
                 R"(graph {
  %x = placeholder "x"
  %h = aten::abs(%x)
  %a = aten::pow.Tensor_Scalar(%h, -0.5)
  %b = aten::pow.Tensor_Tensor(%a, %x)
  output(%b)
})");
}

TEST(Functionalise, TurnsDropoutThatDrawsNothing) {
  const std::string in_place = R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f32[4, 4] = aten::abs(%x)
  %d: f32[4, 4] = aten::dropout_(%h, 0.5, )";
  expect_rewrite("functionalise", in_place + "False) output(%d) }", R"(graph {
  %x = placeholder "x"
  %h = aten::abs(%x)
  %d = aten::dropout(%h, 0.5, False)
  output(%d)
})");
  Graph drawing = parse_graph(in_place + "True) output(%d) }");
  EXPECT_FALSE(functionalise(drawing)) << "on a GPU its pure form draws other values";
  EXPECT_TRUE(functionalise(drawing, nullptr, nullptr, true));
}

TEST(Functionalise, TurnsAWriteToWhatMayBeAViewOfAValueUsedNoMore) {
  const std::string until_write = R"(graph {
  %x: f32[4, 4, 1] = placeholder "x"
  %h: f32[4, 4, 1] = aten::abs(%x)
  %f: f32[4, 4] = aten::flatten.using_ints(%h, 1)
  %r: f32[4, 4] = aten::relu_(%f)
)";
  expect_rewrite("functionalise", until_write + "%y: f32[4, 4] = aten::mul.Tensor(%f, %r) output(%y) }", R"(graph {
  %x = placeholder "x"
  %h = aten::abs(%x)
  %f = aten::flatten.using_ints(%h, 1)
  %r = aten::relu(%f)
  %y = aten::mul.Tensor(%r, %r)
  output(%y)
})");
  Graph seen = parse_graph(until_write + "output(%r, %h) }");
  EXPECT_FALSE(functionalise(seen)) << "the caller sees what is written";
}

TEST(Functionalise, TurnsAWriteToChannelsLastMemoryWhosePureFormKeepsThem) {
  // A residual add of ConvNeXt, whose linear layers make channels last.
  const auto with_write = [](const std::string& call) {
    return R"(graph {
  %x: f32[2, 3, 4] = placeholder "x"
  %p: f32[2, 3, 4]{12, 1, 3} = aten::abs(%x)
  %m: b8[2, 3, 4] = aten::gt.Scalar(%x, 0)
  %r: f32[2, 3, 4]{12, 1, 3} = )" +
           call + " output(%r, %m) }";
  };
  expect_rewrite("functionalise", with_write("aten::add_.Tensor(%p, %x)"), R"(graph {
  %x = placeholder "x"
  %p = aten::abs(%x)
  %m = aten::gt.Scalar(%x, 0)
  %r = aten::add.Tensor(%p, %x)
  output(%r, %m)
})");
  for (const char* other : {"aten::masked_fill_.Scalar(%p, %m, 0)", "aten::tril_(%p)"})
    expect_unchanged("functionalise", with_write(other));
}

TEST(Functionalise, TurnsAWriteThroughAViewIntoAScatter) {
  // x[:, 0] += 1 as Python writes it.
  expect_rewrite("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f32[4, 4] = aten::sin(%x)
  %s: f32[4]{4} = aten::select.int(%h, 1, 0)
  %a: f32[4]{4} = aten::add_.Tensor(%s, 1)
  %y: f32[4, 4] = aten::mul.Tensor(%h, %x)
  output(%y)
})",
                 R"(graph {
  %x = placeholder "x"
  %h = aten::sin(%x)
  %select = aten::select.int(%h, 1, 0)
  %a = aten::add.Tensor(%select, 1)
  %select_scatter = aten::select_scatter(%h, %a, 1, 0)
  %y = aten::mul.Tensor(%select_scatter, %x)
  output(%y)
})");
}

TEST(Functionalise, MakesOlderViewsAgainWhereTheyAreUsedAfterAWrite) {
  expect_rewrite("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f32[4, 4] = aten::sin(%x)
  %t: f32[4, 4]{1, 4} = aten::t(%h)
  %before: f32[4, 4] = aten::add.Tensor(%t, %x)
  %m: f32[4, 4] = aten::mul_.Tensor(%h, 3)
  %after: f32[4, 4] = aten::matmul(%t, %before)
  output(%after)
})",
                 R"(graph {
  %x = placeholder "x"
  %h = aten::sin(%x)
  %t = aten::t(%h)
  %before = aten::add.Tensor(%t, %x)
  %m = aten::mul.Tensor(%h, 3)
  %t_1 = aten::t(%m)
  %after = aten::matmul(%t_1, %before)
  output(%after)
})");
}

TEST(Functionalise, TurnsSlicesOfSlicesFillsAndCopies) {
  expect_rewrite("functionalise", R"(graph {
  %x: f32[4, 6] = placeholder "x"
  %w: f32[4, 6] grad = get_attr "w"
  %h: f32[4, 6] = aten::mul.Tensor(%x, %w)
  %a: f32[2, 6] = aten::slice.Tensor(%h, 0, 1, 3)
  %b: f32[2, 3]{6, 1} = aten::slice.Tensor(%a, 1, 0, 6, 2)
  %c: f32[2, 3]{6, 1} = aten::mul_.Tensor(%b, 2)
  %d: f32[6] = aten::select.int(%h, 0, 0)
  %row: f32[6] = aten::select.int(%x, 0, 3)
  %e: f32[6] = aten::copy_(%d, %row)
  %f: f32[2] = aten::narrow(%row, 0, 0, 2)
  %g: f32[6] = aten::select.int(%h, 0, 3)
  %i: f32[6] = aten::fill_.Scalar(%g, 0.5)
  %y: f32[4, 6] = aten::sin(%h)
  output(%y, %f)
})",
                 R"(graph {
  %x = placeholder "x"
  %w = get_attr "w"
  %h = aten::mul.Tensor(%x, %w)
  %slice = aten::slice.Tensor(%h, 0, 1, 3)
  %slice_1 = aten::slice.Tensor(%slice, 1, 0, 6, 2)
  %c = aten::mul.Tensor(%slice_1, 2)
  %slice_scatter = aten::slice_scatter(%slice, %c, 1, 0, 6, 2)
  %slice_scatter_1 = aten::slice_scatter(%h, %slice_scatter, 0, 1, 3)
  %row = aten::select.int(%x, 0, 3)
  %select_scatter = aten::select_scatter(%slice_scatter_1, %row, 0, 0)
  %f = aten::narrow(%row, 0, 0, 2)
  %select_1 = aten::select.int(%select_scatter, 0, 3)
  %i = aten::fill.Scalar(%select_1, 0.5)
  %select_scatter_1 = aten::select_scatter(%select_scatter, %i, 0, 3)
  %y = aten::sin(%select_scatter_1)
  output(%y, %f)
})");
}

TEST(Functionalise, LeavesInputsParametersAndBuffersAlone) {
  expect_unchanged("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %b: f32[4, 4] = get_attr "b"
  %v: f32[16] = aten::view(%x, [16])
  %m: f32[16] = aten::mul_.Tensor(%v, 2)
  %n: f32[4, 4] = aten::add_.Tensor(%b, 1)
  output(%x, %n)
}
)");
}

TEST(Functionalise, LeavesWritesWithAnotherDtypeUnknownTypesOrHiddenAliasesAlone) {
  expect_unchanged("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f16[4, 4] = aten::to.dtype(%x, torch.float16)
  %m: f16[4, 4] = aten::add_.Tensor(%h, %x)
  output(%m)
}
)");
  expect_unchanged("functionalise", R"(graph {
  %x = placeholder "x"
  %h = aten::sin(%x)
  %m = aten::add_.Tensor(%h, %x)
  output(%m)
}
)");
  expect_unchanged("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f32[4, 4] = aten::sin(%x)
  %r: f32[16] = aten::reshape(%h, [16])
  %m: f32[16] = aten::add_.Tensor(%r, 1)
  output(%h)
}
)");
}

TEST(Functionalise, LeavesANarrowAloneThatIsOutsideOfItsTensor) {
  for (const char* where : {"7, -1, 1", "0, -9, 1", "0, 9223372036854775807, 9223372036854775807"}) {
    expect_unchanged("functionalise", R"(graph {
  %x: f32[2, 3] = placeholder "x"
  %a: f32[2, 3] = aten::sin(%x)
  %n: f32[1, 3] = aten::narrow(%a, )" + std::string(where) +
                                          R"()
  %f: f32[1, 3] = aten::fill_.Scalar(%n, 1)
  output(%a)
}
)");
  }
}

TEST(Functionalise, LeavesAWriteWithoutGradientsToWhatHasSomeAlone) {
  expect_unchanged("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f32[4, 4] = aten::sin(%x)
  %m: f32[4, 4] = aten::mul_.Tensor(%h, 2) no_grad
  output(%m)
}
)");
  const std::string turned = graph_after("functionalise", R"(graph {
  %b: f32[4, 4] = get_attr "b"
  %h: f32[4, 4] = aten::sin(%b)
  %m: f32[4, 4] = aten::mul_.Tensor(%h, 2) no_grad
  output(%m)
})");
  EXPECT_THAT(turned, testing::HasSubstr("aten::mul.Tensor(%h, 2) no_grad"));
}

TEST(Functionalise, KnowsThatAViewMadeWithoutGradModeStillHasGradients) {
  expect_unchanged("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %s: f32[2, 4] = aten::slice.Tensor(%x, 0, 0, 2) no_grad
  %h: f32[2, 4] = aten::mul.Tensor(%s, 2)
  %m: f32[2, 4] = aten::add_.Tensor(%h, 1) no_grad
  output(%m)
}
)");
}

TEST(Functionalise, LeavesOperatorsWhoseBackwardDiffersAlone) {
  expect_unchanged("functionalise", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %h: f32[4, 4] = aten::mul.Tensor(%x, 2)
  %m: f32[4, 4] = aten::elu_(%h)
  output(%m)
}
)");
}

TEST(Functionalise, SaysWhyAWriteStays) {
  GraphModule m = module_of(parse_graph(R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %m: f32[4, 4] = aten::mul_.Tensor(%x, 2)
  output(%m)
})"));
  std::vector<std::string> report;
  EXPECT_FALSE(functionalise(m, &report));
  EXPECT_THAT(report,
              testing::ElementsAre(testing::HasSubstr("%m (aten::mul_.Tensor) stays as it is: it writes an input")));
}

TEST(Functionalise, LeavesSlicesOfComplexValuesAlone) {
  GraphModule m = module_of(parse_graph(R"(graph {
  %w: c64[4] grad = get_attr "w"
  %z: c64[4] = aten::mul.Tensor(%w, 1)
  %s: c64[2] = aten::slice.Tensor(%z, 0, 0, 2)
  %n: c64[2] = aten::neg(%s)
  %c: c64[2] = aten::copy_(%s, %n)
  output(%z)
})"));
  std::vector<std::string> report;
  EXPECT_FALSE(functionalise(m, &report));
  EXPECT_THAT(report, testing::ElementsAre(testing::HasSubstr("no gradient of slice_scatter")));
}

TEST(Functionalise, CopyOverAHistoryStillGivesItZeros) {
  const std::string text = R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %w: f32[4, 4] grad = get_attr "w"
  %h: f32[4, 4] = aten::sin(%w)
  %c: f32[4, 4] = aten::copy_(%h, %x)
  output(%c)
})";
  GraphModule m = module_of(parse_graph(text));
  const Seen was = observe(m, sample_inputs(m.graph()));
  EXPECT_TRUE(run_checked("functionalise", m));
  EXPECT_EQ(difference(was, observe(m, sample_inputs(m.graph()))), "");
  EXPECT_THAT(to_string(m.graph()), testing::HasSubstr("aten::slice_scatter(%h, %x)"));
}

}  // namespace
}  // namespace plumb
