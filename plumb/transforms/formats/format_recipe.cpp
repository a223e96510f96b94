#include "plumb/transforms/formats/format_recipe.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "plumb/core/input_file.h"
#include "plumb/core/join.h"
#include "plumb/core/prefixed.h"
#include "plumb/core/toml_text.h"
#include "plumb/graph/graph_module.h"
#include "plumb/numerics/format.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/fp8_recipes.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/formats/use_fp8.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

const char* const kRecipeNames =
    "fp8, mxfp8, tensorwise, rowwise, blocks128, a format (bf16, mxfp4, ...), FORWARD/BACKWARD, NAME.toml; unit- "
    "before "
    "and -SR behind most of them";

std::string format_or_none(const std::string& text) {
  return text == "none" ? text : FPFormat::parse(text).to_string();
}

// One document of a recipe, whose errors name file and line.
class RecipeReader {
 public:
  explicit RecipeReader(const std::string& file) : file_(file) {}

  FormatRecipe read(const toml::table& document) const {
    FormatRecipe recipe;
    for (const auto& [key, node] : document) {
      const std::string_view name = key.str();
      if (name == "fwd" || name == "bwd") {
        (name == "fwd" ? recipe.fwd : recipe.bwd) = format(node, key);
      } else if (name == "scales") {
        recipe.scales = text(node, key);
      } else if (name == "unit-scaled") {
        const auto flag = node.value_exact<bool>();
        if (!flag) fail(node, key, "is neither true nor false");
        recipe.unit_scaled = *flag;
      } else if (name == "loss-scale") {
        const auto number = node.value<double>();
        if (!number) fail(node, key, "is no number");
        recipe.loss_scale = *number;
      } else if (name == "product") {
        const toml::array* products = node.as_array();
        if (!products || !(products->empty() || node.is_array_of_tables()))
          fail(node, key, "is no list of [[product]] tables");
        for (const toml::node& each : *products) recipe.products.push_back(product(*each.as_table()));
      } else {
        unknown(key, "fwd, bwd, scales, unit-scaled, loss-scale and [[product]] tables");
      }
    }
    prefixed(file_ + ": ", [&] { recipe.check(); });
    return recipe;
  }

 private:
  ProductFormats product(const toml::table& table) const {
    ProductFormats out;
    for (const auto& [key, node] : table) {
      const std::string_view name = key.str();
      if (name == "name") {
        out.name = text(node, key);
      } else if (name == "fwd" || name == "bwd") {
        (name == "fwd" ? out.fwd : out.bwd) = format(node, key);
      } else {
        unknown(key, "name, fwd and bwd");
      }
    }
    if (out.name.empty()) {
      throw Error(ErrorKind::InvalidArgument, place(table.source()) + "a product has no name", "",
                  "name = \"head\": a module's path, a parameter or a value; * and ? stand for characters");
    }
    return out;
  }

  std::string place(const toml::source_region& at) const { return c10::str(file_, ":", at.begin.line, ": "); }
  [[noreturn]] void fail(const toml::node& node, const toml::key& key, const std::string& what) const {
    throw Error(ErrorKind::InvalidArgument, place(node.source()) + std::string(key.str()) + " " + what, "",
                "NAME = value lines; texts stand in quotes");
  }
  [[noreturn]] void unknown(const toml::key& key, const std::string& known) const {
    throw Error(ErrorKind::UnknownName, place(key.source()) + "'" + std::string(key.str()) + "' is no key of a recipe",
                "", known);
  }
  std::string text(const toml::node& node, const toml::key& key) const {
    const auto value = node.value_exact<std::string>();
    if (!value || value->empty()) fail(node, key, "is no text");
    return *value;
  }
  std::string format(const toml::node& node, const toml::key& key) const {
    const std::string name = text(node, key);
    return prefixed(place(node.source()), [&] { return format_or_none(name); });
  }

  const std::string& file_;
};

