#include "plumb/transforms/verdict/verdict.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/numerics/format.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/transforms/module.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int kScaleStep = 4, kMostScale = 40;  // exponents of the loss scales that are tried
constexpr size_t kMostKept = 4;                 // product-directions in a wider format
constexpr double kSmallShare = 0.05;            // of the score: a direction with less has no culprits

// The recipe in one direction alone.
FormatRecipe one_way(FormatRecipe recipe, bool backward) {
  (backward ? recipe.fwd : recipe.bwd) = "none";
  for (ProductFormats& p : recipe.products) (backward ? p.fwd : p.bwd).reset();
  if (!backward) recipe.loss_scale = 1;
  return recipe;
}

bool rounds(const FormatRecipe& recipe, bool backward) {
  const auto of = [&](const auto& formats) { return backward ? formats.bwd : formats.fwd; };
  return of(recipe) != "none" || std::ranges::any_of(recipe.products, [&](const ProductFormats& p) {
           return of(p).value_or("none") != "none";
         });
}

// In front, where it counts before the patterns of a file.
FormatRecipe with_product(FormatRecipe recipe, const std::string& name, bool backward, const std::string& format) {
  auto found = std::ranges::find(recipe.products, name, &ProductFormats::name);
  if (found == recipe.products.end()) found = recipe.products.insert(recipe.products.begin(), ProductFormats{name});
  (backward ? found->bwd : found->fwd) = format;
  return recipe;
}

// The format that a kept product has instead: 8 bits in blocks for 4 bits and 6, else bfloat16.
std::string wider(const FormatRecipe& recipe, bool backward) {
  const std::string& text = backward ? recipe.bwd : recipe.fwd;
  if (!recipe.scales.empty() || text == "none") return "none";
  const FPFormat format = FPFormat::parse(text);
  if (format.bits() >= 16) return "none";
  if (format.bits() > 6) return "bf16-RN";
  const FPFormat eight = FPFormat::parse(backward ? "mxfp8e5m2" : "mxfp8e4m3");
  return eight.with_rounding(format.rounding).to_string();
}

bool has_own_scales(const FormatRecipe& recipe, bool backward) {
  const std::string& text = backward ? recipe.bwd : recipe.fwd;
  return !recipe.scales.empty() || text == "none" || FPFormat::parse(text).has_blocks();
}

int bits_of(const FormatRecipe& recipe) {
  const auto of = [](const std::string& text) { return text == "none" ? 32 : FPFormat::parse(text).bits(); };
  return of(recipe.fwd) + of(recipe.bwd);
}

double norm_of(const std::vector<at::Tensor>& gradient) {
  double squares = 0;
  for (const at::Tensor& g : gradient) {
    if (!g.defined()) continue;
    const double norm = at::linalg_vector_norm(g, 2, {}, false, at::kDouble).item<double>();
    squares += norm * norm;
  }
  return std::sqrt(squares);
}

// Each once, in the state's order.
std::vector<at::Tensor> trained(const GraphModule& module) {
  std::vector<at::Tensor> all;
  std::set<const c10::TensorImpl*> seen;
  for (const Attr& attr : module.state()) {
    if (attr.kind == AttrKind::Parameter && attr.tensor.requires_grad() &&
        seen.insert(attr.tensor.unsafeGetTensorImpl()).second)
      all.push_back(attr.tensor);
  }
  return all;
}

std::string score_text(double value) { return std::isfinite(value) ? short_number(value, 2) : "not finite"; }

std::string direction(bool backward) { return backward ? "backward" : "forward"; }

}  // namespace

