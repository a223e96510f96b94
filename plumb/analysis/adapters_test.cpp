#include "plumb/analysis/adapters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "plumb/analysis/html_report.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

class TrackedGpt : public ::testing::Test {
 protected:
  static ScalesGraph measured(const std::shared_ptr<GraphModule>& module) {
    auto tracked = track_scales(module, {.histogram = true});
    at::manual_seed(2);
    tracked->run(testing_models::gpt_inputs(small()))[0].toTensor().backward();
    return scales_graph(*tracked);
  }
  static testing_models::GptConfig small() { return {.layers = 2, .width = 32, .heads = 2, .length = 16, .batch = 2}; }

  std::shared_ptr<GraphModule> plain_ = testing_models::gpt(small());
  const FPFormat e4m3_ = FPFormat::parse("e4m3fn"), e5m2_ = FPFormat::parse("e5m2");
};

TEST_F(TrackedGpt, IsARowForEveryMeasuredTensorWithParametersUnderTheirModules) {
  const ScalesGraph graph = measured(plain_);
  const ScaleChart chart = scale_chart(HistoryView{"", {{"plain", history_of(graph)}}, {e4m3_, e5m2_}});
  size_t with_metrics = 0;
  for (const auto& node : graph.nodes) with_metrics += node.metrics.has_value();
  EXPECT_GT(with_metrics, 20u);
  EXPECT_EQ(chart.variants[0].rows.size(), with_metrics);
  auto find = [&](const std::string& module, const std::string& name) -> const ScaleRow* {
    for (const ScaleRow& row : chart.variants[0].rows) {
      if (row.module_path == module && row.name == name) return &row;
    }
    return nullptr;
  };
  const ScaleRow* weight = find("blocks.0.qkv", "weight");
  ASSERT_TRUE(weight && weight->fwd && weight->bwd);
  EXPECT_EQ(weight->op, "parameter");
  EXPECT_EQ(weight->fwd->numel, 3 * 32 * 32);
  EXPECT_NEAR(weight->fwd->std, plain_->state().get("blocks.0.qkv.weight").tensor.std().item<double>(), 1e-6);
  EXPECT_FALSE(weight->fwd->exponents.empty());
  EXPECT_GE(weight->bwd->underflow.value(), 0);
  const ScaleRow* linear = find("blocks.0.qkv", "qkv0");
  ASSERT_TRUE(linear);
  EXPECT_EQ(linear->op, "aten::linear");
}

TEST_F(TrackedGpt, CallsAFrozenParameterAParameter) {
  plain_->state().get("blocks.0.qkv.weight").tensor.set_requires_grad(false);
  const auto tensors = history_of(measured(plain_)).tensors;
  const auto weight = std::ranges::find(tensors, "blocks.0.qkv.weight", &HistoryTensor::name);
  ASSERT_NE(weight, tensors.end());
  EXPECT_EQ(weight->operation, "parameter");
}

TEST_F(TrackedGpt, ShowsUnitScalingBesideThePlainModel) {
  const auto scaled = unit_scale(plain_);
  const HistoryView view{"Scales of a small GPT",
                         {{"plain", history_of(measured(plain_))}, {"unit-scaled", history_of(measured(scaled))}},
                         {e4m3_, e5m2_}};
  const std::string picture = to_svg(scale_chart(view));
  EXPECT_THAT(picture, HasSubstr("e5m2 normal"));
  // A tensor that both have is one row: fewer rows than tensors of both.
  size_t rows = 0;
  for (size_t at = 0; (at = picture.find("class=\"row\"", at)) != std::string::npos; ++at) ++rows;
  const size_t plain = view.runs[0].history.tensors.size(), after = view.runs[1].history.tensors.size();
  EXPECT_GE(rows, std::max(plain, after));
  EXPECT_LT(rows, plain + after / 4 + 8);

  HtmlReport report("A small GPT");
  report.section("Scales").prose(conclusion(view)).add(view);
  const Report& done = scaled->reports.back();
  report.section("What was changed").prose(conclusion(done)).add(table_of(done));
  EXPECT_THAT(report.html(), HasSubstr("<td>residual</td>"));
  EXPECT_THAT(report.html(), HasSubstr("<strong>4 residual adds</strong> (2 with tau "));
  if (const char* keep = std::getenv("PLUMB_KEEP_REPORT")) report.write(std::string(keep) + ".gpt.html");
}

TEST(TableOfReport, LeavesOutWhatNoEntrySays) {
  Report report("prune");
  report.add({.kind = ReportKind::LeftAlone, .node = "x", .reason = "it is an output"});
  report.add({.kind = ReportKind::Residual, .node = "y", .tau = 0.25});
  const Table table = table_of(report);
  EXPECT_EQ(table.header, (std::vector<std::string>{"what", "node", "tau", "why"}));
  EXPECT_EQ(table.rows[1], (std::vector<std::string>{"residual", "y", "0.25", ""}));
  EXPECT_EQ(table.caption, "prune");
}

}  // namespace
}  // namespace plumb
