#include "plumb/transforms/formats/use_fp8.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <variant>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/fp8.h"
#include "plumb/scaling/fp8_recipes.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

// The arguments of a product that has an FP8 kernel.
struct Form {
  std::string_view target, left, right, bias;
  bool linear;       // right is (out, in)
  bool unit_scaled;  // it has factors of its own
};
constexpr std::array kForms = {
    Form{"aten::linear", "input", "weight", "bias", true, false},
    Form{"aten::addmm", "mat1", "mat2", "self", false, false},
    Form{"aten::mm", "self", "mat2", "", false, false},
    Form{"aten::bmm", "self", "mat2", "", false, false},
    Form{"aten::matmul", "self", "other", "", false, false},
    Form{"aten::linalg_matmul", "self", "other", "", false, false},
    Form{"plumb::linear", "input", "weight", "bias", true, true},
    Form{"plumb::linear_readout", "input", "weight", "bias", true, true},
    Form{"plumb::matmul", "left", "right", "", false, true},
};

// Returns the matrix that this value is the transposed one of, or null.
Value* transposed_of(const Value* value) {
  const Node* node = value->producer();
  if (node->is_op("aten::t")) return node->input(0);
  if (!node->is_op("aten::transpose.int") || !value->meta() || value->meta()->sizes.size() != 2) return nullptr;
  return node->arg("dim0") == node->arg("dim1") ? nullptr : node->input(0);
}

std::optional<size_t> dimensions(const Value* value) {
  return value->meta() ? std::optional(value->meta()->sizes.size()) : std::nullopt;
}

// "65 of its dimensions ...": sizes that no multiple of 16 is, or nothing.
std::string filled_up(const Node* product, const Form& form) {
  const auto& left = product->arg(form.left).value()->meta();
  const auto& right = product->arg(form.right).value()->meta();
  if (!left || !right || left->sizes.empty() || right->sizes.size() < 2) return "";
  const int64_t in = left->sizes.back(), out = right->sizes[right->sizes.size() - (form.linear ? 2 : 1)];
  TensorMeta all_but_last = *left;
  all_but_last.sizes.pop_back();
  const int64_t rows = all_but_last.numel();
  std::string text;
  for (const auto& [name, size] : {std::pair("rows", rows), std::pair("in", in), std::pair("out", out)}) {
    if (size % 16 != 0) text += (text.empty() ? "" : ", ") + std::string(name) + " " + std::to_string(size);
  }
  return text.empty() ? "" : "; FP8 units get zeros up to a multiple of 16 of: " + text;
}

// Why what a product adds is no bias: a kernel takes a number for each output, torch's operators also fewer.
std::optional<std::string> obstacle_of_bias(const Node* node, const Arg& bias) {
  const auto sizes = bias.is_value() ? bias.value()->meta() : std::nullopt;
  const auto& result = node->result()->meta();
  if (!sizes || !result || result->sizes.empty()) return std::nullopt;
  if (sizes->sizes.size() == 1 && sizes->sizes[0] == result->sizes.back()) return std::nullopt;
  return "what it adds is no number for each output";
}

// Why an addmm is no linear layer.
std::optional<std::string> obstacle_of_addmm(const Node* node) {
  const auto dims = dimensions(node->arg("self").value());
  if (!dims || *dims != 1) return "what it adds is no vector";
  for (const char* name : {"alpha", "beta"}) {
    const Arg& factor = node->arg(name);
    if (!factor.is_constant() || !factor.constant().isScalar() || !factor.constant().toScalar().equal(1))
      return "its factor " + std::string(name) + " is not one";
  }
  return std::nullopt;
}

class Fp8Lowering {
 public:
  Fp8Lowering(GraphModule& module, const UseFp8Options& options) : graph_(module.graph()), options_(options) {}

  // The outcome for each product by the name of its result: the operator and the report's text, or the reason to stay.
  using Done = std::map<std::string, std::variant<std::pair<std::string, std::string>, std::string>>;

  Done run() {
    Done done;
    std::vector<Node*> products;
    for (Node* node : graph_.nodes()) {
      if (node->facts().contraction && node->num_results() > 0) products.push_back(node);
    }
    for (Node* node : products) {
      const std::string name = node->result()->name();
      const Form* form = nullptr;
      for (const Form& known : kForms) {
        if (node->target() == known.target) form = &known;
      }
      auto why = form ? use_formats_of(node) : no_kernel(node);
      if (!why) why = obstacle(node, *form);
      if (why) {
        done.emplace(name, *why);
        continue;
      }
      const std::string sizes = filled_up(node, *form);
      done.emplace(name, std::pair(lower(node, *form), sizes));
    }
    for (Node* rounding : roundings_) {
      sum_as_simulated(rounding, takers_.at(rounding));
      if (!rounding->result()->has_uses()) graph_.erase(rounding);
    }
    for (Node* view : views_) {
      if (!view->result()->has_uses()) graph_.erase(view);
    }
    return done;
  }

