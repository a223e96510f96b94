#include "plumb/transforms/scale/unit_scale.h"

#include <cmath>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "plumb/core/error.h"
#include "plumb/core/text.h"
#include "plumb/graph/pass.h"
#include "plumb/graph/passes/functionalise.h"
#include "plumb/graph/passes/fuse_patterns.h"
#include "plumb/graph/passes/layouts.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/choices.h"
#include "plumb/transforms/scale/einsum_products.h"
#include "plumb/transforms/scale/equivalents.h"
#include "plumb/transforms/scale/experts.h"
#include "plumb/transforms/scale/inverses.h"
#include "plumb/transforms/scale/normalized.h"
#include "plumb/transforms/scale/recurrent.h"
#include "plumb/transforms/scale/scale_adds.h"
#include "plumb/transforms/vocabulary/split_vocabulary.h"

namespace plumb {
namespace {

// Returns whether a node is the root of a mean of squares or of a variance.
bool is_norm_spelled_out(const Node* node) {
  const auto power = node->is_op("aten::pow") ? number_of(node->args()[1]) : std::nullopt;
  if (!node->is_op("aten::rsqrt") && !node->is_op("aten::sqrt") && !(power && std::abs(*power) == 0.5)) return false;
  for (const Arg* arg = &node->args()[0]; arg->is_value(); arg = &node->args()[0]) {
    node = arg->value()->producer();
    if (!node->is_call()) return false;
    if (node->is_op("aten::mean") || node->is_op("aten::var")) return true;
    if (!is_passthrough(node) && !node->is_op("aten::add") && !node->is_op("aten::clamp") &&
        !node->is_op("aten::clamp_min"))
      return false;
  }
  return false;
}

// True if the result, which may share memory with an input, has its values. Products and dropout of whole channels may
// return an input too, but compute.
bool only_views(const Node* node) {
  const OperatorFacts& facts = node->facts();
  return node->result_aliases_input() && !facts.contraction && facts.draws_if.empty() &&
         !node->is_op("aten::chain_matmul");
}

class UnitScaler {
 public:
  UnitScaler(GraphModule& module, const UnitScaleOptions& options, Report& report, MupTable* mup)
      : module_(module), graph_(module.graph()), options_(options), report_(report), mup_(mup) {}

  bool run() {
    // Nodes that prepare() makes of a kept node stand in its place.
    for (const Node* node : graph_.nodes()) {
      if (!node->is_call() || !node->num_results() || !node->meta().source) continue;
      if (auto it = options_.keep.find(node->result()->name()); it != options_.keep.end())
        kept_sources_.emplace(node->meta().source.get(), it->second);
    }
    check_users_map();
    replace_by_users_map();
    prepare();
    replace_by_users_map();
    report_unmatched();
    differentiable_ = differentiable_nodes(graph_, module_.state());
    choosing_ = nodes_that_only_choose(graph_, module_.state(), differentiable_);
    with_inverse_ = computed_with_inverse(graph_, module_.state());
    computed_ = computed_from_parameters(graph_, module_.state());
    find_obstacles();
    roles_ = plan_parameters(graph_, module_.state(), [this](const Node* node) { return becomes(node); });
    replace_by_equivalents();
    ScaledAdds adds = scale_adds(module_, options_, users_choice_, choosing_, report_);
    changed_ |= adds.changed;
    depth_of_ = std::move(adds.depth_of);
    unconstrain();
    report_chain();
    changed_ |= keep_views_working(graph_);
    if (options_.scale_parameters) changed_ |= scale_parameters(module_, roles_, report_, options_.live);
    tag();
    return changed_;
  }

 private:
  // Brings operators that were spelled out (t + matmul + add_, x * sigmoid(x)), products spelled as einsums and writes
  // in place into the form that the stages look for. The last bits may change: every operator changes anyway.
  void prepare() {
    changed_ |= erase_identities(graph_);
    changed_ |= fuse_patterns(graph_, {.inexact = true});
    changed_ |= functionalise(module_, nullptr, true);
    changed_ |= spell_einsums_as_products(graph_, module_.state(), users_choice_);
    changed_ |= read_past_copies(module_);
  }

  // --- stage 1