// A batch at the weights as they are: the full-precision gradients, and what is compared with them. Random nodes draw
// the same numbers in every graph.
class Verdict::Batch {
 public:
  Batch(const std::shared_ptr<GraphModule>& module, const Parts& parts, uint64_t seed, VerdictReport& report)
      : module_(module), parts_(parts), seed_(seed), report_(report) {
    generators_.push_back(at::detail::getDefaultCPUGenerator());
    for (const Attr& attr : module->state()) {
      if (attr.kind == AttrKind::Buffer) buffers_.emplace_back(attr.tensor.detach(), attr.tensor.detach().clone());
      const at::Device device = attr.tensor.device();
      if (device.is_cpu() || device.is_meta()) continue;
      const at::Generator& generator = at::globalContext().defaultGenerator(device);
      if (std::ranges::find(generators_, generator) == generators_.end()) generators_.push_back(generator);
    }
    for (at::Generator& generator : generators_) {
      std::lock_guard lock(generator.mutex());
      states_.push_back(generator.get_state());
    }
    plain_ = full_gradient(*module_);
  }
  ~Batch() {
    put_buffers_back();
    for (size_t i = 0; i < generators_.size(); ++i) {
      std::lock_guard lock(generators_[i].mutex());
      generators_[i].set_state(states_[i]);
    }
  }
  Batch(const Batch&) = delete;

  // Returns the error of the gradient that is rounded in this direction only.
  double error(const FormatRecipe& recipe, bool backward) {
    if (!rounds(recipe, backward)) return 0;
    if (recipe.unit_scaled && !scaled_) {
      scaled_module_ = unit_scale(module_);
      scaled_ = full_gradient(*scaled_module_);
    }
    const Gradient& full = recipe.unit_scaled ? *scaled_ : plain_;
    const auto graph = derive(recipe.unit_scaled ? *scaled_module_ : *module_);
    apply_recipe(*graph, one_way(recipe, backward));
    graph->lint();
    std::vector<at::Tensor> rounded = gradient(*graph);
    for (size_t i = 0; i < rounded.size(); ++i) {
      const at::Tensor& before = full.tensors[i];
      if (!before.defined()) continue;
      rounded[i] = rounded[i].defined() ? rounded[i] - before : before;
    }
    const double share = norm_of(rounded) / full.norm;
    return std::isfinite(share) ? share : kInfinite;
  }
  GradientError error(const FormatRecipe& recipe) { return {error(recipe, true), error(recipe, false)}; }

 private:
  struct Gradient {
    std::vector<at::Tensor> tensors;
    double norm = 0;
  };

  Gradient full_gradient(GraphModule& graph) {
    Gradient full{gradient(graph)};
    full.norm = norm_of(full.tensors);
    ++report_.full_gradients;
    if (full.norm > 0 && std::isfinite(full.norm)) return full;
    throw Error(ErrorKind::Numerics,
                c10::str("the full-precision gradient of the batch is ", full.norm == 0 ? "zero" : "not finite",
                         ": there is nothing to compare with"),
                "", "another batch, or a model and a loss that learn from it");
  }

  std::vector<at::Tensor> gradient(GraphModule& graph) {
    const c10::AutoGradMode on(true);
    const NodeSeeds seeds(seed_, generators_);
    std::vector<at::Tensor> parameters, sum;
    ++report_.gradients;
    for (const Part& part : parts_) {
      const at::Tensor loss = part(graph);
      if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
        throw Error(ErrorKind::InvalidArgument, "the loss is no number with a gradient", "",
                    "return the loss of the batch: a tensor of one element that depends on parameters");
      }
      if (sum.empty()) parameters = trained(graph), sum.resize(parameters.size());  // the call may have exchanged them
      const auto of_part = torch::autograd::grad({loss}, parameters, {}, std::nullopt, false, /*allow_unused=*/true);
      for (size_t i = 0; i < sum.size(); ++i) {
        if (!of_part[i].defined()) continue;
        sum[i] = sum[i].defined() ? sum[i] + of_part[i] : of_part[i];
      }
      put_buffers_back();  // the backward may have needed them as the forward left them
    }
    return sum;
  }

  void put_buffers_back() const {
    const at::NoGradGuard no_grad;
    for (const auto& [tensor, value] : buffers_) tensor.copy_(value);
  }

  const std::shared_ptr<GraphModule> module_;
  const Parts& parts_;
  const uint64_t seed_;
  VerdictReport& report_;
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  Gradient plain_;
  std::shared_ptr<GraphModule> scaled_module_;
  std::optional<Gradient> scaled_;
};

namespace {

// Looks for what mends a recipe on a batch.
class Remedy {
 public:
  using Measure = std::function<double(const FormatRecipe& recipe, bool backward)>;

  Remedy(RecipeVerdict& verdict, const GraphModule& module, Measure measure)
      : verdict_(verdict), module_(module), measure_(std::move(measure)) {}