 private:
  // Returns why no unit multiplies them.
  std::optional<std::string> use_formats_of(const Node* product) {
    const auto [fwd, bwd] = formats_of(product, options_.fwd, options_.bwd, options_.products);
    try {
      fwd_ = fp8_format(fwd).to_string(), bwd_ = fp8_format(bwd).to_string();
    } catch (const Error&) {
      return "no unit multiplies " + fwd + " forward and " + bwd + " backward";
    }
    return std::nullopt;
  }

  static std::optional<std::string> no_kernel(const Node* node) {
    switch (node->facts().contraction.kind) {
      case ContractionKind::Convolution:
      case ContractionKind::TransposedConvolution: return "no FP8 kernel for convolutions";
      case ContractionKind::Attention: return "no FP8 kernel for attention";
      default: return "no FP8 kernel for this operator";
    }
  }

  Node* rounding_of(const Arg& operand) const {
    if (!operand.is_value()) return nullptr;
    Node* node = operand.value()->producer();
    return node->is_op("plumb::simulate_format") && node->arg("fwd") == Arg(fwd_) && node->arg("bwd") == Arg("none")
               ? node
               : nullptr;
  }

  // Returns the node that rounds the gradient of the product's result.
  Node* rounding_of_gradient(const Node* product) const {
    const Value* result = product->result();
    if (result->uses().size() != 1) return nullptr;
    Node* user = result->uses()[0].user;
    return user->is_op("plumb::simulate_format") && user->arg("fwd") == Arg("none") && user->arg("bwd") == Arg(bwd_)
               ? user
               : nullptr;
  }

  std::optional<std::string> obstacle(const Node* node, const Form& form) const {
    for (const auto& name : {form.left, form.right}) {
      if (!rounding_of(node->arg(name))) return "its operand '" + std::string(name) + "' is not rounded by itself";
      const auto dims = dimensions(node->arg(name).value());
      if (dims && *dims < 2 && !(form.linear && name == form.left)) return "no FP8 kernel for vectors";
    }
    if (node->result()->has_uses() && !rounding_of_gradient(node)) {
      return "the gradient is used or measured before it is rounded: track scales after use_fp8";
    }
    const auto why = form.target == "aten::addmm" ? obstacle_of_addmm(node) : std::nullopt;
    return why || form.bias.empty() ? why : obstacle_of_bias(node, node->arg(form.bias));
  }

  // Returns the codes of `value`, made where it is rounded: once for all products that take them.
  Value* codes(Node* rounding, Value* value) {
    auto [it, fresh] = codes_.try_emplace({rounding, value}, nullptr);
    if (!fresh) return it->second;
    auto here = graph_.inserting_before(rounding);
    const bool is_state = value->producer()->kind() == NodeKind::GetAttr;
    Node* node = is_state ? graph_.call("plumb::encode_weight", {value, fwd_})
                          : graph_.call("plumb::encode", {value, fwd_, rounding->arg("seed")});
    node->meta() = rounding->meta();
    if (auto meta = value->meta()) {
      meta->dtype = at::kByte;
      meta->requires_grad = false;
      node->result()->set_meta(std::move(meta));
    }
    node->result()->rename(graph_.unique_name(value->name() + "_codes"));
    return it->second = node->result();
  }

  // The gradients of several products are summed where the value would be rounded, before those of its other users.
  void sum_as_simulated(Node* rounding, const std::vector<Node*>& products) {
    Value* value = rounding->input(0);
    const auto has_others = [&] {
      return std::ranges::any_of(value->uses(), [&](const Use& use) {
        return use.user != rounding && !use.user->is_op("plumb::encode") && !use.user->is_op("plumb::encode_weight") &&
               std::ranges::find(products, use.user) == products.end();
      });
    };
    Value* taken = rounding->result();
    if (!taken->has_uses()) {
      if (products.size() < 2 || !has_others()) return;
      taken = insert_call(graph_, rounding, "aten::alias", {value}, rounding, value)->result();
    }
    for (Node* product : products) {
      for (size_t i = 0; i < 2; ++i) {
        if (product->arg(i).value() == value) product->set_arg(i, taken);
      }
    }
  }

