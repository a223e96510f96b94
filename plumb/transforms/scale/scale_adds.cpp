#include "plumb/transforms/scale/scale_adds.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "plumb/core/table.h"
#include "plumb/graph/aliases.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/added_bias.h"
#include "plumb/transforms/scale/attention.h"
#include "plumb/transforms/scale/choices.h"
#include "plumb/transforms/scale/inverses.h"
#include "plumb/transforms/scale/normalized.h"
#include "plumb/transforms/scale/residual.h"

namespace plumb {
namespace {

constexpr const char* kSplit = "plumb::residual_split";
constexpr const char* kResidualAdd = "plumb::residual_add";
constexpr const char* kAdd = "plumb::add";
constexpr const char* kCancels = "its operands cancel in part, as in a straight-through estimator";

// Returns whether a node passes no gradient on: a detach, a region without gradients, a look at a tensor's shape.
bool stops_gradient(const Node& node) {
  return is_detach(node) || (node.is_call() && !node.meta().grad_enabled) || looks_at_shape_only(node);
}

// Returns values whose memory a later node writes. A split of such a value would hold it as it was before.
std::unordered_set<const Value*> written_after_they_are_made(const Graph& graph, const State& state) {
  bool writes = false;
  for (const Node* node : graph.nodes()) writes = writes || may_write(*node);
  if (!writes) return {};
  const Aliases aliases(graph, &state, Aliases::Inputs::Distinct);
  std::unordered_set<const Value*> written;
  for (const Node* node : graph.nodes()) {
    for (const Value* result : node->results()) {
      const Node* write = aliases.last_write(aliases.memory(result));
      if (write && node->is_before(write)) written.insert(result);
    }
  }
  return written;
}

// Returns whether the result is the first input in memory of its own: x.clone(), x.contiguous(), the 0 + x of Python's
// sum().
bool is_copy(const Node* node) {
  if (!node->is_call() || node->num_inputs() != 1 || node->num_results() != 1) return false;
  const bool adds_nothing = node->is_op("aten::add") && number_of(node->arg(1)) == 0.0;
  return (adds_nothing || node->is_op("aten::clone") || node->is_op("aten::contiguous")) && keeps_type(node);
}

constexpr int kTerms = 4;  // sums in sums that are looked into for terms that cancel

bool is_difference(const Node* node) { return node->is_op("aten::sub"); }

std::optional<double> alpha_of(const Node* node) {
  const Arg* alpha = node->try_arg("alpha");
  return alpha ? number_of(*alpha) : std::nullopt;
}

bool has_plain_alpha(const Node* node) { return alpha_of(node) == 1.0; }

// Beyond these numbers a product or the factor that takes it back may leave float16's range.
bool is_weight(std::optional<double> number) { return number && *number >= 0x1p-12 && *number <= 0x1p12; }

// Returns the number that a value is multiplied by, if nothing else reads the value and the number can weight it.
std::optional<double> weight_of(const Value* value) {
  const Node* node = value->producer();
  const bool times = node->target() == "aten::mul.Tensor" || node->target() == "aten::mul.Scalar";
  const bool divides = node->target() == "aten::div.Tensor" || node->target() == "aten::div.Scalar";
  if ((!times && !divides) || node->num_inputs() != 1 || !keeps_type(node) || value->uses().size() != 1)
    return std::nullopt;
  const auto number = number_of(node->args()[1]);
  const auto weight = divides && number ? 1 / *number : number;
  return is_weight(weight) ? weight : std::nullopt;
}

// Returns whether it is the sum or difference of two tensors.
bool has_terms(const Node* node) {
  return (is_add(node) || is_difference(node)) && node->num_inputs() == 2 && has_plain_alpha(node);
}

const Value* before_detach(const Value* value) {
  while (is_detach(*value->producer())) value = value->producer()->input(0);
  return value;
}

// How often each value is a term of a sum, detached or not; a term that is taken off counts minus one.
using Terms = std::map<const Value*, int>;

void count_terms(const Value* value, int sign, Terms& terms, int depth = kTerms) {
  value = before_detach(value);
  const Node* node = value->producer();
  if (depth == 0 || !has_terms(node)) {
    terms[value] += sign;
    return;
  }
  count_terms(node->input(0), sign, terms, depth - 1);
  count_terms(node->input(1), is_difference(node) ? -sign : sign, terms, depth - 1);
}

// Adds the sums of which `term` is a term. Returns whether `value` is one, or the term itself.
bool add_sums_with(const Value* term, const Value* value, NodeSet& sums, int depth = kTerms) {
  value = before_detach(value);
  const Node* node = value->producer();
  if (depth == 0 || !has_terms(node)) return value == term;
  const bool left = add_sums_with(term, node->input(0), sums, depth - 1);
  const bool found = add_sums_with(term, node->input(1), sums, depth - 1) || left;
  if (found) sums.insert(node);
  return found;
}

// Returns sums and differences whose operands cancel in part or in whole, as in the spellings of a straight-through
// estimator: hard + (soft - soft.detach()), hard + soft - soft.detach(). A factor of one operand would let the other's
// value through.
NodeSet sums_that_cancel(const Graph& graph) {
  NodeSet found;
  for (const Node* node : graph.nodes()) {
    if (!has_terms(node)) continue;
    Terms left, right;
    count_terms(node->input(0), 1, left, kTerms - 1);
    count_terms(node->input(1), is_difference(node) ? -1 : 1, right, kTerms - 1);
    const auto is_zero = [](const Terms& terms) {
      return std::ranges::all_of(terms, [](const auto& term) { return term.second == 0; });
    };
    if (is_zero(left) || is_zero(right)) found.insert(node);
    for (const auto& [term, count] : left) {
      const auto other = right.find(term);
      if (count != 0 && other != right.end() && count + other->second == 0) add_sums_with(term, node->result(), found);
    }
  }
  return found;
}

class AddScaler {
 public:
  AddScaler(GraphModule& module, const UnitScaleOptions& options, const NodeSet& keep, const NodeSet& choosing,
            Report& report)
      : module_(module),
        graph_(module.graph()),
        options_(options),
        keep_(keep),
        choosing_(choosing),
        report_(report),
        differentiable_(differentiable_nodes(graph_, module.state())),
        exponents_(nodes_of_exponents(graph_, differentiable_)),
        with_inverse_(computed_with_inverse(graph_, module.state())) {}