  void find() {
    verdict_.remedied = {measure_(verdict_.recipe, true), measure_(verdict_.recipe, false)};
    if (scale_loss() || scale_units()) return;
    name_products();
    keep_products();
  }

 private:
  static double least_of(const std::vector<std::pair<int, double>>& tried) {
    return std::ranges::min(tried, {}, &std::pair<int, double>::second).second;
  }
  bool is_ok() const { return verdict_.remedied.verdict() == VerdictClass::Ok; }

  // The smallest power of two that takes the backward's error away, up or down.
  bool scale_loss() {
    if (has_own_scales(verdict_.recipe, true)) return false;
    FormatRecipe recipe = verdict_.recipe;
    const double as_it_is = verdict_.remedied.backward;
    std::vector<std::pair<int, double>> tried{{0, as_it_is}};
    for (const int step : {kScaleStep, -kScaleStep}) {
      for (int k = step; std::abs(k) <= kMostScale; k += step) {
        recipe.loss_scale = verdict_.recipe.loss_scale * std::ldexp(1.0, k);
        tried.emplace_back(k, measure_(recipe, true));
        // At the edge of the range errors grow before they fall.
        if (least_of(tried) < 0.5 * as_it_is && tried.back().second > 0.9 * tried[tried.size() - 2].second) break;
      }
      if (least_of(tried) < 0.5 * as_it_is) break;
    }
    const double least = least_of(tried);
    if (!(least < 0.5 * as_it_is)) return false;
    const auto best = std::ranges::find_if(tried, [&](const auto& t) { return t.second <= 1.05 * least; });
    const GradientError error{best->second, verdict_.remedied.forward};
    if (error.verdict() == VerdictClass::No) return false;
    verdict_.remedy.loss_scale = verdict_.recipe.loss_scale * std::ldexp(1.0, best->first);
    verdict_.remedied = error;
    return is_ok();
  }

  bool scale_units() {
    if (verdict_.recipe.unit_scaled || (has_own_scales(verdict_.recipe, true) && has_own_scales(verdict_.recipe, false)))
      return false;
    FormatRecipe recipe = verdict_.recipe;
    recipe.unit_scaled = true;
    try {
      const GradientError error{measure_(recipe, true), measure_(recipe, false)};
      if (error.verdict() != VerdictClass::Ok) return false;
      verdict_.remedy = recipe;
      verdict_.remedied = error;
      return true;
    } catch (const Error&) {  // a model that unit_scale refuses has no such remedy
      return false;
    }
  }

  void name_products() {
    const std::vector<std::string> names = product_names(module_);
    for (const bool backward : {true, false}) {
      const double weight = backward ? 1 : 0.3;
      const double as_it_is = backward ? verdict_.remedied.backward : verdict_.remedied.forward;
      if (weight * as_it_is < kSmallShare || names.size() < 2) continue;
      for (const std::string& name : names) {
        const double kept = measure_(with_product(verdict_.remedy, name, backward, "none"), backward);
        const double gain = std::isfinite(kept) ? weight * (as_it_is - kept) : 0;
        verdict_.products.push_back({name, backward, gain});
      }
    }
    std::ranges::stable_sort(verdict_.products, std::greater(), &ProductVerdict::gain);
  }

  void keep_products() {
    FormatRecipe recipe = verdict_.remedy;
    GradientError error = verdict_.remedied;
    for (size_t i = 0; i < std::min(kMostKept, verdict_.products.size()) && !is_ok(); ++i) {
      const ProductVerdict& p = verdict_.products[i];
      if (!(p.gain > 0)) break;
      recipe = with_product(recipe, p.product, p.backward, wider(verdict_.recipe, p.backward));
      (p.backward ? error.backward : error.forward) = measure_(recipe, p.backward);
      if (error.score() < 0.9 * verdict_.remedied.score()) verdict_.remedy = recipe, verdict_.remedied = error;
    }
  }

  RecipeVerdict& verdict_;
  const GraphModule& module_;
  const Measure measure_;
};

}  // namespace

std::string_view to_string(VerdictClass verdict) {
  constexpr std::string_view kNames[] = {"ok", "doubtful", "no"};
  return kNames[static_cast<size_t>(verdict)];
}

