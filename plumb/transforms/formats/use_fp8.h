// FP8 that is computed: what simulate_format would round becomes products of FP8's codes. Inputs and weights are cast
// forward, the gradient of the output backward; the products take the codes, and the codes are what is saved for the
// backward pass.
//
//   auto fp8 = plumb::use_fp8(plumb::unit_scale(module));
//
// There are no scale factors for the tensors: unit scaling makes them unnecessary. A unit-scaled product's own factors
// stay where they are, in the product.
//
// linear, addmm, mm, matmul and bmm, and the unit-scaled ones, become plumb::fp8_linear and plumb::fp8_matmul.
// Convolutions, attention and what else has no FP8 kernel stay simulated, to the same formats. The report says for each
// product which, and why. A value that several products use is cast once, a weight once for all microbatches of a
// pipeline's step (plumb/scaling/fp8.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plumb/transforms/formats/format_recipe.h"
#include "plumb/transforms/module.h"

namespace plumb {

struct UseFp8Options {
  // e4m3fn or e5m2, with any rounding.
  std::string fwd = "e4m3fn";
  std::string bwd = "e5m2";
  // The kernel of the products (Fp8Kernel): auto, scaled_mm or decoded.
  std::string kernel = "auto";
  // Options of simulate_format.
  std::vector<std::string> operators, exclude;
  // Scale factors for tensors, one of fp8_recipes(), instead of none: linear layers become plumb::fp8_scaled_linear,
  // everything else is left alone. To compare with; torchao's formats for gradients are e5m2 with "tensorwise", else
  // e4m3fn. The values of the casts are multiplied.
  // "delayed": scales from the largest values of the last `history` casts (plumb/scaling/fp8_recipes.h). The buffer
  // "NAME_fp8_state" beside a weight NAME has them; a graph made in evaluation mode reads it and leaves it as it is.
  std::string recipe = "";
  int64_t history = 1024;
  // Products in other formats than fwd and bwd; one in a format that no unit multiplies stays simulated.
  std::vector<ProductFormats> products = {};
};

// Throws Error(InvalidArgument) for formats that no unit multiplies and kernels that there are not.
void check(const UseFp8Options& options);

// Throws what check() throws, and Error(UnknownName) for operators that are no products. Returns whether anything
// changed.
bool use_fp8(GraphModule& module, const UseFp8Options& options = {}, Report* report = nullptr);

// Uses FP8 where both formats of a product are those of a unit; the others are simulated. A recipe's scale factors and
// its loss scale are applied, too. Throws what apply_recipe() throws.
bool use_fp8(GraphModule& module, const FormatRecipe& recipe, const UseFp8Options& options, Report* report = nullptr);

// Undoes use_fp8(): products of values again, unit-scaled ones as they were, nothing rounded. (Products that stayed
// simulated stay so.) Returns whether there were any.
bool drop_fp8(GraphModule& module);

// Returns a new module that shares the tensors of `module`.
std::shared_ptr<TransformedModule> use_fp8(const std::shared_ptr<GraphModule>& module,
                                           const UseFp8Options& options = {});

}  // namespace plumb