// Multiplies the gradient of an input or parameter. Uses by nodes of codes, which have no gradient, stay.
bool scale_gradient_of(Graph& graph, Node* node, double factor) {
  Value* value = node->result();
  if (!value->has_uses()) return false;
  Node* before = node->next();
  while (before->kind() == NodeKind::Placeholder || before->kind() == NodeKind::GetAttr) before = before->next();
  Node* made = insert_call(graph, before, "plumb::scale_bwd", {value, factor}, node, value);
  graph.replace_all_uses_with(value, made->result(), made);
  for (Node* user : made->result()->users()) {
    if (!user->is_op("plumb::encode") && !user->is_op("plumb::encode_weight")) continue;
    for (size_t i = 0; i < user->num_inputs(); ++i) {
      if (user->input(i) == made->result()) user->set_input(i, value);
    }
  }
  return true;
}

std::vector<const Node*> products_of(const GraphModule& module) {
  std::vector<const Node*> products;
  for (const Node* node : module.graph().nodes()) {
    if (is_product(node)) products.push_back(node);
  }
  return products;
}

bool fits_any(const std::vector<const Node*>& products, const std::string& pattern) {
  return std::ranges::any_of(products, [&](const Node* node) { return excluded_by(node, {pattern}) != nullptr; });
}

}  // namespace

void FormatRecipe::check() const {
  format_or_none(fwd), format_or_none(bwd);
  for (const ProductFormats& p : products)
    format_or_none(p.fwd.value_or("none")), format_or_none(p.bwd.value_or("none"));
  if (!scales.empty()) parse_fp8_recipe(scales);
  int exponent = 0;
  if (!(loss_scale > 0) || !std::isfinite(loss_scale) || std::frexp(loss_scale, &exponent) != 0.5) {
    throw Error(ErrorKind::InvalidArgument, c10::str("the loss scale ", loss_scale, " is no power of two"), "",
                "loss-scale = 4096.0, for example");
  }
  // Beyond, float32 gradients become infinite or zero, and all of them the same number once they are rounded.
  if (std::abs(exponent - 1) > kMostLossScale) {
    throw Error(ErrorKind::InvalidArgument,
                c10::str("the loss scale ", loss_scale, " is beyond float32's range, which gradients have at most"), "",
                "a power of two from 2^-126 to 2^126; loss-scale = 4096.0, for example");
  }
}

std::string FormatRecipe::to_toml() const {
  std::string out = "fwd = " + toml_string(fwd) + "\nbwd = " + toml_string(bwd) + "\n";
  if (!scales.empty()) out += "scales = " + toml_string(scales) + "\n";
  if (unit_scaled) out += "unit-scaled = true  # the model is unit_scale()'s: plumb opt --pass=unit_scale\n";
  if (loss_scale != 1) {
    std::ostringstream number;
    number << toml::value<double>(loss_scale);
    out += "loss-scale = " + number.str() + "\n";
  }
  for (const ProductFormats& p : products) {
    out += "\n[[product]]\nname = " + toml_string(p.name) + "\n";
    if (p.fwd) out += "fwd = " + toml_string(*p.fwd) + "\n";
    if (p.bwd) out += "bwd = " + toml_string(*p.bwd) + "\n";
  }
  return out;
}

FormatRecipe parse_recipe(const std::string& text, const std::string& file) {
  return RecipeReader(file).read(parse_toml(text, file, "a recipe as plumb verdict writes it"));
}

