#include "plumb/graph/passes/common_subexpressions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/graph/passes/passes_testing.h"

namespace plumb {
namespace {

TEST(CommonSubexpressions, ComputesTheAnglesOfEveryLayerOnce) {
  expect_rewrite("common_subexpressions", R"(graph {
  %x: f32[4, 4] = placeholder "x"
  %f: f32[4] = get_attr "freq"
  %a: f32[4] = aten::mul.Tensor(%f, 2)
  %c: f32[4] = aten::cos(%a)
  %g: f32[4] = get_attr "freq"
  %b: f32[4] = aten::mul.Tensor(%g, 2)
  %d: f32[4] = aten::cos(%b)
  %y: f32[4, 4] = aten::mul.Tensor(%x, %c)
  %z: f32[4, 4] = aten::mul.Tensor(%y, %d)
  output(%z)
})",
                 R"(graph {
  %x = placeholder "x"
  %f = get_attr "freq"
  %a = aten::mul.Tensor(%f, 2)
  %c = aten::cos(%a)
  %y = aten::mul.Tensor(%x, %c)
  %z = aten::mul.Tensor(%y, %c)
  output(%z)
})");
}

TEST(CommonSubexpressions, LeavesEqualNodesAloneWhenTheirInputWasWrittenInBetween) {
  expect_unchanged("common_subexpressions", R"(graph {
  %f: f32[4] = get_attr "freq"
  %a: f32[4] = aten::cos(%f)
  %v: f32[2] = aten::slice.Tensor(%f, 0, 0, 2)
  %w: f32[2] = aten::add_.Tensor(%v, 1)
  %b: f32[4] = aten::cos(%f)
  %y: f32[4] = aten::mul.Tensor(%a, %b)
  output(%y)
}
)");
}

TEST(CommonSubexpressions, LeavesResultsAloneThatAreWrittenLater) {
  expect_unchanged("common_subexpressions", R"(graph {
  %a: f32[4] = aten::zeros([4])
  %b: f32[4] = aten::zeros([4])
  %w: f32[4] = aten::add_.Tensor(%b, 1)
  %y: f32[4] = aten::sub.Tensor(%a, %b)
  output(%y)
}
)");
}

TEST(CommonSubexpressions, LeavesRandomDrawsUninitializedMemoryAndOtherGradModesAlone) {
  expect_unchanged("common_subexpressions", R"(graph {
  %f: f32[4] = get_attr "freq"
  %a: f32[4] = aten::bernoulli(%f)
  %b: f32[4] = aten::bernoulli(%f)
  %c: f32[4] = aten::empty.memory_format([4])
  %d: f32[4] = aten::empty.memory_format([4])
  %e: f32[4] = aten::cos(%f)
  %g: f32[4] = aten::cos(%f) no_grad
  output(%a, %b, %c, %d, %e, %g)
}
)");
}

TEST(CommonSubexpressions, LeavesTwoReturnedValuesApart) {
  expect_unchanged("common_subexpressions", R"(graph {
  %f: f32[4] = get_attr "freq"
  %a: f32[4] = aten::cos(%f)
  %b: f32[4] = aten::cos(%f)
  output(%a, %b)
}
)");
}

TEST(CommonSubexpressions, LeavesValuesWithGradientsAloneUnlessAsked) {
  const std::string text = R"(graph {
  %w: f32[4, 4] grad = get_attr "w"
  %a: f32[4, 4] = aten::cos(%w)
  %b: f32[4, 4] = aten::cos(%w)
  %y: f32[4, 4] = aten::mul.Tensor(%a, %b)
  output(%y)
}
)";
  expect_unchanged("common_subexpressions", text);
  EXPECT_THAT(graph_after("common_subexpressions", text, {{"differentiable", "true"}}),
              testing::HasSubstr("aten::mul.Tensor(%a, %a)"));
}

TEST(CommonSubexpressions, TellsIntegersFromFloatsAndDtypesApart) {
  expect_unchanged("common_subexpressions", R"(graph {
  %n: i64[4] = get_attr "n"
  %a: i64[4] = aten::mul.Tensor(%n, 2)
  %b: f32[4] = aten::mul.Tensor(%n, 2.0)
  %c: f32[4] = aten::to.dtype(%n, torch.float32)
  %d: f64[4] = aten::to.dtype(%n, torch.float64)
  %y: f64[4, 4] = aten::stack([%a, %b, %c, %d])
  output(%y)
}
)");
}

}  // namespace
}  // namespace plumb