  void check_users_map() {
    for (const Replacement& r : options_.replace) {
      if (r.from.find('.') != std::string::npos) find_operator(r.from);
      if (r.to.empty() == !r.build)
        throw Error(ErrorKind::InvalidArgument,
                    "the replacement of " + r.from + " needs either an operator or a function");
      if (!r.to.empty()) find_operator(r.to);
    }
  }

  // Nodes that came about by a replacement, in the graph as it is now: prepare() makes others of them.
  void find_users_choice() {
    kept_.clear();
    users_choice_.clear();
    for (const Node* node : graph_.nodes()) {
      if (!node->is_call() || !node->num_results()) continue;
      const std::string& name = node->result()->name();
      if (auto it = options_.keep.find(name); it != options_.keep.end()) {
        kept_.emplace(node, it->second);
      } else if (auto source = kept_sources_.find(node->meta().source.get()); source != kept_sources_.end()) {
        kept_.emplace(node, source->second);
      }
      auto chosen = chosen_.find(name);
      if (kept_.count(node) || (chosen != chosen_.end() && chosen->second == node->target()))
        users_choice_.insert(node);
    }
  }

  void replace_by_users_map() {
    find_users_choice();
    if (options_.replace.empty()) return;
    for (Node* node : graph_.nodes()) {
      if (users_choice_.contains(node)) continue;
      for (const Replacement& r : options_.replace) {
        if (!node->is_op(r.from)) continue;
        matched_.insert(&r);
        Node* made;
        {
          auto here = graph_.inserting_before(node);
          made = r.to.empty() ? r.build(graph_, *node) : build_same_arguments(graph_, node, r.to);
        }
        if (!made) continue;
        if (&made->graph() != &graph_) {
          throw Error(ErrorKind::InvalidArgument,
                      "the replacement of " + r.from + " has returned a node of another graph", node->meta().where(),
                      "make it with the graph that the function is given");
        }
        report_.add(ReportKind::Replaced, node, node->target(), made->target(), "as asked for").asked = true;
        graph_.replace_node(node, made);
        users_choice_.insert(made);
        if (made->num_results()) chosen_[made->result()->name()] = made->target();
        changed_ = true;
        break;
      }
    }
  }

  void report_unmatched() {
    for (const Replacement& r : options_.replace) {
      if (matched_.count(&r)) continue;
      report_.add({.node = r.from, .reason = "asked to be replaced, and no such operator is in the graph"});
    }
  }

  // --- stage 2

  // Why a node that has an equivalent is left alone; nothing if it is to be replaced.
  std::optional<std::string> obstacle(const Node* node, const Equivalent& equivalent) const {
    if (auto why = equivalent.recurrent ? recurrent_obstacle(node, module_.state())
                   : equivalent.experts ? experts_obstacle(node, module_.state())
                                        : why_not(node, differentiable_))
      return why;
    if (!differentiable_.contains(node)) return "no gradient flows through it";
    if (choosing_.contains(node)) return kOnlyChooses;
    if (with_inverse_.contains(node)) return kWithInverse;
    if (auto normalized = normalized_operand(node)) return normalized->why;
    for (std::string_view argument : equivalent.weights) {
      const Arg* arg = node->try_arg(argument);
      if (!arg || !arg->is_value()) continue;
      if (const Node* attr = source_attribute(arg->value()); attr && is_plain_tensor(attr))
        return "its " + std::string(equivalent.any_weight ? "operand" : argument) + " " + attr->target() +
               " is a plain tensor, whose scale stays: register it as a parameter or a buffer";
      if (auto it = computed_.find(arg->value()->producer()); it != computed_.end() && !equivalent.any_weight)
        return "its " + std::string(argument) + " is computed from " + it->second + ", whose scale is not its own";
    }
    const Value* first = node->num_results() ? node->result() : nullptr;
    if (first && !may_be_float(first, module_.state())) return "it is no floating-point computation";
    return std::nullopt;
  }

  // Asks before anything is replaced: an obstacle may be what follows from a node.
  void find_obstacles() {
    for (const Node* node : graph_.nodes()) {
      const Equivalent* equivalent = find_equivalent(node);
      if (auto why = equivalent ? obstacle(node, *equivalent) : std::nullopt) obstacles_.emplace(node->id(), *why);
    }
  }

