#include "plumb/transforms/formats/simulate_format.h"

#include <algorithm>
#include <map>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/text.h"
#include "plumb/graph/aliases.h"
#include "plumb/graph/passes/functionalise.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/formats/contracted_dims.h"
#include "plumb/transforms/formats/recurrent_steps.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/recurrent.h"

namespace plumb {
namespace {

std::string_view bare(std::string_view name) { return name.substr(name.rfind(':') + 1); }

// True for addmm_, baddbmm_ and their like.
bool writes_a_product(const Node* node) {
  const std::string_view name = node->is_call() ? node->op_name() : "";
  return name.ends_with('_') && operator_facts(name.substr(0, name.size() - 1)).contraction;
}

// Why a product inside this operator is out of reach; nothing if it has none.
std::optional<std::string> hidden_product(const Node* node) {
  const std::string_view name = node->op_name();
  if (name == "plumb::python_function") return "a custom autograd function: products in it are not rounded";
  if (node->facts().name.empty() && !name.starts_with("aten::"))
    return "an operator that plumb does not know: products in it are not rounded";
  if (name == "aten::_native_multi_head_attention" || name == "aten::_transformer_encoder_layer_fwd")
    return "a fused inference operator: capture with gradients enabled";
  if (name.starts_with("plumb::fp8_")) return "it multiplies FP8 already";
  if (name.starts_with("aten::cudnn_") || name.starts_with("aten::mkldnn_")) return "an operator of one library only";
  if (name == "aten::chain_matmul" || name == "aten::linalg_multi_dot" || name.ends_with("::linalg_matrix_power") ||
      name == "aten::matrix_power")
    return "it multiplies several matrices in one operator: write one product after the other, a @ b @ c";
  if (name == "aten::conv_tbc") return "a convolution over times first: conv1d of the transposed input is rounded";
  if (writes_a_product(node)) return "it writes in place, and something else sees the memory";
  return std::nullopt;
}

FPFormat resolve(const std::string& text, const SimulateFormatOptions& options) {
  const FPFormat format = FPFormat::parse(text);
  if (!options.rounding && options.srbits == 0) return format;
  // A text without a rounding rounds to nearest, unless random bits say otherwise.
  const bool said = text.find('-') != std::string::npos;
  return format.with_rounding(options.rounding ? *options.rounding
                              : said           ? format.rounding
                                               : Rounding::Stochastic,
                              options.srbits);
}

class Simulator {
 public:
  Simulator(GraphModule& module, const SimulateFormatOptions& options, Report& report)
      : module_(module), graph_(module.graph()), state_(module.state()), options_(options), report_(report) {
    use_formats(options.fwd, options.bwd);  // which checks them
    for (const ProductFormats& p : options.products) use_formats(p.fwd.value_or("none"), p.bwd.value_or("none"));
    check_operators(options.operators);
  }

  bool run() {
    report_unmatched(module_, options_.exclude, report_);
    bool in_place = false;
    for (const Node* node : graph_.nodes()) in_place |= writes_a_product(node);
    if (in_place) functionalise(module_);
    data_ = differentiable_nodes(graph_, state_, [](const Node&) { return false; });  // behind a detach, too
    bool changed = take_recurrent_apart();
    for (Node* node : graph_.nodes()) {
      if (!node->is_call()) continue;
      if (may_write(*node)) last_write_ = node;
      if (auto why = hidden_product(node); why && data_.contains(node)) {
        report_.add(ReportKind::LeftAlone, node, node->target(), "", *why);
        continue;
      }
      const Contraction& contraction = node->facts().contraction;
      if (!contraction) continue;
      if (auto why = obstacle(node)) {
        report_.add(ReportKind::LeftAlone, node, node->target(), "", *why);
        continue;
      }
      const auto dims = contracted_dims(node, state_);
      if (!dims) {
        report_.add(ReportKind::LeftAlone, node, node->target(), "", kNoSum);
        continue;
      }
      use_formats_of(node);
      if (leaves_alone(node)) continue;
      changed |= quantise(node, contraction, *dims);
    }
    return changed;
  }

 private:
  void use_formats(const std::string& fwd, const std::string& bwd) {
    fwd_ = fwd == "none" ? "none" : resolve(fwd, options_).to_string();
    bwd_ = bwd == "none" ? "none" : resolve(bwd, options_).to_string();
    fwd_blocks_ = fwd_ != "none" && FPFormat::parse(fwd_).has_blocks();
    bwd_blocks_ = bwd_ != "none" && FPFormat::parse(bwd_).has_blocks();
  }
  void use_formats_of(const Node* product) {
    const auto apart = taken_apart_.find(product);
    auto asked = apart != taken_apart_.end() ? apart->second
                                             : formats_of(product, options_.fwd, options_.bwd, options_.products);
    if (asked == in_use_) return;  // most products have those of the one before
    use_formats(asked.first, asked.second);
    in_use_ = std::move(asked);
  }