  ScaledAdds run() {
    std::vector<Node*> adds, candidates;
    const NodeSet cancel = sums_that_cancel(graph_);
    for (Node* node : graph_.nodes()) {
      if (!is_add(node) || keep_.contains(node)) continue;
      if (cancel.contains(node)) {
        report_.add(ReportKind::LeftAlone, node, node->target(), "", kCancels);
        continue;
      }
      if (auto why = add_obstacle(node)) {
        const bool integer = why->starts_with("it is no float") || why->starts_with("no gradient");
        if (!integer) report_.add(ReportKind::LeftAlone, node, node->target(), "", *why);
        continue;
      }
      if (scale_added_bias(module_, node, report_)) {
        done_.changed = true;
        continue;
      }
      adds.push_back(node);
      if (is_weight(alpha_of(node))) take_weights(node), candidates.push_back(node);
    }
    if (adds.empty()) return {};
    const ResidualAnalysis found = find_residuals(adds, candidates);
    const std::vector<double> ratios = settle_weights(found), taus = choose_taus(found, ratios);
    std::unordered_map<const Node*, size_t> residual;
    for (size_t i = 0; i < found.adds.size(); ++i) residual.emplace(found.adds[i].add, i);
    note_depths(found);
    // The index of the skip operand, while values are still those of the analysis.
    std::vector<size_t> skip_index(found.adds.size());
    for (size_t i = 0; i < found.adds.size(); ++i)
      skip_index[i] = found.adds[i].add->input(0) == found.adds[i].skip ? 0 : 1;

    split_skips(found, taus, skip_index);
    for (Node* add : adds) {
      auto it = residual.find(add);
      Node* made;
      auto here = graph_.inserting_before(add);
      if (it != residual.end()) {
        const size_t i = it->second;
        made = graph_.call(kResidualAdd, {operand(add, 1 - skip_index[i]), operand(add, skip_index[i]), taus[i]});
        std::string detail = found.adds[i].attention ? "attention on the branch" : "no attention on the branch";
        if (ratios[i] != 1) detail += "; numbers give it " + short_number(ratios[i]) + " times the weight of the skip";
        report_.add(ReportKind::Residual, add, add->target(), kResidualAdd, detail).tau = taus[i];
      } else {
        // Inside a residual branch the skip goes around the add: its gradient must keep the scale of its value.
        const bool inside = found.inside.count(add);
        made = graph_.call(kAdd, {add->input(0), add->input(1), add->arg("alpha")});
        if (!inside) made->set_arg("constraint", std::nullopt);
        report_.add(ReportKind::Replaced, add, add->target(), kAdd, why_no_residual(add, inside));
      }
      graph_.replace_node(add, made);
      done_.changed = true;
    }
    report_.drop(ReportKind::LeftAlone, settled_);
    return std::move(done_);
  }