  bool is_plain_tensor(const Node* attribute) const {
    const Attr* attr = module_.state().find(attribute->target());
    return attr && attr->kind == AttrKind::Constant;
  }

  const Equivalent* becomes(const Node* node) const {
    if (users_choice_.contains(node)) return find_unit_scaled(node);
    const Equivalent* equivalent = find_equivalent(node);
    return equivalent && !obstacles_.contains(node->id()) ? equivalent : nullptr;
  }

  void replace_by_equivalents() {
    std::unordered_map<const Node*, const Node*> replaced;
    for (Node* node : graph_.nodes()) {
      const Equivalent* equivalent = find_equivalent(node);
      if (!equivalent) {
        report_without_equivalent(node);
        continue;
      }
      if (users_choice_.contains(node)) continue;
      const auto why = obstacles_.find(node->id());
      const auto contested = roles_.left_alone.find(node);
      if (why != obstacles_.end() || contested != roles_.left_alone.end()) {
        report_.add(ReportKind::LeftAlone, node, node->target(), "",
                    why != obstacles_.end() ? why->second : contested->second);
        continue;
      }
      if (equivalent->recurrent || equivalent->experts) {
        put_factors_around(node, equivalent->recurrent);
        continue;
      }
      Node* made;
      {
        auto here = graph_.inserting_before(node);
        made = build_equivalent(graph_, node, *equivalent);
      }
      // At the start every place is looked at alike, which hardly moves with query and key.
      const bool attends = equivalent->scaled_by == ScaledBy::Attention;
      report_.add(ReportKind::Replaced, node, node->target(), made->target(),
                  attends ? "gradients of query and key start small: one factor serves them and those of value" : "");
      replaced.emplace(node, made);
      graph_.replace_node(node, made);
      changed_ = true;
    }
    roles_.moved(replaced);
  }

  void put_factors_around(Node* node, bool recurrent) {
    const auto& input = node->input(0)->meta();
    const bool free = input && !input->symbols.empty();
    surrounded_.emplace_back(node,
                             recurrent ? scale_recurrent(module_, node, steps_of(node)) : scale_experts(module_, node));
    report_.add(ReportKind::Replaced, node, node->target(), node->target(),
                std::string(recurrent ? "with unit-scaled weights, states and outputs"
                                      : "with unit-scaled matrices and outputs, for groups of as many rows each") +
                    (free ? "; its sizes are free, and its factors are those of the example's sizes" : ""));
    changed_ = true;
  }

  void report_without_equivalent(const Node* node) {
    if (!node->is_call() || node->num_results() == 0 || is_add(node) || users_choice_.contains(node)) return;
    std::string_view name = node->op_name();
    const bool custom = name == "plumb::python_function";
    if (!custom && (name.starts_with("plumb::") || is_passthrough(node) || only_views(node))) return;
    if (!differentiable_.contains(node) || !may_have_gradient(node->result(), module_.state())) return;
    report_.add(ReportKind::LeftAlone, node, node->target(), "",
                custom ? "a custom autograd function: it computes what it did" : why_without_equivalent(node));
  }

  std::string why_without_equivalent(const Node* node) const {
    if (is_norm_spelled_out(node))
      return "a norm in a form that has no unit-scaled equivalent (over other than the last dimensions, or with parts "
             "that are used elsewhere)";
    if (looks_like_mask(node->result(), module_.state())) return "it makes a mask, whose values have no scale";
    const std::string_view name = node->op_name();
    if ((name == "aten::mul" || name == "aten::div") && node->num_inputs() == 1) {
      const auto number = number_of(node->args()[1]);
      if (number && *number != 0 && std::abs(*number) != 1) {
        std::ostringstream reason;
        reason << (name == "aten::mul" ? "it multiplies by a number: " : "it divides by a number: ") << *number
               << ", which changes the scale of its result and of all gradients before it";
        return reason.str();
      }
    }
    return "no unit-scaled equivalent";
  }

