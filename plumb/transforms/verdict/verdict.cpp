#include "plumb/transforms/verdict/verdict.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/graph/backward_errors.h"
#include "plumb/graph/module_state_guard.h"
#include "plumb/numerics/format.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/transforms/formats/recurrent_steps.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/module.h"
#include "plumb/transforms/scale/unit_scale.h"

namespace plumb {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int kScaleStep = 4, kMostScale = 40;  // exponents of the loss scales that are tried
constexpr size_t kMostKept = 2;                 // product-directions in a wider format
constexpr double kSmallShare = 0.05;            // part of the score: a direction that adds less has no culprits
constexpr double kZeroSum = 1e-4;  // a sum over the rows this small is rounding: share of the gradient's norm

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

double norm_of(const at::Tensor& gradient) {
  if (!gradient.defined()) return 0;
  // Embeddings may have sparse gradients, and parameters may be complex.
  const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  const at::Tensor real = dense.is_complex() ? at::view_as_real(dense) : dense;
  return at::linalg_vector_norm(real, 2, {}, false, at::kDouble).item<double>();
}

struct Norms {
  std::vector<double> each;  // one for each parameter
  double all = 0;
};

Norms norms_of(const std::vector<at::Tensor>& gradient) {
  Norms norms;
  for (const at::Tensor& g : gradient) norms.all = std::hypot(norms.all, norms.each.emplace_back(norm_of(g)));
  return norms;
}

// Returns the norm of the part that all rows have in common.
double common_norm(const at::Tensor& gradient) {
  return norm_of(gradient.sum(0)) / std::sqrt(static_cast<double>(gradient.size(0)));
}

// Returns whether the rows of a weight's gradient sum to zero, but for rounding.
bool sums_to_zero(const at::Tensor& gradient) {
  return gradient.defined() && !gradient.is_sparse() && gradient.dim() > 1 && gradient.size(0) > 1 &&
         common_norm(gradient) < kZeroSum * norm_of(gradient);
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

// A batch at the weights as they are: the full-precision gradients, and what is compared with them. Random nodes draw
// the same numbers in every graph.
class MeasuredBatch {
 public:
  MeasuredBatch(const std::shared_ptr<GraphModule>& module, const Verdict::Parts& parts, uint64_t seed,
                VerdictReport& report)
      : module_(module), parts_(parts), seed_(seed), report_(report), before_(module->state(), {}) {
    before_.keep_written(module->graph(), module->state());
    plain_ = full_gradient(*module_);
  }

  // Returns the error of the gradient that is rounded in this direction only; zeros for the other.
  GradientError error(const FormatRecipe& recipe, bool backward) {
    if (!rounds(recipe, backward)) return {};
    if (recipe.unit_scaled && !scaled_) {
      scaled_module_ = unit_scale(module_);
      scaled_ = full_gradient(*scaled_module_);
    }
    const Gradient& full = recipe.unit_scaled ? *scaled_ : plain_;
    const auto graph = derive(recipe.unit_scaled ? *scaled_module_ : *module_);
    Report changes;
    if (!apply_recipe(*graph, one_way(recipe, backward), &changes)) return {};
    has_rounded_ = true;
    left_ = unrounded_products(changes);
    std::vector<at::Tensor> rounded = gradient(*graph);
    for (size_t i = 0; i < rounded.size(); ++i) {
      const at::Tensor& before = full.tensors[i];
      if (!before.defined()) continue;
      rounded[i] = rounded[i].defined() ? rounded[i] - before : before;
    }
    const Norms error = norms_of(rounded);
    const double share = std::isfinite(error.all) ? error.all / full.norms.all : kInfinite;
    if (!backward) return {.forward = share};
    double drift = 0, squares = 0, elements = 0;
    for (const size_t i : full.zero_sums) drift = std::hypot(drift, common_norm(rounded[i]) / full.norms.all);
    for (size_t i = 0; i < rounded.size(); ++i) {
      const double own = full.norms.each[i], lost = error.each[i];
      // A bias in front of a norm has no gradient but noise, all of which may be lost.
      if ((own == 0 && lost == 0) || rounded[i].dim() < 2) continue;
      const auto count = static_cast<double>(rounded[i].numel());
      elements += count;
      squares += count * (lost < own ? std::pow(lost / own, 2) : 1);
    }
    return {.backward = share,
            .drift = std::isfinite(drift) ? drift : 0,
            .by_weight = elements > 0 ? std::sqrt(squares / elements) : 0};
  }
  // Returns what the last recipe left in full precision though it may multiply.
  std::vector<std::string> left() const { return left_; }
  // Throws Error(InvalidState) for a recipe that rounds nothing of this model.
  GradientError error(const FormatRecipe& recipe) {
    has_rounded_ = false;
    left_.clear();
    GradientError found = error(recipe, true);
    found.take(error(recipe, false), false);
    if (has_rounded_ || !(rounds(recipe, true) || rounds(recipe, false))) return found;
    throw Error(ErrorKind::InvalidState, "the model has no product that it rounds", "",
                "a model with matrix products that no transform has taken");
  }

 private:
  struct Gradient {
    std::vector<at::Tensor> tensors;
    Norms norms;
    std::vector<size_t> zero_sums;  // places of weights whose gradients sum to zero over the rows
  };

  Gradient full_gradient(const GraphModule& module) {
    std::vector<at::Tensor> tensors = gradient(*derive(module));
    Gradient full{tensors, norms_of(tensors), {}};
    for (size_t i = 0; i < full.tensors.size(); ++i)
      if (sums_to_zero(full.tensors[i])) full.zero_sums.push_back(i);
    ++report_.full_gradients;
    if (full.norms.all > 0 && std::isfinite(full.norms.all)) return full;
    throw Error(ErrorKind::Numerics,
                c10::str("the full-precision gradient of the batch is ", full.norms.all == 0 ? "zero" : "not finite",
                         ": there is nothing to compare with"),
                "", "another batch, or a model and a loss that learn from it");
  }

  std::vector<at::Tensor> gradient(GraphModule& graph) {
    // A recipe takes such layers apart, into other draws: all graphs that are compared have them apart.
    for (Node* node : random_recurrent_layers(graph)) take_apart(graph, node);
    graph.lint();
    const c10::AutoGradMode on(true);
    before_.put_generators_back();  // a part that draws random numbers itself draws the same ones
    const NodeSeeds seeds(seed_, before_.generators());
    std::vector<at::Tensor> parameters, sum;
    ++report_.gradients;
    for (const Verdict::Part& part : parts_) {
      if (!part) {
        throw Error(ErrorKind::InvalidArgument, "a part of the batch has no function", "",
                    "give one that returns the part's loss");
      }
      const at::Tensor loss = part(graph);
      if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad() || loss.is_complex()) {
        const std::string found = !loss.defined()     ? "undefined"
                                  : loss.numel() != 1 ? "a tensor of " + std::to_string(loss.numel()) + " elements"
                                  : loss.is_complex() ? "a complex one"
                                                      : "a number that depends on no parameter";
        throw Error(ErrorKind::InvalidArgument, "the loss is no number with a gradient, but " + found, "",
                    "return the loss of the batch: a tensor of one element that depends on parameters");
      }
      if (sum.empty()) parameters = trained(graph), sum.resize(parameters.size());  // the call may have exchanged them
      const auto of_part = run_backward_of(graph.graph(), [&] {
        return torch::autograd::grad({loss}, parameters, {}, std::nullopt, false, /*allow_unused=*/true);
      });
      for (size_t i = 0; i < sum.size(); ++i) {
        if (!of_part[i].defined()) continue;
        sum[i] = sum[i].defined() ? sum[i] + of_part[i] : of_part[i];
      }
      before_.put_contents_back();  // the backward may have needed them as the forward left them
    }
    return sum;
  }

  const std::shared_ptr<GraphModule> module_;
  const Verdict::Parts& parts_;
  const uint64_t seed_;
  VerdictReport& report_;
  ModuleStateGuard before_;
  Gradient plain_;
  bool has_rounded_ = false;
  std::vector<std::string> left_;
  std::shared_ptr<GraphModule> scaled_module_;
  std::optional<Gradient> scaled_;
};

// Looks for what mends a recipe on a batch.
class Remedy {
 public:
  Remedy(RecipeVerdict& verdict, const GraphModule& module, MeasuredBatch& batch)
      : verdict_(verdict), module_(module), batch_(batch) {}