 private:
  // Takes out of the adds straight-through estimators, x + (q(x) - x).detach(), whose values are those of q(x); and out
  // of the candidates sums with what was added before: position embeddings in every layer of DETR, a bias of the logits
  // that all layers of MPNet share. From the second layer on the other operand is computed from them. And sums with a
  // tensor that is written in place between: the skip is not what the branch starts from, and autograd lets nobody
  // write into a split.
  ResidualAnalysis find_residuals(std::vector<Node*>& adds, std::vector<Node*>& candidates) {
    ResidualAnalysis found = find_residual_adds(graph_, candidates, is_attention);
    const auto carrying = differentiable_nodes(graph_, module_.state(), stops_gradient);
    std::unordered_map<const Node*, const Value*> branch_of;
    for (const ResidualAdd& r : found.adds) branch_of.emplace(r.add, r.residual);
    auto goes_on = [&](const Value* value) {
      const auto& uses = value->uses();
      return std::any_of(uses.begin(), uses.end(), [&](const Use& use) {
        auto it = branch_of.find(use.user);
        return use.user->is_call() && carrying.contains(use.user) && !products_.contains(use.user) &&
               (it == branch_of.end() || it->second != value);
      });
    };
    const auto written_later = written_after_they_are_made(graph_, module_.state());
    NodeSet estimators;
    for (const ResidualAdd& r : found.adds) {
      if (!carrying.contains(r.residual->producer())) {
        estimators.insert(r.add);
        report_.add(ReportKind::LeftAlone, r.add, r.add->target(), "",
                    "one operand is computed from the other without a gradient, as in a straight-through estimator");
      } else if (written_later.count(r.skip)) {
        no_residual_[r.add] = "a node writes in place into the memory of the skip: no residual add";
      } else if (goes_on(r.residual)) {
        no_residual_[r.add] = "one operand is computed from the other and used elsewhere too: no residual add";
      } else if (found.inside.count(r.add) && weights_skip_by_parameter(r)) {
        no_residual_[r.add] = "inside a residual branch";  // as what Mamba's scan adds to D * x
      } else if (found.inside.count(r.add) && are_logits(r.add->result())) {
        no_residual_[r.add] = "a bias of attention's logits: no residual add";
      }
    }
    if (estimators.empty() && no_residual_.empty()) return found;
    std::erase_if(adds, [&](const Node* node) { return estimators.contains(node); });
    std::erase_if(candidates,
                  [&](const Node* node) { return estimators.contains(node) || no_residual_.contains(node); });
    return find_residual_adds(graph_, candidates, is_attention);
  }