  // One line where many operators that stayed what they are come after each other with no norm in between.
  void report_chain() {
    constexpr size_t kLong = 64;
    const auto differentiable = differentiable_nodes(graph_, module_.state());
    std::unordered_map<const Node*, size_t> length;
    const Node* last = nullptr;
    for (const Node* node : graph_.nodes()) {
      if (!node->is_call() || node->num_results() == 0 || !may_be_float(node->result(), module_.state())) continue;
      const std::string_view name = node->op_name();
      if (name.ends_with("_norm") || name.ends_with("softmax")) continue;  // these have a scale of their own
      size_t longest = 0;
      for (const Value* value : node->inputs()) {
        if (auto it = length.find(value->producer()); it != length.end()) longest = std::max(longest, it->second);
      }
      const bool scales = (name == "aten::mul" || name == "aten::div") && differentiable.contains(node);
      if (longest += scales) length[node] = longest;
      if (scales && (!last || longest > length[last])) last = node;
    }
    if (!last || length[last] < kLong) return;
    report_.add(ReportKind::LeftAlone, last, last->target(), "",
                "the last of a chain of " + std::to_string(length[last]) +
                    " multiplications that are left alone, with no norm in between: what each changes of the scale of "
                    "values and gradients multiplies (track_scales shows where)");
  }

  // Returns how often a cell is called with these weights: one sees only one step of a sequence.
  int64_t steps_of(const Node* node) {
    if (!node->try_arg("w_hh")) return 1;
    const Node* weight = source_attribute(node->arg("w_hh").value());
    if (!weight) return 1;
    if (cell_calls_.empty()) {
      for (const Node* other : graph_.nodes()) {
        if (!is_recurrent(other) || !other->try_arg("w_hh") || !other->arg("w_hh").is_value()) continue;
        if (const Node* attr = source_attribute(other->arg("w_hh").value())) ++cell_calls_[attr->target()];
      }
    }
    return std::max<int64_t>(cell_calls_[weight->target()], 1);
  }

  // --- stage 4

  void unconstrain() {
    NodeSet before_residual;
    for (const Node* node = graph_.last(); node; node = node->prev()) {
      if (node->is_op("plumb::residual_add") || before_residual.contains(node)) {
        for (size_t k = 0; k < node->num_inputs(); ++k) before_residual.insert(node->input(k)->producer());
      }
    }
    for (const auto& [node, grad_input] : surrounded_) {
      if (before_residual.contains(node)) continue;
      const std::string_view rows = node->facts().contraction.operands[0].argument;
      const std::string_view input = !rows.empty() ? rows : node->try_arg("data") ? "data" : "input";
      if (!node->arg(input).is_value()) continue;
      Value* value = node->arg(input).value();
      node->set_arg(input,
                    insert_call(graph_, node, "plumb::scale_bwd", {value, 1 / grad_input}, node, value)->result());
      report_.add(ReportKind::Unconstrained, node, node->target(), "", "no residual add comes after it");
      changed_ = true;
    }
    for (Node* node : graph_.nodes()) {
      if (before_residual.contains(node) || !node->is_call()) continue;
      if (auto it = kept_.find(node); it != kept_.end() && !it->second) continue;
      const Arg* constraint = node->try_arg("constraint");
      if (!constraint || constraint->is_none()) continue;
      node->set_arg("constraint", std::nullopt);
      report_.add(ReportKind::Unconstrained, node, node->target(), "", "no residual add comes after it");
      changed_ = true;
    }
  }

  void tag() {
    MupTable own;
    MupTable& table = mup_ ? *mup_ : own;
    tag_parameters(module_, roles_, depth_of_, table);
    if (!options_.scale_parameters) return;  // they are somebody else's
    for (const auto& [name, data] : table) {
      if (const Attr* attr = module_.state().find(name); attr && attr->tensor.defined()) plumb::tag(attr->tensor, data);
    }
  }

