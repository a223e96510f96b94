#include "plumb/transforms/scale/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "plumb/transforms/fold/fold.h"
#include "plumb/transforms/scale/unit_scale_testing.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using namespace testing_unit_scale;

std::shared_ptr<GraphModule> experts(const std::string& after = "output(%y)") {
  State state = with({{"w", {4, 32, 128}}});
  state.set("ends", there(at::arange(1, 5, at::kInt)) * 64, AttrKind::Buffer);
  return module_of(R"(graph {
    %x: f32[256, 32] grad = placeholder "x"
    %w = get_attr "w"
    %ends = get_attr "ends"
    %y: f32[256, 128] grad = aten::_grouped_mm(%x, %w, %ends)
    )" + after + "\n}",
                   std::move(state));
}

TEST(Experts, HaveUnitScaleInValuesAndGradients) {
  const auto module = unit_scale(experts());
  const at::Tensor x = randn_there({256, 32}).requires_grad_();
  const at::Tensor y = (*module)(x);
  y.backward(at::randn_like(y));
  EXPECT_NEAR(rms(y), 1, 0.05);
  EXPECT_NEAR(rms(x.grad()), 1, 0.05);
  EXPECT_NEAR(rms(module->state().get("w").tensor), 1, 0.05);
  EXPECT_NEAR(rms(module->state().get("w").tensor.grad()), 1, 0.05);
  EXPECT_EQ(module->mup.at("w").type, MupType::Weight);
}

TEST(Experts, KeepTheGradientOfTheirFunctionInsideOfAResidualBranch) {
  const std::string text =
      to_string(unit_scale(experts("%o: f32[256, 32] grad = aten::slice.Tensor(%y, 1, 0, 32)\n"
                                   "%r: f32[256, 32] grad = aten::add.Tensor(%x, %o)\n output(%r)"))
                    ->graph());
  EXPECT_THAT(text, HasSubstr("aten::_grouped_mm(%x_branch, "));
}

TEST(Experts, GoBackToAPlainModelOfTheSameFunction) {
  const auto scaled = unit_scale(experts());
  const auto folded = fold(scaled);
  const at::Tensor x = randn_there({256, 32});
  EXPECT_TRUE(at::allclose((*folded)(x), (*scaled)(x), 1e-5, 1e-6));
  EXPECT_THAT(to_string(folded->graph()), Not(HasSubstr("plumb::")));
}

TEST(Experts, AreLeftAloneWhereNoRowsAreDivided) {
  Report report;
  State state = with({{"w", {4, 32, 128}}});
  after_scaling(R"(graph {
    %x: f32[4, 16, 32] grad = placeholder "x"
    %w = get_attr "w"
    %y: f32[4, 16, 128] grad = aten::_grouped_mm(%x, %w)
    output(%y)
  })",
                std::move(state), {}, &report);
  EXPECT_EQ(report.find(ReportKind::LeftAlone, "y")->reason, "it does not multiply groups of rows by a matrix each");
}

}  // namespace
}  // namespace plumb