  std::string lower(Node* node, const Form& form) {
    Node* left = rounding_of(node->arg(form.left));
    Node* right = rounding_of(node->arg(form.right));
    Value* right_value = right->input(0);
    const bool matrix = !form.linear && !form.unit_scaled && form.target != "aten::bmm";
    Value* weight = matrix ? transposed_of(right_value) : nullptr;
    const bool linear = form.linear || weight;
    if (weight) views_.insert(right_value->producer());
    if (!weight) weight = right_value;
    const FPFormat back_format = FPFormat::parse(bwd_);
    // Random numbers are drawn once: a product's backward may run in halves, and rounds again what is rounded already.
    const bool drawn = back_format.rounding == Rounding::Stochastic;
    Value* left_codes = codes(left, left->input(0));
    Value* right_codes = codes(right, weight);
    Node* back = rounding_of_gradient(node);
    auto here = graph_.inserting_before(node);
    const std::string target = linear ? "plumb::fp8_linear" : "plumb::fp8_matmul";
    Node* made = graph_.call(
        target, {left->input(0), weight, form.bias.empty() ? Arg() : node->arg(form.bias), left_codes, right_codes,
                 fwd_, drawn ? back_format.with_rounding(Rounding::Nearest).to_string() : bwd_});
    for (Node* rounding : {left, right}) {
      auto& takers = takers_[rounding];
      if (takers.empty()) roundings_.push_back(rounding);
      if (takers.empty() || takers.back() != made) takers.push_back(made);
    }
    made->set_arg("kernel", options_.kernel);
    for (const char* name : {"constraint", "scale_power", "scales"}) {
      if (form.unit_scaled && node->try_arg(name)) made->set_arg(name, *node->try_arg(name));
    }
    if (!form.unit_scaled) made->set_arg("scales", c10::IValue(std::vector<double>{1, 1, 1}));
    made->meta() = node->meta();
    Value* result = made->result();
    result->set_meta(node->result()->meta());
    const std::string name = node->result()->name();
    if (drawn) back = nullptr;
    graph_.replace_all_uses_with(back ? back->result() : node->result(), result);
    if (back) graph_.erase(back);
    graph_.erase(node);
    result->rename(name);
    return target;
  }

  Graph& graph_;
  const UseFp8Options& options_;
  std::string fwd_, bwd_;  // formats of the product that is being rewritten
  std::map<std::pair<const Node*, const Value*>, Value*> codes_;
  std::vector<Node*> roundings_;  // that products took, perhaps the last ones to
  std::map<Node*, std::vector<Node*>> takers_;
  std::set<Node*> views_;  // likewise
};

// The state of delayed scaling for this weight, made now if it is not there yet; products of one weight share it.
Value* delayed_state_of(GraphModule& module, const Node* weight, int64_t history) {
  const std::string name = weight->target() + "_fp8_state";
  if (!module.state().contains(name)) {
    module.state().add(
        {name, AttrKind::Buffer, delayed_state(history, module.state().get(weight->target()).tensor.device())});
    module.sync_module();
  }
  Node* beside = nullptr;
  for (Node* node : module.graph().attributes()) {
    if (node->target() == name) return node->result();
    if (node == weight) beside = node;
  }
  auto here = module.graph().inserting_before(beside);
  Node* node = module.graph().get_attr(name, TensorMeta::of(module.state().get(name).tensor));
  node->result()->rename(module.graph().unique_name("fp8_state"));
  return node->result();
}

