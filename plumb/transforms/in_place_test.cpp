#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/transforms/test_models.h"
#include "plumb/transforms/unit_scale.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using namespace testing_models;

TEST(UnitScale, TakesAnInPlaceAddForAnAdd) {
  auto module = module_of(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %h: f32[4, 8] = aten::silu(%x)
      %f: f32[4, 8] = aten::gelu(%h)
      %y: f32[4, 8] = aten::add_.Tensor(%h, %f)
      %z: f32[4, 8] = aten::silu(%y)
      output(%z)
    })");
  auto scaled = unit_scale(module);
  EXPECT_EQ(scaled->reports.back().count(ReportKind::Residual), 1u) << to_string(scaled->graph());
  EXPECT_THAT(to_string(scaled->graph()), HasSubstr("plumb::residual_add(%f, %h_skip, 0.5)"));
}

TEST(UnitScale, LeavesAnInPlaceAddThatOthersSeeAlone) {
  auto scaled = unit_scale(module_of(R"(graph {
      %x: f32[4, 8] = placeholder "x"
      %f: f32[4, 8] = aten::gelu(%x)
      %y: f32[4, 8] = aten::add_.Tensor(%x, %f)
      output(%y)
    })"));
  EXPECT_THAT(to_string(scaled->graph()), HasSubstr("aten::add_.Tensor(%x, %f)"));
  EXPECT_THAT(scaled->reports.back().find(ReportKind::LeftAlone, "y")->reason, HasSubstr("writes in place"));
}

TEST(UnitScale, ReadsALinearSpelledOutAsOne) {
  State state;
  parameter(state, "w", at::randn({6, 8}));
  parameter(state, "b", at::randn({6}));
  auto scaled = unit_scale(module_of(R"(graph {
      %x: f32[2, 4, 8] = placeholder "x"
      %w: f32[6, 8] = get_attr "w"
      %b: f32[6] = get_attr "b"
      %t: f32[8, 6] = aten::t(%w)
      %m: f32[2, 4, 6] = aten::matmul(%x, %t)
      %y: f32[2, 4, 6] = aten::add_.Tensor(%m, %b)
      output(%y)
    })",
                                     std::move(state)));
  EXPECT_THAT(to_string(scaled->graph()), HasSubstr("plumb::linear(%x, %w, %b, constraint=None)"));
  EXPECT_NEAR(scaled->state().get("w").tensor.std().item<double>(), 1.0, 1e-5);
}

}  // namespace
}  // namespace plumb