  void find() {
    verdict_.remedied = verdict_.last = batch_.error(verdict_.recipe);
    if (!scale_loss() && !scale_units()) {
      name_products();
      keep_products();
    }
    if (!verdict_.changed()) verdict_.remedied = verdict_.error;
  }

 private:
  struct Scaled {
    int exponent;
    GradientError error;
    double backward() const { return error.share(true); }
  };
  static double least_of(const std::vector<Scaled>& tried) {
    return std::ranges::min(tried, {}, &Scaled::backward).backward();
  }
  bool is_ok() const { return verdict_.remedied.verdict() == VerdictClass::Ok; }

  // The smallest power of two that takes the backward's error away, up or down.
  bool scale_loss() {
    if (has_own_scales(verdict_.recipe, true)) return false;
    FormatRecipe recipe = verdict_.recipe;
    std::vector<Scaled> tried{{0, verdict_.remedied}};
    const double as_it_is = tried[0].backward();
    for (const int step : {kScaleStep, -kScaleStep}) {
      for (int k = step; std::abs(k) <= kMostScale; k += step) {
        recipe.loss_scale = verdict_.recipe.loss_scale * std::ldexp(1.0, k);
        if (std::abs(std::ilogb(recipe.loss_scale)) > FormatRecipe::kMostLossScale) break;
        tried.push_back({k, batch_.error(recipe, true)});
        // At the edge of the range errors grow before they fall.
        if (least_of(tried) < 0.5 * as_it_is && tried.back().backward() > 0.9 * tried[tried.size() - 2].backward())
          break;
      }
      if (least_of(tried) < 0.5 * as_it_is) break;
    }
    const double least = least_of(tried);
    if (!(least < 0.5 * as_it_is)) return false;
    const auto best = std::ranges::find_if(tried, [&](const Scaled& t) { return t.backward() <= 1.05 * least; });
    GradientError error = verdict_.remedied;
    error.take(best->error, true);
    if (error.verdict() == VerdictClass::No) return false;
    verdict_.remedy.loss_scale = verdict_.recipe.loss_scale * std::ldexp(1.0, best->exponent);
    verdict_.remedied = error;
    return is_ok();
  }

