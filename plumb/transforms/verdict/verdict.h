// Which number format will this model train in, and what stands in the way? Gradients of a few batches on the
// full-precision run's path, rounded by a recipe forward only and backward only, are compared with the full-precision
// gradient. An error of the forward is another function, which still trains; an error of the backward is a wrong
// gradient.
//
//   const auto step = [&](plumb::GraphModule& graph) { return graph(x, y); };  // the loss of a batch
//   std::cout << plumb::verdict(*module, {{step}}, {.recipes = {"fp8", "mxfp4"}}).to_text();
//
// A recipe that is not ok is asked about its range first: does a power of two for all gradients (a loss scale), or unit
// scaling, remove the error? If not, its products are kept in a wider format one by one, each direction apart.
//
// Nothing of the model changes: gradients are not accumulated, buffers and generators are put back.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/core/table.h"
#include "plumb/graph/graph_module.h"
#include "plumb/transforms/formats/format_recipe.h"

namespace plumb {

enum class VerdictClass { Ok, Doubtful, No };
std::string_view to_string(VerdictClass verdict);  // "ok", "doubtful", "no"

// Errors of the gradient of all parameters, as shares of the full-precision gradient's norm.
struct GradientError {
  double backward = 0, forward = 0;  // rounded in this direction only; infinity where a gradient is not finite
  // The part of the backward's error that moves all rows of a weight alike, in weights whose full-precision gradients
  // sum to zero over the rows, as those in front of a cross entropy do. No step moves them back.
  double drift = 0;
  // The backward's error as a share of each weight's own gradient, at most 1: the root of its mean square over the
  // elements of all weights of two dimensions or more. Adam divides by a parameter's own gradient: what a layer with a
  // small one loses is no small loss.
  double by_weight = 0;

  double score() const { return share(true) + share(false); }
  // Returns what a direction adds to the score.
  double share(bool of_backward) const {
    return of_backward ? std::max(backward, 0.5 * by_weight) + drift : 0.3 * forward;
  }
  // Takes a direction's errors from another one.
  void take(const GradientError& other, bool of_backward);
  // docs/training.md has the runs that the rule was made with.
  static constexpr double kMostOk = 0.15, kMostDoubtful = 0.5;  // scores
  VerdictClass verdict() const;
};

// The gain of keeping one direction of one product in full precision.
struct ProductVerdict {
  std::string product;  // as product_names() has it
  bool backward = false;
  double gain = 0;  // decrease of the score
};

struct RecipeVerdict {
  std::string name;  // as it was asked for
  FormatRecipe recipe;
  std::string problem;  // why it was not measured, and what to do; "" if it was
  GradientError error;  // the mean of the batches
  // Names nodes that may multiply and stay in full precision, with the reasons, as unrounded_products() does: an
  // operator of several products, a custom function.
  std::vector<std::string> left = {};

  // The recipe with its remedy, and the errors of the last batch without and with it. The recipe itself and `error`
  // where it is ok or has none.
  FormatRecipe remedy;
  GradientError last, remedied;
  std::vector<ProductVerdict> products;  // the largest gain first; empty where range is the remedy

  bool changed() const { return !(remedy == recipe); }
  bool lacks_range() const {
    return remedy.loss_scale != recipe.loss_scale || remedy.unit_scaled != recipe.unit_scaled;
  }
  std::string sentence() const;

 private:
  std::string about_error() const;
};

struct VerdictReport {
  std::vector<RecipeVerdict> recipes;
  int64_t batches = 0, gradients = 0, full_gradients = 0;  // `full_gradients` of the gradients: in full precision

  // Returns the ok recipe with the fewest bits, with or without its remedy, else the one with the least score; null if
  // none was measured.
  const RecipeVerdict* best() const;
  std::string conclusion() const;
  // Returns best()'s recipe as a file, with its error in a comment; "" if there is none.
  std::string recipe_file() const;
  Table table() const;  // a row a recipe
  // Returns the products of one recipe and direction that stand in its way, the largest gain first; at most `most`.
  static Table products_table(const RecipeVerdict& recipe, size_t most);
  std::string to_text() const;
  nlohmann::json to_json() const;
};

// fp16, bf16, FP8 plain, unit-scaled, with scale factors and in blocks, and 4 bits.
std::vector<std::string> default_verdict_recipes();

struct VerdictOptions {
  std::vector<std::string> recipes = default_verdict_recipes();  // as read_recipe() takes them
  bool explain = true;                                           // looks for remedies of recipes that are not ok
};

class Verdict {
 public:
  // Computes the loss of a part of a batch with a graph that takes what the model takes. The gradients of the parts are
  // added: a part of several returns its share of the loss.
  using Part = std::function<at::Tensor(GraphModule& graph)>;
  using Parts = std::vector<Part>;

  // Shares the tensors of `module`, whose parameters may be trained between the batches. Throws what read_recipe()
  // throws, Error(InvalidArgument) for a model without parameters that are trained, and Error(InvalidState) for one
  // whose products are rounded already.
  explicit Verdict(const GraphModule& module, VerdictOptions options = {});

  // Measures every recipe on a batch: a full-precision gradient for all, and two for each. Throws Error(Numerics) if
  // the full-precision gradient is zero or not finite.
  void measure(const Parts& batch);
  // Returns the verdict. Remedies are looked for on this batch, at the weights as they are. Throws Error(InvalidState)
  // if no batch was measured, or no recipe could be.
  VerdictReport conclude(const Parts& batch);

 private:
  std::shared_ptr<GraphModule> module_;
  VerdictOptions options_;
  VerdictReport report_;
};

// Measures every batch at the weights as they are, and concludes on the last one.
VerdictReport verdict(const GraphModule& module, const std::vector<Verdict::Parts>& batches,
                      const VerdictOptions& options = {});

// Returns the steps of a training, from 1, in which `count` batches are measured: half of them at its beginning and
// half behind its warm-up, where underflow is larger. Throws Error(InvalidArgument) unless `count` is from 1 to 1000
// and `warmup` from 0 to 2^40.
std::vector<int64_t> verdict_steps(int64_t count, int64_t warmup);

}  // namespace plumb