FormatRecipe read_recipe(const std::string& name) {
  if (name.ends_with(".toml")) return parse_recipe(read_file(name), name);
  FormatRecipe recipe;
  std::string rest = name;
  if (rest.starts_with("unit-")) recipe.unit_scaled = true, rest = rest.substr(5);
  const size_t slash = rest.find('/');
  const size_t dash = slash == std::string::npos ? rest.find('-') : std::string::npos;
  const std::string base = rest.substr(0, dash), rounding = dash == std::string::npos ? "" : rest.substr(dash);
  const bool scales = base == "tensorwise" || base == "rowwise" || base == "blocks128";
  if (scales) recipe.scales = base;
  if (slash != std::string::npos) {
    recipe.fwd = rest.substr(0, slash), recipe.bwd = rest.substr(slash + 1);
  } else if (base == "fp8" || scales) {
    recipe.fwd = "e4m3fn" + rounding;
    recipe.bwd = (base == "rowwise" || base == "blocks128" ? "e4m3fn" : "e5m2") + rounding;  // as torchao has them
  } else if (base == "mxfp8") {
    recipe.fwd = "mxfp8e4m3" + rounding, recipe.bwd = "mxfp8e5m2" + rounding;
  } else {
    recipe.fwd = recipe.bwd = rest;
  }
  try {
    recipe.fwd = format_or_none(recipe.fwd), recipe.bwd = format_or_none(recipe.bwd);
  } catch (const Error& e) {
    throw Error(ErrorKind::UnknownName, "'" + name + "' is no recipe of number formats: " + e.message(), "",
                kRecipeNames);
  }
  return recipe;
}

std::pair<std::string, std::string> formats_of(const Node* product, const std::string& fwd, const std::string& bwd,
                                               const std::vector<ProductFormats>& products) {
  std::pair<std::string, std::string> found(fwd, bwd);
  bool has_fwd = false, has_bwd = false;
  for (const ProductFormats& p : products) {
    if (!excluded_by(product, {p.name})) continue;
    if (p.fwd && !std::exchange(has_fwd, true)) found.first = *p.fwd;
    if (p.bwd && !std::exchange(has_bwd, true)) found.second = *p.bwd;
  }
  return found;
}

bool is_product(const Node* node) {
  if (!node->is_call() || node->num_results() == 0) return false;
  const OperatorFacts& facts = node->facts();
  return facts.contraction || facts.recurrent != RecurrentLayer::None;
}

bool rounds_values(const Node* node) {
  return node->is_op("plumb::simulate_format") || (node->is_call() && node->op_name().starts_with("plumb::fp8_"));
}

std::vector<std::string> unrounded_products(const Report& report) {
  std::map<std::pair<std::string, std::string>, std::vector<const ReportEntry*>> alike;  // by operator and reason
  for (const ReportEntry* entry : report.of_kind(ReportKind::LeftAlone)) {
    constexpr std::string_view kNoProduct[] = {kNotAskedFor, kNoFormats, kIsTable, kNoSum, kNoFloat};
    if (std::ranges::find(kNoProduct, entry->reason) == std::end(kNoProduct))
      alike[{entry->from, entry->reason}].push_back(entry);
  }
  std::vector<std::string> texts;
  for (const auto& [what, entries] : alike) {
    const ReportEntry& first = *entries.front();
    const std::string more = entries.size() > 1 ? c10::str(" and ", entries.size() - 1, " more") : "";
    texts.push_back(c10::str("%", first.node, first.module.empty() ? "" : " in " + first.module, more, " (", what.first,
                             "): ", what.second));
  }
  return texts;
}

void report_unmatched(const GraphModule& module, const std::vector<std::string>& exclude, Report& report) {
  const std::vector<const Node*> products = products_of(module);
  for (const std::string& pattern : exclude) {
    if (fits_any(products, pattern)) continue;
    ReportEntry entry;
    entry.node = pattern;
    entry.reason = "asked to be left alone, and no matrix product has this name";
    report.add(std::move(entry));
  }
}

