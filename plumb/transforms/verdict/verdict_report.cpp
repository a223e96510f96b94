// What a verdict says: classes, sentences, tables, JSON.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "plumb/core/join.h"
#include "plumb/numerics/format.h"
#include "plumb/transforms/verdict/verdict.h"

namespace plumb {
namespace {

int bits_of(const FormatRecipe& recipe) {
  const auto of = [](const std::string& text) { return text == "none" ? 32 : FPFormat::parse(text).bits(); };
  return of(recipe.fwd) + of(recipe.bwd);
}

std::string score_text(double value) { return std::isfinite(value) ? short_number(value, 2) : "not finite"; }

std::string direction(bool backward) { return backward ? "backward" : "forward"; }

}  // namespace

std::string_view to_string(VerdictClass verdict) {
  constexpr std::string_view kNames[] = {"ok", "doubtful", "no"};
  return kNames[static_cast<size_t>(verdict)];
}

VerdictClass GradientError::verdict() const {
  return score() <= kMostOk ? VerdictClass::Ok : score() <= kMostDoubtful ? VerdictClass::Doubtful : VerdictClass::No;
}

void GradientError::take(const GradientError& other, bool of_backward) {
  if (of_backward) {
    backward = other.backward;
    drift = other.drift;
    by_weight = other.by_weight;
  } else {
    forward = other.forward;
  }
}

std::string RecipeVerdict::sentence() const {
  if (!problem.empty()) return name + " was not measured: " + problem;
  return about_error() + (left.empty() ? "" : " It leaves in full precision: " + join(left, {}, "; ") + ".");
}

std::string RecipeVerdict::about_error() const {
  const auto is = to_string(error.verdict());
  std::string more;
  if (error.drift >= 0.01) more = " (" + score_text(error.drift) + " more of drift)";
  if (0.5 * error.by_weight > error.backward)
    more += " (" + score_text(error.by_weight) + " of the weights' own gradients)";
  const std::string as_it_is = c10::str(name, ": ", is, ", the error of the gradient is ", score_text(error.backward),
                                        " backward", more, " and ", score_text(error.forward), " forward");
  if (error.verdict() == VerdictClass::Ok) return as_it_is + ".";
  std::vector<std::string> what;
  if (remedy.unit_scaled != recipe.unit_scaled) what.emplace_back("unit_scale() before");
  if (remedy.loss_scale != recipe.loss_scale)
    what.push_back(c10::str("a loss scale of 2^", std::lround(std::log2(remedy.loss_scale))));
  for (const ProductFormats& p : remedy.products) {
    const auto was = std::ranges::find(recipe.products, p.name, &ProductFormats::name);
    for (const bool backward : {true, false}) {
      const auto& format = backward ? p.bwd : p.fwd;
      if (!format || (was != recipe.products.end() && format == (backward ? was->bwd : was->fwd))) continue;
      what.push_back(c10::str("the ", direction(backward), " of ", p.name, " in ",
                              *format == "none" ? "full precision" : *format));
    }
  }
  if (what.empty()) {
    return last.verdict() == VerdictClass::Ok
               ? as_it_is + ". In the last batch it is ok as it is: the score is " + score_text(last.score()) + "."
               : as_it_is + ". Neither a scale nor single products mend it.";
  }
  const bool range = lacks_range() && remedy.products == recipe.products;
  return c10::str(as_it_is, range ? ". What it lacks is range: with " : ". With ", join(what),
                  " the score of the last batch is ", score_text(remedied.score()), " instead of ",
                  score_text(last.score()), ", ", to_string(remedied.verdict()), ".");
}

const RecipeVerdict* VerdictReport::best() const {
  const RecipeVerdict* best = nullptr;
  const auto rank = [](const RecipeVerdict& v) {
    const bool ok = v.remedied.verdict() == VerdictClass::Ok;
    return std::tuple(!ok, ok ? bits_of(v.remedy) : 0, ok ? v.remedy.products.size() : 0, ok && v.changed(),
                      v.remedied.score());
  };
  for (const RecipeVerdict& v : recipes) {
    if (v.problem.empty() && (best == nullptr || rank(v) < rank(*best))) best = &v;
  }
  return best;
}

std::string VerdictReport::conclusion() const {
  const RecipeVerdict* found = best();
  if (found == nullptr) return "No recipe could be measured.";
  const bool ok = found->remedied.verdict() == VerdictClass::Ok;
  return (ok ? "The fewest bits that will do: " : "No recipe is ok. The nearest: ") + found->sentence();
}

std::string VerdictReport::recipe_file() const {
  const RecipeVerdict* chosen = best();
  if (chosen == nullptr) return "";
  return c10::str("# ", chosen->name, ": error of the gradient ", score_text(chosen->remedied.backward), " backward, ",
                  score_text(chosen->remedied.forward), " forward: ", to_string(chosen->remedied.verdict()), "\n",
                  chosen->remedy.to_toml());
}

Table VerdictReport::table() const {
  Table table{
      {"recipe", "backward", "by weight", "drift", "forward", "score", "verdict", "with its remedy", "verdict then"},
      {}};
  for (const RecipeVerdict& v : recipes) {
    if (!v.problem.empty()) {
      table.rows.push_back({v.name, "", "", "", "", "", "not measured"});
      continue;
    }
    std::vector<std::string> row{v.name,
                                 score_text(v.error.backward),
                                 score_text(v.error.by_weight),
                                 score_text(v.error.drift),
                                 score_text(v.error.forward),
                                 score_text(v.error.score()),
                                 std::string(to_string(v.error.verdict()))};
    if (v.changed()) row.push_back(score_text(v.remedied.score())), row.emplace_back(to_string(v.remedied.verdict()));
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table VerdictReport::products_table(const RecipeVerdict& recipe, size_t most) {
  Table table{{"product", "direction", "keeping it gains"}, {}};
  for (const ProductVerdict& p : recipe.products) {
    if (table.rows.size() == most) break;
    table.rows.push_back({p.product, direction(p.backward), score_text(p.gain)});
  }
  return table;
}

std::string VerdictReport::to_text() const {
  std::string text = conclusion() + "\n\n" + plumb::to_text(table());
  for (const RecipeVerdict& v : recipes) {
    if (v.error.verdict() == VerdictClass::Ok && v.problem.empty() && v.left.empty()) continue;
    text += "\n" + v.sentence() + "\n";
    if (!v.products.empty()) text += plumb::to_text(products_table(v, 5));
  }
  return text;
}

nlohmann::json VerdictReport::to_json() const {
  auto of_recipes = nlohmann::json::array();
  const auto errors = [](const GradientError& e) {
    return nlohmann::json{{"backward", e.backward}, {"by_weight", e.by_weight},
                          {"drift", e.drift},       {"forward", e.forward},
                          {"score", e.score()},     {"verdict", std::string(to_string(e.verdict()))}};
  };
  for (const RecipeVerdict& v : recipes) {
    nlohmann::json one{{"recipe", v.name}, {"sentence", v.sentence()}};
    if (!v.problem.empty()) {
      one["problem"] = v.problem;
    } else {
      one.update(errors(v.error));
      one["last"] = errors(v.last);
      one["remedied"] = errors(v.remedied);
      one["file"] = v.remedy.to_toml();
      one["left"] = v.left;
      one["products"] = nlohmann::json::array();
      for (const ProductVerdict& p : v.products) {
        one["products"].push_back({{"product", p.product}, {"direction", direction(p.backward)}, {"gain", p.gain}});
      }
    }
    of_recipes.push_back(std::move(one));
  }
  return {{"conclusion", conclusion()}, {"recipes", of_recipes},  {"file", recipe_file()},
          {"batches", batches},         {"gradients", gradients}, {"full_gradients", full_gradients}};
}

}  // namespace plumb