// Linear layers with scale factors.
bool use_recipe(GraphModule& module, const UseFp8Options& options, Report& report) {
  Graph& graph = module.graph();
  const bool delayed = parse_fp8_recipe(options.recipe) == Fp8Recipe::Delayed;
  bool changed = false;
  check_operators(options.operators);
  report_unmatched(module, options.exclude, report);
  for (Node* node : graph.nodes()) {
    if (!node->facts().contraction || node->num_results() == 0) continue;
    const bool linear = node->target() == "aten::linear", add = node->target() == "aten::addmm";
    const Value* right = add || node->target() == "aten::mm" ? node->arg("mat2").value() : nullptr;
    Value* weight = linear ? node->arg("weight").value() : right ? transposed_of(right) : nullptr;
    std::string why;
    if (!weight) why = "recipes are for linear layers";
    if (add && why.empty()) why = obstacle_of_addmm(node).value_or("");
    const Arg bias = linear ? node->arg("bias") : add ? node->arg("self") : Arg();
    if (why.empty()) why = obstacle_of_bias(node, bias).value_or("");
    if (const std::string* pattern = excluded_by(node, options.exclude); pattern && why.empty())
      why = "excluded by '" + *pattern + "'";
    const Node* parameter = weight ? source_attribute(weight) : nullptr;
    if (delayed && why.empty() && !parameter) why = "its weight is computed: nothing keeps a state for it";
    if (!is_asked_for(node, options.operators)) why = kNotAskedFor;
    const auto [fwd, bwd] = formats_of(node, options.fwd, options.bwd, options.products);
    if (fwd == "none" && bwd == "none" && why.empty()) why = kNoFormats;
    if (!why.empty()) {
      report.add(ReportKind::LeftAlone, node, node->target(), "", why);
      continue;
    }
    const Arg input = node->arg(linear ? "input" : add ? "mat1" : "self");
    auto here = graph.inserting_before(node);
    Value* state = delayed ? delayed_state_of(module, parameter, options.history) : nullptr;
    Node* made =
        delayed ? graph.call("plumb::fp8_delayed_linear", {input, weight, bias, state, fwd, bwd, module.is_training()})
                : graph.call("plumb::fp8_scaled_linear", {input, weight, bias, options.recipe, fwd, bwd});
    report.add(ReportKind::Replaced, node, node->target(), made->target(), options.recipe + " scales");
    graph.replace_node(node, made);
    changed = true;
  }
  return changed;
}

const std::vector<PassOption> kUseFp8Options = {
    {"fwd", "e4m3fn", "format of inputs: e4m3fn or e5m2, with -RN, -SR, -SRn or -RZ"},
    {"bwd", "e5m2", "format of gradients"},
    {"kernel", "auto", "who multiplies: scaled_mm (torch's), decoded (the values), auto (FP8 units where there are)"},
    {"recipe", "",
     "scale factors: tensorwise, rowwise, blocks128, mxfp8, mxfp8-up or delayed; none without it; or a recipe file of "
     "plumb verdict (NAME.toml) instead of fwd and bwd"},
    {"history", "1024", "the delayed recipe's: the largest values of so many casts count"},
    {"operators", "", "only these, comma separated"},
    {"exclude", "", "patterns of modules, parameters or values to leave alone, comma separated"}};

bool use_fp8_from_table(GraphModule& module, const PassOptions& given, Report& report) {
  UseFp8Options options;
  for (const auto& [name, value] : given) {
    if (name == "fwd") options.fwd = value;
    if (name == "bwd") options.bwd = value;
    if (name == "kernel") options.kernel = value;
    if (name == "recipe") options.recipe = value;
    if (name == "operators") options.operators = split_names(value);
    if (name == "exclude") options.exclude = split_names(value);
  }
  options.history = number_option(given, "history", options.history);
  if (!options.recipe.ends_with(".toml")) return use_fp8(module, options, &report);
  for (const auto& [name, value] : given) {
    if (name != "recipe" && name != "kernel") refuse_beside_recipe("use_fp8");
  }
  return use_fp8(module, read_recipe(options.recipe), options, &report);
}

const RegisterTransform use_fp8_pass{
    "use_fp8", "Multiplies in FP8: the inputs of products and the gradients of their outputs become FP8's codes.",
    kUseFp8Options, use_fp8_from_table};

}  // namespace

void check(const UseFp8Options& options) {
  parse_fp8_kernel(options.kernel);
  const bool scales = !options.recipe.empty() && options.recipe != "delayed";
  const auto check_format = [&](const std::string& text) {
    if (!scales || text != "none") fp8_format(text);
  };
  check_format(options.fwd), check_format(options.bwd);
  for (const ProductFormats& p : options.products) {
    if (scales || options.recipe == "delayed")
      check_format(p.fwd.value_or(options.fwd)), check_format(p.bwd.value_or(options.bwd));
  }
  if (!options.recipe.empty()) parse_fp8_recipe(options.recipe);
  if (options.history < 1 || options.history > 1 << 20)
    throw Error(ErrorKind::InvalidArgument, "a history of " + std::to_string(options.history) + " casts", "",
                "give one from 1 to 1048576");
}

