#include "plumb/transforms/scale/choices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/transforms/scale/unit_scale_testing.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using namespace testing_unit_scale;

// Points x, their squared distances to points y, and the nearest of y for each.
const std::string kNearest = R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %y: f32[8, 8] = placeholder "y"
      %m: f32[4, 8] = aten::matmul(%x, %y)
      %s: f32[4, 8] = aten::softmax.int(%x, 1)
      %d: f32[4, 8] = aten::add.Tensor(%m, %s)
      %i: i64[4] = aten::argmin(%d, 1)
      %n: f32[4, 8] = aten::index_select(%y, 0, %i)
      %g: f32[4, 8] = aten::gelu(%n)
      )";

TEST(Choices, LeaveDistancesAloneOfWhichOnlyTheNearestIsTaken) {
  Report report("unit_scale");
  const std::string text = after_scaling(kNearest + "output(%g, %i) }", {}, {}, &report);
  for (const char* kept : {"aten::matmul(", "aten::softmax.int(", "aten::add.Tensor(", "plumb::gelu("})
    EXPECT_THAT(text, HasSubstr(kept));
  for (const char* node : {"m", "s", "d"})
    EXPECT_EQ(report.find(ReportKind::LeftAlone, node)->reason, kOnlyChooses) << node;
}

TEST(Choices, ScaleWhatIsReturnedOrWrittenToo) {
  for (const char* also : {"output(%g, %d) }", "%w: f32[4, 8] = aten::copy_(%x, %d) output(%g) }"}) {
    const std::string text = after_scaling(kNearest + also);
    for (const char* made : {"plumb::matmul(", "plumb::softmax(", "plumb::add("}) EXPECT_THAT(text, HasSubstr(made));
  }
}

TEST(Choices, ScaleAModelThatReturnsNothingElseAsInTraining) {
  const std::string text = after_scaling(kNearest + "output(%i) }");
  for (const char* made : {"plumb::matmul(", "plumb::softmax(", "plumb::add("}) EXPECT_THAT(text, HasSubstr(made));
}

TEST(Choices, LeaveSumsAloneThatALogarithmIsAddedTo) {  // the score of a path, beside all paths' (CRF)
  Report report("unit_scale");
  after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %y: f32[4] = placeholder "y"
      %m: f32[4] = placeholder "m"
      %z: f32[4] = aten::logsumexp(%x, [1])
      %a: f32[4] = aten::add.Tensor(%y, %y)
      %b: f32[4] = aten::mul.Tensor(%a, 2.0)
      %s: f32[4] = aten::add.Tensor(%b, %y)
      %l: f32[4] = aten::sub.Tensor(%z, %s)
      %e: f32[4] = aten::relu(%l)
      %o: f32[4] = aten::relu(%y)
      %p: f32[4] = aten::add.Tensor(%o, %m)
      %q: f32[4] = aten::add.Tensor(%p, %e)
      output(%q)
    })",
                {}, {}, &report);
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "s")->reason, kIsExponent);
  EXPECT_TRUE(report.find(ReportKind::Replaced, "p"));
}

TEST(Choices, ScaleWhatIsInFrontOfAWeight) {
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %w = get_attr "w"
      %r: f32[4, 8] = aten::relu(%x)
      %l: f32[4, 8] = aten::linear(%r, %w)
      %i: i64[4] = aten::argmax(%l, 1)
      %t: f32[4, 8] = aten::tanh(%x)
      output(%t, %i)
    })",
                                         with({{"w", {8, 8}}}));
  for (const char* made : {"plumb::relu(", "plumb::linear(", "plumb::tanh("}) EXPECT_THAT(text, HasSubstr(made));
}

TEST(UnitScale, LeavesLevelsAndCountsAloneThatAreRounded) {  // finite scalar quantization; contextual positions
  const std::string text = after_scaling(R"(graph {
      %x: f32[4, 8] = placeholder "x" %g: f32[4, 8] = placeholder "g"
      %levels = get_attr "levels"
      %t = aten::tanh(%x) %m = aten::mul.Tensor(%t, %levels) %o = aten::sub.Tensor(%m, %levels) %r = aten::round(%o)
      %s = aten::sigmoid(%x) %f = aten::flip(%s, [1]) %c = aten::cumsum(%f, 1) %e = aten::ceil(%c)
      %u = aten::tanh(%x) %v = aten::mul.Tensor(%u, %g) %w = aten::round(%v)
      output(%r, %e, %w)
    })",
                                         [] {
                                           State state;
                                           state.add({"levels", AttrKind::Buffer, ones_there({8}) * 2});
                                           return state;
                                         }());
  for (const char* kept : {"%t = aten::tanh(%x)", "%s = aten::sigmoid(%x)", "%u = plumb::tanh(%x"})
    EXPECT_THAT(text, HasSubstr(kept));
}

}  // namespace
}  // namespace plumb