  GraphModule& module_;
  Graph& graph_;
  const UnitScaleOptions& options_;
  Report& report_;
  MupTable* mup_;
  bool changed_ = false;
  std::unordered_map<const SourceLocation*, bool> kept_sources_;  // bool: may lose its constraint
  std::unordered_map<const Node*, bool> kept_;
  std::unordered_map<std::string, std::string> chosen_;  // results of replacements, and their operators
  std::unordered_set<const Replacement*> matched_;
  NodeSet users_choice_, differentiable_, choosing_, with_inverse_;
  std::unordered_map<const Node*, std::string> computed_;
  std::unordered_map<size_t, std::string> obstacles_;  // by Node::id(): why nodes with an equivalent are left alone
  ParameterRoles roles_;
  std::unordered_map<std::string, int64_t> depth_of_, cell_calls_;
  // Nodes with factors around them, and the scale of the gradient at the input.
  std::vector<std::pair<Node*, double>> surrounded_;
};

const RegisterTransform unit_scale_pass{
    "unit_scale",
    "Replaces operators by unit-scaled ones, adds by residual layers where they are, and gives weights unit variance.",
    {{"tau_attention", "0.01", "weight of residual branches with attention"},
     {"tau_mlp", "0.5", "weight of other residual branches"},
     {"tau_rule", "fixed", "fixed, or depth: the taus of u-muP"},
     {"residual_mult", "1", "depth rule: weight of all branches together"},
     {"residual_attn_ratio", "1", "depth rule: attention's weight over the others'"},
     {"replace", "", "operators to replace first: from=to,from=to"},
     {"scale_parameters", "true", "false: leave weights and biases as they are"}},
    [](GraphModule& module, const PassOptions& given, Report& report) {
      UnitScaleOptions options;
      options.tau_attention = real_option(given, "tau_attention", options.tau_attention);
      options.tau_mlp = real_option(given, "tau_mlp", options.tau_mlp);
      options.residual_mult = real_option(given, "residual_mult", options.residual_mult);
      options.residual_attn_ratio = real_option(given, "residual_attn_ratio", options.residual_attn_ratio);
      if (auto it = given.find("tau_rule"); it != given.end()) {
        if (it->second != "fixed" && it->second != "depth")
          throw Error(ErrorKind::InvalidArgument,
                      "option tau_rule of unit_scale is fixed or depth, got '" + it->second + "'");
        options.tau_rule = it->second == "depth" ? TauRule::Depth : TauRule::Fixed;
      }
      options.scale_parameters = flag_option(given, "scale_parameters", true);
      if (auto it = given.find("replace"); it != given.end()) {
        for (const std::string& pair : split_commas(it->second)) {
          const size_t equals = pair.find('=');
          if (equals == std::string::npos)
            throw Error(ErrorKind::InvalidArgument, "option replace of unit_scale takes from=to, got '" + pair + "'");
          options.replace.push_back({pair.substr(0, equals), pair.substr(equals + 1), nullptr});
        }
      }
      return unit_scale(module, options, &report);
    },
};

}  // namespace

bool unit_scale(GraphModule& module, const UnitScaleOptions& options, Report* report, MupTable* mup) {
  auto check = [](double value, const char* name) {
    if (!(std::isfinite(value) && value > 0))
      throw Error(ErrorKind::InvalidArgument,
                  std::string("unit_scale: ") + name + " must be a positive number, got " + std::to_string(value));
  };
  check(options.tau_attention, "tau_attention");
  check(options.tau_mlp, "tau_mlp");
  check(options.residual_mult, "residual_mult");
  check(options.residual_attn_ratio, "residual_attn_ratio");
  if (const std::string part = divided_parameter(module.state()); !part.empty())
    throw Error(ErrorKind::Unsupported,
                "unit_scale: '" + part +
                    "' is a part of a head that split_vocabulary divided, whose loss is a sum of parts, " +
                    "which would be scaled like any other sum",
                "", "unit_scale the undivided model");
  Report own("unit_scale");
  return UnitScaler(module, options, report ? *report : own, mup).run();
}

std::shared_ptr<TransformedModule> unit_scale(const std::shared_ptr<GraphModule>& module,
                                              const UnitScaleOptions& options) {
  auto result = derive(not_null(module));
  if (options.scale_parameters) {
    result->state() = result->state().deep_copy();
    result->sync_module();
  }
  return transformed(result, "unit_scale", [&](TransformedModule& made, Report& report) {
    return unit_scale(made, options, &report, &made.mup);
  });
}

}  // namespace plumb
