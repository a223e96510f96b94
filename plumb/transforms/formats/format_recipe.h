// A recipe: the number formats of a model's products, by product and direction, by name or as a TOML file. The verdict
// (plumb/transforms/verdict) writes recipes; simulate_format, use_fp8 and a training take them.
//
//   fwd = "mxfp4-RN"                  # format of the inputs of every product
//   bwd = "mxfp4-RN"                  # format of the gradients of their outputs
//   loss-scale = 4096.0               # gradients are this many times as large while they are rounded
//
//   [[product]]
//   name = "head"                     # a pattern of module paths or parameters; "%mm": of names of values
//   bwd = "mxfp8e5m2-RN"              # instead
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plumb/transforms/report.h"

namespace plumb {

class GraphModule;

// Other formats for the products that a pattern fits, as SimulateFormatOptions::exclude has patterns.
struct ProductFormats {
  std::string name;
  std::optional<std::string> fwd = {}, bwd = {};  // nullopt: this direction as without the entry

  bool operator==(const ProductFormats&) const = default;
};

struct FormatRecipe {
  std::string fwd = "none", bwd = "none";
  std::string scales = {};   // scale factors for tensors, one of fp8_recipes(); "": none
  bool unit_scaled = false;  // for a graph that unit_scale() has rewritten
  // A power of two from 2^-126 to 2^126; products of unit and of tensor scales need none.
  double loss_scale = 1;
  static constexpr int kMostLossScale = 126;  // exponent
  std::vector<ProductFormats> products = {};  // for each direction the first entry that fits and states it counts

  // Throws Error(InvalidArgument) for a format or scales that do not exist and for a loss scale that is no power of
  // two or beyond float32's range.
  void check() const;
  // Returns the file's text.
  std::string to_toml() const;
  bool operator==(const FormatRecipe&) const = default;
};

// Parses a file's text. Throws Error that begins with `file` and the line: BadFile for what is no TOML, UnknownName for
// a key, InvalidArgument for a value.
FormatRecipe parse_recipe(const std::string& text, const std::string& file = "recipe");

// Returns the recipe of a name or of a file, NAME.toml. Names: "fp8" (e4m3fn forward, e5m2 backward), "mxfp8" (the same
// elements, in blocks), "tensorwise", "rowwise" and "blocks128" (FP8 with scale factors), any format for both
// directions ("bf16", "mxfp4"), and FORWARD/BACKWARD ("e4m3fn-SR/none"). A name may end with a rounding ("mxfp8-SR")
// and begin with "unit-": of the unit-scaled model. Throws Error(UnknownName) or what parse_recipe() throws.
FormatRecipe read_recipe(const std::string& name);

// Returns the formats of a product, forward and backward.
std::pair<std::string, std::string> formats_of(const Node* product, const std::string& fwd, const std::string& bwd,
                                               const std::vector<ProductFormats>& products);

// Returns whether the node is a matrix product, a convolution or a recurrent layer.
bool is_product(const Node* node);
// Returns whether the node rounds values or gradients to a format, or multiplies FP8.
bool rounds_values(const Node* node);
// Returns the entries about nodes that may multiply and were not rounded, in a text for each operator and reason:
// "%a in fc and 2 more (aten::b): reason".
std::vector<std::string> unrounded_products(const Report& report);
// Adds an entry for every pattern that excludes no product, so that a misspelled name shows.
void report_unmatched(const GraphModule& module, const std::vector<std::string>& exclude, Report& report);
// Returns the names of a graph's products in its order, each of one product alone: its module's path, else its
// parameter's name, else PATH#NUMBER, from 1 in its module. Values have other names in another capture.
std::vector<std::string> product_names(const GraphModule& module);

// Returns the recipe with names of this graph's values, "%NAME", in place of PATH#NUMBER. Throws Error(UnknownName) for
// a product that the recipe names and the model does not have, and Error(InvalidState) for a recipe of unit-scaled
// models on another.
FormatRecipe fit_recipe(const GraphModule& module, FormatRecipe recipe);

// Rewrites the graph in place: use_fp8() where the recipe has scale factors, else simulate_format(), then the loss
// scale. Returns whether anything changed. Throws what fit_recipe() throws.
bool apply_recipe(GraphModule& module, const FormatRecipe& given, Report* report = nullptr);

// Multiplies the gradients of all outputs by a power of two, and those that reach parameters and inputs by its inverse:
// what loss scaling and the division before the optimizer's step do together, inside of the graph. Gradients that no
// product rounds keep their bits, as long as they stay in the range of their dtype. Returns whether anything changed.
// Throws Error(InvalidArgument) for another number.
bool scale_gradients(GraphModule& module, double scale);

}  // namespace plumb