std::vector<std::string> product_names(const GraphModule& module) {
  const std::vector<const Node*> products = products_of(module);
  const auto fits_one = [&](const std::string& name) {
    return !name.empty() &&
           std::ranges::count_if(products, [&](const Node* node) { return excluded_by(node, {name}) != nullptr; }) == 1;
  };
  std::vector<std::string> names;
  std::map<std::string, size_t> count;  // by module
  for (const Node* node : products) {
    std::vector<std::string> candidates{node->meta().module_path()};
    for (const Value* value : node->inputs()) {
      if (const Node* attr = source_attribute(value)) candidates.push_back(attr->target());
    }
    candidates.push_back(c10::str(node->meta().module_path(), "#", ++count[node->meta().module_path()]));
    const auto found = std::ranges::find_if(candidates, fits_one);
    names.push_back(found == candidates.end() ? candidates.back() : *found);
  }
  return names;
}

bool scale_gradients(GraphModule& module, double scale) {
  FormatRecipe{.loss_scale = scale}.check();
  if (scale == 1) return false;
  Graph& graph = module.graph();
  bool changed = false;
  for (Node* node : graph.attributes()) {
    const Attr* attr = module.state().find(node->target());
    if (attr == nullptr || attr->kind != AttrKind::Parameter || !attr->tensor.is_floating_point()) continue;
    changed |= scale_gradient_of(graph, node, 1 / scale);
  }
  for (Node* node : graph.placeholders()) {
    if (node->result()->is_tensor() && may_be_float(node->result(), module.state()))
      changed |= scale_gradient_of(graph, node, 1 / scale);
  }
  Node* output = graph.output_node();
  std::map<Value*, Value*> made;
  for (size_t i = 0; i < output->num_inputs(); ++i) {
    Value* value = output->input(i);
    if (!value->is_tensor() || !may_be_float(value, module.state())) continue;
    Value*& scaled = made[value];
    if (scaled == nullptr) {
      scaled = insert_call(graph, output, "plumb::scale_bwd", {value, scale}, value->producer(), value)->result();
    }
    output->set_input(i, scaled);
    changed = true;
  }
  return changed;
}

FormatRecipe fit_recipe(const GraphModule& module, FormatRecipe recipe) {
  recipe.check();
  std::map<std::string, std::string> numbered;
  std::map<std::string, size_t> count;
  const std::vector<const Node*> products = products_of(module);
  for (const Node* node : products) {
    const std::string path = node->meta().module_path();
    numbered[c10::str(path, "#", ++count[path])] = node->result()->name();
  }
  for (ProductFormats& p : recipe.products) {
    if (const auto value = numbered.find(p.name); value != numbered.end()) p.name = "%" + value->second;
  }
  const auto is_scaled = [](const Node* node) { return node->target().starts_with("plumb::"); };
  if (recipe.unit_scaled && products.empty()) {
    throw Error(ErrorKind::InvalidState, "the recipe is for unit-scaled products, and the model has no matrix product",
                "", "a model with matrix products");
  }
  if (recipe.unit_scaled && std::ranges::none_of(products, is_scaled)) {
    throw Error(ErrorKind::InvalidState, "the recipe is for a unit-scaled model, and this one is not", "",
                "unit_scale it first: plumb opt --pass=unit_scale, or another recipe");
  }
  for (const ProductFormats& p : recipe.products) {
    if (!fits_any(products, p.name)) {
      throw Error(ErrorKind::UnknownName, "the recipe names the product '" + p.name + "', and the model has none", "",
                  join(product_names(module)));
    }
  }
  return recipe;
}

bool apply_recipe(GraphModule& module, const FormatRecipe& given, Report* report) {
  const FormatRecipe recipe = fit_recipe(module, given);
  bool changed = false;
  if (!recipe.scales.empty()) {
    UseFp8Options options;
    options.fwd = recipe.fwd, options.bwd = recipe.bwd, options.recipe = recipe.scales;
    options.products = recipe.products;
    changed = use_fp8(module, options, report);
  } else {
    SimulateFormatOptions options;
    options.fwd = recipe.fwd, options.bwd = recipe.bwd, options.products = recipe.products;
    changed = simulate_format(module, options, report);
  }
  return scale_gradients(module, recipe.loss_scale) || changed;
}

}  // namespace plumb