  bool scale_units() {
    if (verdict_.recipe.unit_scaled ||
        (has_own_scales(verdict_.recipe, true) && has_own_scales(verdict_.recipe, false)))
      return false;
    FormatRecipe recipe = verdict_.recipe;
    recipe.unit_scaled = true;
    try {
      const GradientError error = batch_.error(recipe);
      if (error.verdict() != VerdictClass::Ok || !(error.score() < 0.9 * verdict_.remedied.score())) return false;
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
      const double as_it_is = verdict_.remedied.share(backward);
      if (as_it_is < kSmallShare || names.size() < 2) continue;
      for (const std::string& name : names) {
        const FormatRecipe recipe = with_product(verdict_.remedy, name, backward, "none");
        const double kept = batch_.error(recipe, backward).share(backward);
        const double gain = std::isfinite(kept) ? as_it_is - kept : 0;
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
      error.take(batch_.error(recipe, p.backward), p.backward);
      if (error.score() < 0.9 * verdict_.remedied.score()) verdict_.remedy = recipe, verdict_.remedied = error;
    }
  }

  RecipeVerdict& verdict_;
  const GraphModule& module_;
  MeasuredBatch& batch_;
};

}  // namespace

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
  for (const Node* node : module_->graph().nodes()) {
    if (!rounds_values(node)) continue;
    throw Error(ErrorKind::InvalidState,
                node->describe() + ": the model is rounded already, so that there is no full precision to compare with",
                node->meta().where(),
                "the model before simulate_format, simulate_fp8 or use_fp8; plumb train without --formats");
  }
  if (trained(*module_).empty()) {
    throw Error(ErrorKind::InvalidArgument, "the model has no parameter that is trained", "",
                "a model with parameters whose requires_grad is true");
  }
}

void Verdict::measure(const Parts& parts) {
  MeasuredBatch batch(module_, parts, static_cast<uint64_t>(report_.batches + 1), report_);
  ++report_.batches;
  for (RecipeVerdict& verdict : report_.recipes) {
    if (!verdict.problem.empty()) continue;
    try {
      const GradientError error = batch.error(verdict.recipe);
      verdict.left = batch.left();
      verdict.error.backward += error.backward;
      verdict.error.drift += error.drift;
      verdict.error.by_weight += error.by_weight;
      verdict.error.forward += error.forward;
    } catch (const Error& e) {  // an error of this recipe: the model itself has run
      verdict.problem = e.message() + (e.remedy().empty() ? "" : " (try: " + e.remedy() + ")");
    }
  }
}

VerdictReport Verdict::conclude(const Parts& parts) {
  if (report_.batches == 0) {
    throw Error(ErrorKind::InvalidState, "no batch was measured", "", "measure() some batches first");
  }
  if (report_.best() == nullptr) {
    std::vector<std::string> problems;
    for (const RecipeVerdict& verdict : report_.recipes) problems.push_back(verdict.sentence());
    throw Error(ErrorKind::InvalidState, "no recipe could be measured: " + join(problems, {}, "; "), "",
                "other recipes, or a model with matrix products");
  }
  VerdictReport out = report_;
  const auto batches = static_cast<double>(out.batches);
  std::optional<MeasuredBatch> batch;
  for (RecipeVerdict& verdict : out.recipes) {
    verdict.error.backward /= batches;
    verdict.error.drift /= batches;
    verdict.error.by_weight /= batches;
    verdict.error.forward /= batches;
    verdict.last = verdict.remedied = verdict.error;
    if (!options_.explain || !verdict.problem.empty() || verdict.error.verdict() == VerdictClass::Ok) continue;
    if (!batch) batch.emplace(module_, parts, static_cast<uint64_t>(out.batches), out);
    Remedy(verdict, *module_, *batch).find();
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
  constexpr int64_t kMostSteps = 1000, kMostWarmup = int64_t{1} << 40;
  if (count < 1 || count > kMostSteps || warmup < 0 || warmup > kMostWarmup) {
    throw Error(ErrorKind::InvalidArgument, c10::str("steps=", count, ", warmup=", warmup), "",
                c10::str("at least one step, at most ", kMostSteps, ", and no negative warm-up"));
  }
  std::vector<int64_t> steps;
  const int64_t first = (count + 1) / 2;
  for (int64_t i = 0; i < count; ++i) steps.push_back(i < first ? i + 1 : std::max(warmup, first) + i - first + 1);
  return steps;
}

}  // namespace plumb