  // Returns whether the formats in use round nothing, which the report says then.
  bool leaves_alone(const Node* node) {
    if (fwd_ != "none" || bwd_ != "none") return false;
    report_.add(ReportKind::LeftAlone, node, node->target(), "", kNoFormats);
    return true;
  }

  bool take_recurrent_apart() {
    bool changed = false;
    for (Node* node : graph_.nodes()) {
      if (!is_recurrent(node)) continue;
      use_formats_of(node);
      if (leaves_alone(node)) continue;
      auto why = obstacle(node);
      if (!why) why = steps_obstacle(node, module_.state());
      if (why) {
        report_.add(ReportKind::LeftAlone, node, node->target(), "", *why);
        continue;
      }
      auto& entry = report_.add(ReportKind::Replaced, node, node->target(), "aten::linear");
      const auto linears = take_apart(module_, node);
      entry.reason = "taken apart into steps: " + std::to_string(linears.size()) + " linear layers";
      for (const Node* linear : linears) taken_apart_.emplace(linear, *in_use_), data_.insert(linear);
      changed = true;
    }
    return changed;
  }

  std::optional<std::string> obstacle(const Node* node) const {
    if (!taken_apart_.contains(node) && !is_asked_for(node, options_.operators)) return kNotAskedFor;
    if (node->target().ends_with(".out")) return "it writes into a given tensor";
    if (const std::string* pattern = excluded_by(node, options_.exclude)) return "excluded by '" + *pattern + "'";
    if (!may_be_float(node->result(), state_)) return kNoFloat;
    if (!data_.contains(node)) return kIsTable;
    return std::nullopt;
  }

  bool roundable(const Value* value) const {
    if (!value->is_tensor() || !may_be_float(value, state_)) return false;
    return !value->producer()->is_op("plumb::simulate_format") || value->producer()->arg("fwd") != Arg(fwd_);
  }

  static bool is_factor_of_parameter(const Node* node) {
    bool factor = false;
    while (node->is_op("plumb::scale_fwd") || node->is_op("plumb::scale_bwd")) {
      node = node->input(0)->producer();
      factor = true;
    }
    return factor && node->kind() == NodeKind::GetAttr;
  }

  // Returns the value rounded forward: one node for all uses, as long as nothing is written in between.
  Value* rounded(Value* value, int64_t dim, Node* user) {
    if (!fwd_blocks_ || sizes_of(value, state_).size() == 1) dim = -1;  // a matmul's right operand may be a vector
    auto [it, fresh] = rounded_.try_emplace({value, dim, fwd_}, Made{nullptr, nullptr});
    if (!fresh && it->second.last_write == last_write_ && it->second.grad_enabled == user->meta().grad_enabled)
      return it->second.value;
    Node* made = nullptr;
    if (const Node* factor = value->producer(); is_factor_of_parameter(factor)) {
      // Unit-scaled weights of recurrent operators: the weight is of unit scale, not what it is multiplied to.
      made = insert_call(graph_, user, factor->target(), {rounded(factor->input(0), dim, user), factor->arg("scale")},
                         factor, value);
    } else {
      made =
          insert_call(graph_, user, "plumb::simulate_format", {value, fwd_, "none", c10::IValue(), dim}, user, value);
    }
    made->result()->rename(graph_.unique_name(value->name() + "_fwd"));
    it->second = {made->result(), last_write_, user->meta().grad_enabled};
    return made->result();
  }

  bool quantise(Node* node, const Contraction& contraction, const ContractedDims& dims) {
    bool changed = false;
    if (fwd_ != "none") {
      const auto operands = contraction.named_operands();
      for (size_t k = 0; k < operands.size(); ++k) {
        const std::string_view name = operands[k].argument;
        const Arg arg = node->arg(name);
        if (arg.is_value() && roundable(arg.value())) {
          node->set_arg(name, rounded(arg.value(), dims.operands[k], node));
          changed = true;
        } else if (arg.is_list()) {
          Arg::List list = arg.list();
          for (size_t i = 0; i < list.size(); ++i) {
            if (list[i].is_value() && roundable(list[i].value()))
              list[i] = rounded(list[i].value(), dims.operands[i], node), changed = true;
          }
          node->set_arg(name, std::move(list));
        }
      }
    }
    if (bwd_ != "none") {
      for (Value* result : node->results()) {
        if (!result->has_uses() || !result->is_tensor() || !may_be_float(result, state_)) continue;
        const std::string name = result->name();
        // A measured value stays measured: the node goes behind its plumb::track.
        for (const Use& use : result->uses()) {
          if (use.user->is_op("plumb::track")) {
            result = use.user->result();
            break;
          }
        }
        if (!result->has_uses()) continue;
        const int64_t dim = bwd_blocks_ ? dims.result : -1;
        Node* back = insert_call(graph_, result->producer()->next(), "plumb::simulate_format",
                                 {result, "none", bwd_, c10::IValue(), dim}, node, result);
        graph_.replace_all_uses_with(result, back->result(), back);
        back->result()->rename(graph_.unique_name(name + "_bwd"));
        changed = true;
      }
    }
    if (changed) report_.add(ReportKind::Quantised, node, node->target(), fwd_ + " forward, " + bwd_ + " backward");
    return changed;
  }