  // Why an add stays an add; nothing if it is one of two tensors.
  std::optional<std::string> add_obstacle(const Node* node) const {
    if (node->target().ends_with(".Scalar") || !node->args()[0].is_value() || !node->args()[1].is_value())
      return "it adds a number";
    if (node->target() == "aten::add_.Tensor") return "it writes in place, and something else sees the memory";
    if (!may_be_float(node->result(), module_.state())) return "it is no floating-point computation";
    const Value* left = node->input(0);
    const Value* right = node->input(1);
    if (!left->is_tensor() || !right->is_tensor()) return "it adds a number";
    if (!may_be_float(left, module_.state()) && !may_be_float(right, module_.state()))
      return "it is no floating-point computation";
    const bool left_flows = differentiable_.contains(left->producer());
    const bool right_flows = differentiable_.contains(right->producer());
    if (!left_flows && !right_flows) return "no gradient flows through it";
    if (choosing_.contains(node)) return kOnlyChooses;
    if (exponents_.contains(node)) return kIsExponent;
    if (with_inverse_.contains(node)) {
      const char* why = part_of_inverse(node);
      return why ? why : kWithInverse;
    }
    if ((!left_flows && looks_like_mask(left, module_.state())) ||
        (!right_flows && looks_like_mask(right, module_.state())))
      return "it adds a mask";
    const Node *first = weighted(left), *second = weighted(right);
    if (!first || !second) return std::nullopt;
    if (has_constant_weight(first) && has_constant_weight(second))
      return "tensors without a gradient weight its operands, as in a rotation";
    if (share_one(first, second)) return "a share weights one operand, and one minus it the other";
    return std::nullopt;
  }

  // Sums of two products whose weights say how much of each there is need no factor: rotary positions, where cos^2 +
  // sin^2 is 1, signal and noise of a diffusion, a choice by a mask, a gated state. Returns the product of two tensors;
  // null for anything else.
  static const Node* weighted(const Value* value) {
    const Node* node = before_passthrough(value)->producer();
    return node->is_op("aten::mul") && node->num_inputs() == 2 ? node : nullptr;
  }

  bool has_constant_weight(const Node* product) const {
    return differentiable_.contains(product->input(0)->producer()) !=
           differentiable_.contains(product->input(1)->producer());
  }

  // Returns whether an operand of one product is one minus an operand of the other.
  static bool share_one(const Node* first, const Node* second) {
    for (const auto& [one, other] : {std::pair(first, second), std::pair(second, first)}) {
      for (const Value* rest : one->inputs()) {
        const Node* node = rest->producer();
        if (!node->is_op("aten::rsub") || !has_plain_alpha(node) || number_of(node->arg("other")) != 1.0) continue;
        if (other->input(0) == node->input(0) || other->input(1) == node->input(0)) return true;
      }
    }
    return false;
  }

  const char* why_no_residual(const Node* add, bool inside) const {
    if (!is_weight(alpha_of(add))) return "its alpha is negative, tiny or huge: not taken for a residual add";
    if (auto it = no_residual_.find(add); it != no_residual_.end()) return it->second;
    return inside ? "inside a residual branch" : "";
  }

  // Numbers that weight the operands of an add, as DeepNorm's 2 * x + f(x), a conformer's x + 0.5 * f(x) and alpha. A
  // residual add takes them into its tau, so that its operands are what the numbers multiply. Products that mix streams
  // by shares, as hyper-connections do (arXiv 2512.24880), or weight them by a parameter are looked through, too.
  struct Weights {
    std::array<double, 2> numbers = {1, 1};
    std::array<Node*, 2> products = {};
    std::array<size_t, 2> inputs = {};  // what of the products is weighted or mixed
  };