namespace {

// Simulates, then lowers what units multiply.
bool simulate_and_lower(GraphModule& module, const UseFp8Options& options, Report* report) {
  // Refused here, not in the first step.
  for (const Attr& attr : module.state())
    uses_scaled_mm(parse_fp8_kernel(options.kernel), attr.tensor.device(), at::kFloat);
  Report simulated("simulate_format");
  SimulateFormatOptions simulate;
  simulate.fwd = options.fwd, simulate.bwd = options.bwd, simulate.products = options.products;
  simulate.operators = options.operators, simulate.exclude = options.exclude;
  if (!simulate_format(module, simulate, &simulated)) {
    if (report) {
      for (const ReportEntry& entry : simulated.entries()) report->add(entry);
    }
    return false;
  }
  const auto done = Fp8Lowering(module, options).run();
  if (!report) return true;
  for (ReportEntry entry : simulated.entries()) {
    const auto it = entry.kind == ReportKind::Quantised ? done.find(entry.node) : done.end();
    if (it == done.end()) {
      report->add(entry);
    } else if (const auto* lowered = std::get_if<0>(&it->second)) {
      entry.kind = ReportKind::Replaced;
      entry.reason = entry.to + lowered->second;
      entry.to = lowered->first;
      report->add(entry);
    } else {
      entry.reason = "stays simulated: " + std::get<1>(it->second);
      report->add(entry);
    }
  }
  return true;
}

}  // namespace

bool use_fp8(GraphModule& module, const UseFp8Options& given, Report* report) {
  check(given);
  if (!given.recipe.empty()) {
    Report own("use_fp8");
    return use_recipe(module, given, report ? *report : own);
  }
  UseFp8Options options = given;
  options.fwd = fp8_format(given.fwd).to_string(), options.bwd = fp8_format(given.bwd).to_string();
  return simulate_and_lower(module, options, report);
}

bool use_fp8(GraphModule& module, const FormatRecipe& asked, const UseFp8Options& given, Report* report) {
  const FormatRecipe recipe = fit_recipe(module, asked);
  parse_fp8_kernel(given.kernel);
  UseFp8Options options = given;
  options.fwd = recipe.fwd, options.bwd = recipe.bwd, options.products = recipe.products;
  options.recipe = recipe.scales;
  const bool changed =
      recipe.scales.empty() ? simulate_and_lower(module, options, report) : use_fp8(module, options, report);
  return scale_gradients(module, recipe.loss_scale) || changed;
}

namespace {

// Returns the value whose codes a product takes.
Value* value_of_codes(const Arg& taken) {
  Node* node = taken.value()->producer();
  const bool passes =
      node->is_op("aten::alias") || (node->is_op("plumb::simulate_format") && node->arg("bwd") == Arg("none"));
  return passes ? node->input(0) : taken.value();
}

void erase_unused(Graph& graph, Value* value) {
  if (value && !value->has_uses() && value->producer()->is_call()) graph.erase(value->producer());
}

}  // namespace

bool drop_fp8(GraphModule& module) {
  Graph& graph = module.graph();
  std::vector<Node*> products;  // found first, as a product's user is erased with it
  for (Node* node : graph.nodes()) {
    if (node->is_op("plumb::fp8_linear") || node->is_op("plumb::fp8_matmul")) products.push_back(node);
  }
  for (Node* node : products) {
    const bool linear = node->is_op("plumb::fp8_linear");
    auto here = graph.inserting_before(node);
    const Arg left = value_of_codes(node->arg(0)), right = value_of_codes(node->arg(1)), bias = node->arg(2);
    const bool plain = node->arg("scales") == Arg(c10::IValue(std::vector<double>{1, 1, 1}));
    Node* made = nullptr;
    if (linear) {
      made = graph.call(plain ? "aten::linear" : "plumb::linear", {left, right, bias});
    } else if (!bias.is_none()) {
      made = graph.call("aten::addmm", {bias, left, right});
    } else {
      made = graph.call(plain ? "aten::matmul" : "plumb::matmul", {left, right});
    }
    for (const char* name : {"constraint", "scale_power", "scales"}) {
      if (!plain && made->try_arg(name)) made->set_arg(name, node->arg(name));
    }
    std::set<Value*> taken = {node->arg(3).value(), node->arg(4).value()};
    if (!(node->arg(0) == left)) taken.insert(node->arg(0).value());
    if (!(node->arg(1) == right)) taken.insert(node->arg(1).value());
    graph.replace_node(node, made);
    for (Value* value : taken) erase_unused(graph, value);
    Value* result = made->result();
    if (Node* user = result->uses().size() == 1 ? result->uses()[0].user : nullptr;
        user && user->is_op("plumb::simulate_format") && user->arg("fwd") == Arg("none")) {
      graph.replace_all_uses_with(user->result(), result);
      graph.erase(user);
    }
  }
  return !products.empty();
}

std::shared_ptr<TransformedModule> use_fp8(const std::shared_ptr<GraphModule>& module, const UseFp8Options& options) {
  return transformed(derive(not_null(module)), "use_fp8",
                     [&](GraphModule& made, Report& report) { return use_fp8(made, options, &report); });
}

}  // namespace plumb