  struct Made {
    Value* value;
    const Node* last_write;
    bool grad_enabled = true;
  };

  GraphModule& module_;
  Graph& graph_;
  const State& state_;
  const SimulateFormatOptions& options_;
  Report& report_;
  std::string fwd_, bwd_;                                      // formats of the product that is being rewritten
  std::optional<std::pair<std::string, std::string>> in_use_;  // the same, as they were asked for
  const Node* last_write_ = nullptr;
  bool fwd_blocks_ = false, bwd_blocks_ = false;
  std::map<std::tuple<const Value*, int64_t, std::string>, Made> rounded_;
  // Linear layers of recurrent operators, with the formats that were asked for the operator.
  std::map<const Node*, std::pair<std::string, std::string>> taken_apart_;
  NodeSet data_;  // what an input or a parameter flows into
};

const std::vector<PassOption> kOptions = {
    {"fwd", "E4M3-SR", "format of inputs: E<e>M<m> or a standard name, with -RN, -SR, -SRn or -RZ; none"},
    {"bwd", "E5M2-SR", "format of gradients"},
    {"rounding", "", "nearest, stochastic or toward_zero, for both"},
    {"srbits", "0", "random bits of stochastic rounding, 0 for all"},
    {"operators", "", "only these, comma separated"},
    {"exclude", "", "patterns of modules, parameters or values to leave alone, comma separated"},
    {"recipe", "", "instead of fwd and bwd: a recipe file (plumb verdict writes them), or a recipe's name"}};

bool run_from_table(GraphModule& module, const PassOptions& given, Report& report) {
  SimulateFormatOptions options;
  for (const auto& [name, value] : given) {
    if (name == "fwd") options.fwd = value;
    if (name == "bwd") options.bwd = value;
    if (name == "rounding") options.rounding = parse_rounding(value);
    if (name == "operators") options.operators = split_names(value);
    if (name == "exclude") options.exclude = split_names(value);
  }
  // No format takes the largest int, which the numbers beyond are, too.
  options.srbits = static_cast<int>(std::min<int64_t>(number_option(given, "srbits", options.srbits), INT32_MAX));
  const auto recipe = given.find("recipe");
  if (recipe != given.end() && given.size() > 1) refuse_beside_recipe("simulate_format");
  return recipe == given.end() ? simulate_format(module, options, &report)
                               : apply_recipe(module, read_recipe(recipe->second), &report);
}

const RegisterTransform simulate_format_pass{
    "simulate_format",
    "Rounds the inputs of matrix products to a number format, and the gradients of their outputs to another.", kOptions,
    run_from_table};

}  // namespace

void refuse_beside_recipe(const std::string& pass) {
  throw Error(ErrorKind::InvalidArgument, pass + ": a recipe says all formats, so no other option goes with it", "",
              "recipe=FILE.toml alone");
}

std::vector<std::string> split_names(const std::string& text) {
  std::vector<std::string> parts = split_commas(text);
  std::erase(parts, "");
  return parts;
}

void check_operators(const std::vector<std::string>& operators) {
  const std::vector<std::string> known = matrix_product_operators();
  for (const std::string& name : operators) {
    if (std::ranges::any_of(known, [&](const std::string& k) { return k == name || bare(k) == name; })) continue;
    throw Error(ErrorKind::UnknownName, "'" + name + "' is no matrix product", "",
                "leave the list of operators empty for all, or take of: " + join(known));
  }
}

bool is_asked_for(const Node* product, const std::vector<std::string>& operators) {
  return operators.empty() ||
         std::ranges::any_of(operators, [&](std::string_view name) { return bare(name) == bare(product->op_name()); });
}

std::vector<std::string> matrix_product_operators() {
  std::vector<std::string> names;
  // The products of recurrent layers are those of the linear layers they are made of.
  for (const OperatorFacts* facts : operator_table()) {
    if (facts->contraction || facts->recurrent != RecurrentLayer::None) names.emplace_back(facts->name);
  }
  return names;
}

bool simulate_format(GraphModule& module, const SimulateFormatOptions& options, Report* report) {
  Report own("simulate_format");
  return Simulator(module, options, report ? *report : own).run();
}

std::shared_ptr<TransformedModule> simulate_format(const std::shared_ptr<GraphModule>& module,
                                                   const SimulateFormatOptions& options) {
  return transformed(derive(not_null(module)), "simulate_format",
                     [&](GraphModule& made, Report& report) { return simulate_format(made, options, &report); });
}

std::shared_ptr<TransformedModule> simulate_format(const std::shared_ptr<GraphModule>& module, const FPFormat& fwd,
                                                   const FPFormat& bwd) {
  SimulateFormatOptions options;
  options.fwd = fwd.to_string();
  options.bwd = bwd.to_string();
  return simulate_format(module, options);
}

std::shared_ptr<TransformedModule> simulate_fp8(const std::shared_ptr<GraphModule>& module,
                                                const SimulateFormatOptions& options) {
  return simulate_format(module, options);
}

}  // namespace plumb