  // Returns which input of a product is a stream that it mixes, or that a parameter weights (Doge's and ReZero's
  // skips), if nothing else reads the result.
  std::optional<size_t> stream_of(const Value* value) const {
    const Node* product = value->producer();
    if (!product->is_call() || product->num_inputs() != 2 || value->uses().size() != 1) return std::nullopt;
    if (const auto normalized = normalized_operand(product); normalized && normalized->mixed)
      return product->input(0) == normalized->mixed ? 0 : 1;
    for (size_t i = 0; i < 2 && product->is_op("aten::mul"); ++i) {
      const auto &made = value->meta(), &stream = product->input(i)->meta();
      if (!made || !stream || made->sizes != stream->sizes || made->dtype != stream->dtype) continue;
      if (source_parameter(product->input(1 - i), module_.state())) return i;
    }
    return std::nullopt;
  }

  bool weights_skip_by_parameter(const ResidualAdd& r) const {
    const Node* product = weights_.at(r.add).products[r.add->input(0) == r.skip ? 0 : 1];
    return product && product->is_op("aten::mul") && product->num_inputs() == 2;
  }

  void take_weights(Node* add) {
    Weights& weights = weights_[add];
    weights.numbers[1] = *alpha_of(add);
    for (size_t i = 0; i < 2; ++i) {
      Node* product = add->input(i)->producer();
      if (keep_.contains(product)) continue;
      if (const auto number = weight_of(add->input(i)); number && is_weight(weights.numbers[i] * *number))
        weights.numbers[i] *= *number;
      else if (const auto stream = stream_of(add->input(i)))
        weights.inputs[i] = *stream;
      else
        continue;
      weights.products[i] = product;
      products_.insert(product);
      add->set_input(i, product->input(weights.inputs[i]));
    }
  }

  // Returns how many times the weight of the skip each branch has. The other adds get their products back.
  std::vector<double> settle_weights(const ResidualAnalysis& found) {
    NodeSet residual;
    std::vector<double> ratios;
    for (const ResidualAdd& r : found.adds) {
      const auto& numbers = weights_.at(r.add).numbers;
      const size_t skip = r.add->input(0) == r.skip ? 0 : 1;
      ratios.push_back(numbers[1 - skip] / numbers[skip]);
      residual.insert(r.add);
    }
    for (const auto& [add, weights] : weights_) {
      for (size_t i = 0; i < 2 && !residual.contains(add); ++i)
        if (weights.products[i]) add->set_input(i, weights.products[i]->result());
    }
    return ratios;
  }

  // Returns an operand of a residual add at unit scale. Its number stays, for a plain model has it, and a factor behind
  // takes it back.
  Value* operand(Node* add, size_t i) {
    const Weights& weights = weights_.at(add);
    Value* value = add->input(i);
    if (Node* product = weights.products[i]) {
      product->set_input(weights.inputs[i], value);
      value = product->result();
    }
    if (weights.numbers[i] == 1) return value;
    if (weights.products[i]) settled_.insert(value->name());
    if (i == 1 && !has_plain_alpha(add))
      value = insert_call(graph_, add, "aten::mul.Tensor", {value, *alpha_of(add)}, add, value)->result();
    const double factor = 1 / weights.numbers[i];
    return insert_call(graph_, add, "plumb::rescale", {value, factor, factor}, add, value)->result();
  }

  std::vector<double> choose_taus(const ResidualAnalysis& found, const std::vector<double>& ratios) const {
    std::vector<bool> attention;
    for (const auto& add : found.adds) attention.push_back(add.attention);
    std::vector<double> taus;
    if (options_.tau_rule == TauRule::Depth)
      taus = depth_taus(attention, options_.residual_mult, options_.residual_attn_ratio);
    else
      for (bool a : attention) taus.push_back(a ? options_.tau_attention : options_.tau_mlp);
    for (size_t i = 0; i < taus.size(); ++i) taus[i] *= ratios[i];
    return taus;
  }

