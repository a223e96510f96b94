#include "plumb/analysis/verdict_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace plumb {
namespace {

using testing::HasSubstr;

TEST(VerdictPage, ConcludesAndShowsRecipesProductsAndTheFile) {
  VerdictReport report;
  report.batches = 4;
  RecipeVerdict four{.name = "mxfp4", .recipe = read_recipe("mxfp4"), .error = {1.5, 0.2}};
  four.remedy = four.recipe;
  four.remedy.products.push_back({"head", {}, "mxfp8e5m2-RN"});
  four.last = {1.4, 0.2};
  four.remedied = {0.08, 0.2};
  four.products = {{"head", true, 1.42}, {"conv1", true, 0.01}};
  report.recipes = {four, {.name = "rowwise", .recipe = read_recipe("rowwise"), .problem = "<it> cannot"}};
  const std::string page = verdict_page(report, "net.pt2").html();
  EXPECT_THAT(page, HasSubstr("Number formats of net.pt2"));
  EXPECT_THAT(page, HasSubstr("The fewest bits that will do: mxfp4: no"));
  EXPECT_THAT(
      page,
      HasSubstr("With the backward of head in mxfp8e5m2-RN the score of the last batch is 0.14 instead of 1.5, ok."));
  EXPECT_THAT(page, HasSubstr("conv1"));
  EXPECT_THAT(page, HasSubstr("[[product]]\nname = "));
  EXPECT_THAT(page, HasSubstr("rowwise was not measured: &lt;it&gt; cannot"));
}

}  // namespace
}  // namespace plumb