VerdictClass GradientError::verdict() const {
  return score() <= 0.15 ? VerdictClass::Ok : score() <= 0.35 ? VerdictClass::Doubtful : VerdictClass::No;
}

std::vector<std::string> default_verdict_recipes() {
  return {"fp16", "bf16", "fp8", "unit-fp8", "tensorwise", "rowwise", "blocks128", "mxfp8", "nvfp4", "mxfp4"};
}

Verdict::Verdict(const GraphModule& module, VerdictOptions options)
    : module_(derive(module)), options_(std::move(options)) {
  for (const std::string& name : options_.recipes) {
    RecipeVerdict verdict{.name = name, .recipe = read_recipe(name)};
    verdict.remedy = verdict.recipe;
    report_.recipes.push_back(std::move(verdict));
  }
  if (trained(*module_).empty()) {
    throw Error(ErrorKind::InvalidArgument, "the model has no parameter that is trained", "",
                "a model with parameters whose requires_grad is true");
  }
}

Verdict::~Verdict() = default;

void Verdict::measure(const Parts& parts) {
  Batch batch(module_, parts, static_cast<uint64_t>(++report_.batches), report_);
  for (RecipeVerdict& verdict : report_.recipes) {
    if (!verdict.problem.empty()) continue;
    if (options_.phase) options_.phase("batch " + std::to_string(report_.batches) + ": " + verdict.name);
    try {
      const GradientError error = batch.error(verdict.recipe);
      verdict.error.backward += error.backward;
      verdict.error.forward += error.forward;
    } catch (const Error& e) {  // of this recipe: the model itself has run
      verdict.problem = e.message();
    }
  }
}

VerdictReport Verdict::conclude(const Parts& parts) {
  if (report_.batches == 0) {
    throw Error(ErrorKind::InvalidState, "no batch was measured", "", "measure() some batches first");
  }
  VerdictReport out = report_;
  const auto batches = static_cast<double>(out.batches);
  std::optional<Batch> batch;
  for (RecipeVerdict& verdict : out.recipes) {
    verdict.error.backward /= batches;
    verdict.error.forward /= batches;
    verdict.remedied = verdict.error;
    if (!options_.explain || !verdict.problem.empty() || verdict.error.verdict() == VerdictClass::Ok) continue;
    if (!batch) batch.emplace(module_, parts, static_cast<uint64_t>(out.batches), out);
    if (options_.phase) options_.phase("what stands in the way of " + verdict.name);
    Remedy(verdict, *module_, [&](const FormatRecipe& recipe, bool backward) {
      return batch->error(recipe, backward);
    }).find();
  }
  return out;
}

VerdictReport verdict(const GraphModule& module, const std::vector<Verdict::Parts>& batches,
                      const VerdictOptions& options) {
  Verdict measured(module, options);
  for (const Verdict::Parts& batch : batches) measured.measure(batch);
  return measured.conclude(batches.empty() ? Verdict::Parts() : batches.back());
}

std::vector<int64_t> verdict_steps(int64_t count, int64_t warmup) {
  std::vector<int64_t> steps;
  const int64_t first = (count + 1) / 2;
  for (int64_t i = 0; i < count; ++i) steps.push_back(i < first ? i + 1 : std::max(warmup, first) + i - first + 1);
  return steps;
}

// ---- the report

std::string RecipeVerdict::sentence() const {
  if (!problem.empty()) return name + " was not measured: " + problem;
  const auto is = to_string(error.verdict());
  const std::string as_it_is = c10::str(name, ": ", is, ", the error of the gradient is ", score_text(error.backward),
                                        " backward and ", score_text(error.forward), " forward");
  if (error.verdict() == VerdictClass::Ok) return as_it_is + ".";
  std::vector<std::string> what;
  if (remedy.unit_scaled != recipe.unit_scaled) what.emplace_back("unit_scale() before");
  if (remedy.loss_scale != recipe.loss_scale)
    what.push_back(c10::str("a loss scale of 2^", std::lround(std::log2(remedy.loss_scale))));
  for (const ProductFormats& p : remedy.products) {
    if (std::ranges::find(recipe.products, p) != recipe.products.end()) continue;
    for (const bool backward : {true, false}) {
      const auto& format = backward ? p.bwd : p.fwd;
      if (!format) continue;
      what.push_back(
          c10::str("the ", direction(backward), " of ", p.name, " in ", *format == "none" ? "full precision" : *format));
    }
  }
  if (what.empty()) return as_it_is + ". Neither a scale nor single products mend it.";
  const bool range = lacks_range() && remedy.products == recipe.products;
  return c10::str(as_it_is, range ? ". What it lacks is range: with " : ". With ", join(what), " the score is ",
                  score_text(remedied.score()), ", ", to_string(remedied.verdict()), ".");
}