  // Parameters used inside a residual branch learn more slowly in a deeper network (u-muP, table 2).
  void note_depths(const ResidualAnalysis& found) {
    if (options_.tau_rule != TauRule::Depth) return;
    const auto depth = static_cast<int64_t>(found.adds.size());
    for (const Node* node : found.inside) {
      for (const Value* value : node->inputs()) {
        if (const Node* attr = source_attribute(value)) done_.depth_of[attr->target()] = depth;
      }
    }
  }

  void split_skips(const ResidualAnalysis& found, const std::vector<double>& taus,
                   const std::vector<size_t>& skip_index) {
    // Outermost first: it ends last. Its branch side is then where the inner ones split off.
    std::unordered_map<const Value*, Node*> last_split;
    std::vector<Value*> branch(found.adds.size());
    for (size_t i = found.adds.size(); i-- > 0;) {
      const ResidualAdd& r = found.adds[i];
      Value* from = r.parent >= 0 ? branch[static_cast<size_t>(r.parent)] : r.skip;
      auto [after, first] = last_split.try_emplace(r.skip, r.skip->producer());
      Node* before = after->second->next();
      while (before->kind() == NodeKind::Placeholder) before = before->next();  // inputs come first
      auto here = graph_.inserting_before(before);
      Node* split = graph_.call(kSplit, {from, taus[i]});
      split->meta() = r.add->meta();
      for (size_t side = 0; side < 2; ++side) split->result(side)->set_meta(r.skip->meta());
      split->result(0)->rename(graph_.unique_name(r.skip->name() + "_branch"));
      split->result(1)->rename(graph_.unique_name(r.skip->name() + "_skip"));
      after->second = split;
      branch[i] = split->result(0);
      r.add->set_input(skip_index[i], split->result(1));
    }
    std::unordered_map<const Node*, const Value*> own_skip;
    for (const ResidualAdd& r : found.adds) own_skip.emplace(r.add, r.skip);
    for (const auto& [skip, users] : found.branch_of) {
      for (const auto& [user, index] : users) {
        if (auto it = own_skip.find(user); it != own_skip.end() && it->second == skip) continue;
        Node* node = const_cast<Node*>(user);
        for (size_t k = 0; k < node->num_inputs(); ++k) {
          if (node->input(k) == skip) node->set_input(k, branch[static_cast<size_t>(index)]);
        }
      }
    }
  }

  GraphModule& module_;
  Graph& graph_;
  const UnitScaleOptions& options_;
  const NodeSet &keep_, &choosing_;
  Report& report_;
  const NodeSet differentiable_, exponents_, with_inverse_;
  std::unordered_map<Node*, Weights> weights_;
  NodeSet products_;                                          // all products in weights_
  std::unordered_set<std::string> settled_;                   // names of the products that a tau has taken
  std::unordered_map<const Node*, const char*> no_residual_;  // adds that only look like residual ones, and why
  ScaledAdds done_;
};

}  // namespace

bool is_add(const Node* node) {
  return node->target() == "aten::add.Tensor" || node->target() == "aten::add.Scalar" ||
         node->target() == "aten::add_.Tensor" || node->target() == "aten::add_.Scalar";
}

bool read_past_copies(GraphModule& module) {
  Graph& graph = module.graph();
  const auto written = written_after_they_are_made(graph, module.state());
  bool changed = false;
  for (Node* add : graph.nodes()) {
    if (add->target() != "aten::add.Tensor" || add->num_inputs() != 2) continue;
    for (size_t k = 0; k < 2; ++k) {
      for (Node* copy = add->input(k)->producer(); is_copy(copy); copy = add->input(k)->producer()) {
        if (written.contains(copy->result()) || written.contains(copy->input(0))) break;
        add->set_input(k, copy->input(0));
        if (!copy->result()->has_uses()) graph.erase(copy);
        changed = true;
      }
    }
  }
  return changed;
}

ScaledAdds scale_adds(GraphModule& module, const UnitScaleOptions& options, const NodeSet& keep,
                      const NodeSet& choosing, Report& report) {
  return AddScaler(module, options, keep, choosing, report).run();
}

}  // namespace plumb
