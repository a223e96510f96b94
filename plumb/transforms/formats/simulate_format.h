// Simulates low-precision formats around everything that is a matrix product: its inputs (activations and weights, not
// biases) are rounded forward, the gradient of its output is rounded backward. The product itself is computed in the
// tensors' own type.
//
//   auto fp8 = plumb::simulate_fp8(plumb::unit_scale(module));
//
// Tables stay as they are: products into which no floating-point input and no parameter flows (positions by
// frequencies). So do einsums and tensordots that sum over no dimension that two operands share: those rearrange, sum
// or multiply elements. A value that several products use is rounded once. Formats are texts as FPFormat::parse() reads
// them: "E4M3", "e4m3fn-RN", "E5M2-SR8"; "none" leaves that direction alone. Blocks that share a scale ("mxfp8",
// "nvfp4") run along the dimension that the product sums over; gradients' along the features (channels) of the output.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/numerics/format.h"
#include "plumb/transforms/formats/format_recipe.h"
#include "plumb/transforms/module.h"

namespace plumb {

struct SimulateFormatOptions {
  std::string fwd = "E4M3-SR";
  std::string bwd = "E5M2-SR";
  // Overrides what both formats say.
  std::optional<Rounding> rounding;
  int srbits = 0;  // random bits of stochastic rounding; 0: all
  // Operators to treat, "aten::linear" or "plumb::linear" (both spellings of one stand for both); empty: all.
  std::vector<std::string> operators;
  // Patterns (*, ?) of module paths or parameter names that are left alone: "lm_head", "layers.0.*". A pattern that no
  // product has there, and "%NAME", stands for names of values.
  std::vector<std::string> exclude;
  // Products in other formats than fwd and bwd.
  std::vector<ProductFormats> products;
};

// Throws Error(UnknownName) for an operator that is no matrix product. Returns whether anything
// changed.
bool simulate_format(GraphModule& module, const SimulateFormatOptions& options, Report* report = nullptr);

// Returns a new module that shares the tensors of `module`.
std::shared_ptr<TransformedModule> simulate_format(const std::shared_ptr<GraphModule>& module,
                                                   const SimulateFormatOptions& options);
std::shared_ptr<TransformedModule> simulate_format(const std::shared_ptr<GraphModule>& module, const FPFormat& fwd,
                                                   const FPFormat& bwd);
// E4M3 forward, E5M2 backward, of the family without infinities, rounded stochastically: as unit-scaling 0.3.5 has it.
// `options` may ask for another rounding, and for other formats ("e4m3fn-RN", "e5m2-RN" are the hardware's).
std::shared_ptr<TransformedModule> simulate_fp8(const std::shared_ptr<GraphModule>& module,
                                                const SimulateFormatOptions& options = {});

// Throws Error(InvalidArgument) for a pass that is given a recipe and formats.
[[noreturn]] void refuse_beside_recipe(const std::string& pass);

// Splits a pass's option "a,b" into a list.
std::vector<std::string> split_names(const std::string& text);

// Returns names of the operators that are matrix products, as `operators` takes them.
std::vector<std::string> matrix_product_operators();
// Throws Error(UnknownName) for a name that `operators` may not have.
void check_operators(const std::vector<std::string>& operators);
// Returns whether the list has the product's operator, in either spelling, or is empty.
bool is_asked_for(const Node* product, const std::vector<std::string>& operators);
inline constexpr const char* kNotAskedFor = "not among the operators asked for";
inline constexpr const char* kNoFormats = "its formats are none";
inline constexpr const char* kIsTable = "it makes a table: no floating-point input and no parameter flows into it";
inline constexpr const char* kNoSum = "it sums over no dimension that two operands share";
inline constexpr const char* kNoFloat = "it is no floating-point computation";

}  // namespace plumb
