#include "plumb/analysis/verdict_page.h"

namespace plumb {

HtmlReport verdict_page(const VerdictReport& report, const std::string& model) {
  HtmlReport page("Number formats" + (model.empty() ? "" : " of " + model),
                  std::to_string(report.batches) + " batches, " + std::to_string(report.gradients) + " gradients");
  page.section("Verdict").prose(report.conclusion()).add(report.table());
  page.prose(c10::str(
      "`backward` is the error of the whole gradient where gradients alone are rounded, `forward` where values "
      "and weights are, as shares of the full-precision gradient; `by weight` is the backward's as a share "
      "of each weight's own gradient; `drift` is the part of the backward's that moves all rows of a weight alike, "
      "where no step moves them back. The score is backward (or half of by weight, if that is more) + drift + "
      "0.3 x forward; up to ",
      GradientError::kMostOk, " is ok, above ", GradientError::kMostDoubtful, " no."));
  for (const RecipeVerdict& recipe : report.recipes) {
    if (recipe.problem.empty() && recipe.left.empty() && recipe.error.verdict() == VerdictClass::Ok) continue;
    page.section(recipe.name).prose(recipe.sentence());
    if (!recipe.products.empty()) page.add(VerdictReport::products_table(recipe, recipe.products.size()));
    if (recipe.changed()) page.code(recipe.remedy.to_toml());
  }
  if (const std::string file = report.recipe_file(); !file.empty()) {
    page.section("The recipe")
        .prose("For `plumb train --formats`, `simulate_format(recipe=...)` and `use_fp8(recipe=...)`.");
    page.code(file);
  }
  return page;
}

}  // namespace plumb