const RecipeVerdict* VerdictReport::best() const {
  const RecipeVerdict* best = nullptr;
  const auto rank = [](const RecipeVerdict& v) {
    return std::tuple(bits_of(v.remedy), v.remedy.products.size(), v.changed(), v.remedied.score());
  };
  for (const RecipeVerdict& v : recipes) {
    if (!v.problem.empty() || v.remedied.verdict() != VerdictClass::Ok) continue;
    if (best == nullptr || rank(v) < rank(*best)) best = &v;
  }
  return best;
}

std::string VerdictReport::conclusion() const {
  if (const RecipeVerdict* found = best()) {
    return "The fewest bits that will do: " + found->sentence();
  }
  const RecipeVerdict* nearest = nullptr;
  for (const RecipeVerdict& v : recipes) {
    if (v.problem.empty() && (nearest == nullptr || v.remedied.score() < nearest->remedied.score())) nearest = &v;
  }
  if (nearest == nullptr) return "No recipe could be measured.";
  return "No recipe is ok. The nearest: " + nearest->sentence();
}

std::string VerdictReport::recipe_file() const {
  const RecipeVerdict* chosen = best();
  for (const RecipeVerdict& v : recipes) {
    if (best() != nullptr || !v.problem.empty()) continue;
    if (chosen == nullptr || v.remedied.score() < chosen->remedied.score()) chosen = &v;
  }
  if (chosen == nullptr) return "";
  return c10::str("# ", chosen->name, ": error of the gradient ", score_text(chosen->remedied.backward), " backward, ",
                  score_text(chosen->remedied.forward), " forward: ", to_string(chosen->remedied.verdict()), "\n",
                  chosen->remedy.to_toml());
}

Table VerdictReport::table() const {
  Table table{{"recipe", "backward", "forward", "score", "verdict", "with its remedy", "verdict then"}, {}};
  for (const RecipeVerdict& v : recipes) {
    if (!v.problem.empty()) {
      table.rows.push_back({v.name, "", "", "", "not measured"});
      continue;
    }
    std::vector<std::string> row{v.name, score_text(v.error.backward), score_text(v.error.forward),
                                 score_text(v.error.score()), std::string(to_string(v.error.verdict()))};
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
    if (v.error.verdict() == VerdictClass::Ok && v.problem.empty()) continue;
    text += "\n" + v.sentence() + "\n";
    if (!v.products.empty()) text += plumb::to_text(products_table(v, 5));
  }
  return text;
}

nlohmann::json VerdictReport::to_json() const {
  auto of_recipes = nlohmann::json::array();
  const auto errors = [](const GradientError& e) {
    return nlohmann::json{{"backward", e.backward},
                          {"forward", e.forward},
                          {"score", e.score()},
                          {"verdict", std::string(to_string(e.verdict()))}};
  };
  for (const RecipeVerdict& v : recipes) {
    nlohmann::json one{{"recipe", v.name}, {"sentence", v.sentence()}};
    if (!v.problem.empty()) {
      one["problem"] = v.problem;
    } else {
      one.update(errors(v.error));
      one["remedied"] = errors(v.remedied);
      one["file"] = v.remedy.to_toml();
      one["products"] = nlohmann::json::array();
      for (const ProductVerdict& p : v.products) {
        one["products"].push_back({{"product", p.product}, {"direction", direction(p.backward)}, {"gain", p.gain}});
      }
    }
    of_recipes.push_back(std::move(one));
  }
  return {{"conclusion", conclusion()}, {"recipes", of_recipes},      {"file", recipe_file()},
          {"batches", batches},         {"gradients", gradients},     {"full_gradients", full_gradients}};
}

}  // namespace plumb
