#include "plumb/transforms/optimise/optimise.h"

#include <ATen/TensorGeometry.h>

#include <cmath>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/optimise/factors.h"
#include "plumb/transforms/optimise/pointwise_steps.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

constexpr size_t kMaxSteps = 32;    // a block of each has to stay in cache
constexpr size_t kOrderedUses = 2;  // the sum of two gradients has no order
constexpr int kMany = 6;            // operators whose calls cost more than one call of a chain
constexpr int kWorthwhile = 3;      // passes that pay for what is computed again

class Optimizer {
 public:
  Optimizer(GraphModule& module, const OptimiseOptions& options, Report& report)
      : graph_(module.graph()), options_(options), report_(report), writes_(count_writes(graph_)) {}

  bool run() {
    bool changed = false;
    if (options_.measure) changed |= measure_while_rounding();
    if (options_.fold) changed |= fold();
    if (options_.fuse) changed |= fuse();
    return changed;
  }

 private:
  bool alone_between(const Node* first, const Node* last) const {
    return writes_.at(first) == writes_.at(last) && first->meta().grad_enabled == last->meta().grad_enabled;
  }

  bool takes(const Node* node, const Factor& factor) {
    if (!options_.exact || factor.exact()) return true;
    report_.add(ReportKind::LeftAlone, node, node->target(), "",
                "its factor is no power of two: it would round once, not twice");
    return false;
  }

  // Inserts a call in place of `node`.
  Node* insert(Node* node, std::string_view op, std::vector<Arg> args) {
    Node* made = insert_call(graph_, node, op, std::move(args), node, node->result());
    writes_[made] = writes_.at(node);
    return made;
  }

  Node* put_product(Node* node, const ScaledProduct& product) {
    auto here = graph_.inserting_before(node);
    Node* made = call_product(graph_, product);
    made->meta() = node->meta();
    made->result()->set_meta(node->result()->meta());
    writes_[made] = writes_.at(node);
    return made;
  }

  bool fold() {
    bool changed = false;
    for (Node* node : graph_.nodes()) changed |= fold_behind(node);
    for (Node* node : graph_.nodes()) changed |= fold_before(node);
    for (Node* node : graph_.nodes()) changed |= fold_into_factor(node);
    return changed;
  }

  // node multiplies what is multiplied already, or by one.
  bool fold_into_factor(Node* node) {
    const auto outer = factor_of(node);
    if (!outer) return false;
    Node* inner = outer->value->producer();
    if (outer->forward == 1 && outer->backward == 1) {
      // Its result is a tensor of its own: nobody may tell.
      if (writes_.at(graph_.last()) != 0 || !inner->is_call() || node->result()->meta()->strides.empty() ||
          outer->value->meta()->strides != node->result()->meta()->strides)
        return false;
      for (const Use& use : node->result()->uses()) {
        if (use.user->kind() == NodeKind::Output) return false;
      }
      report_.add(ReportKind::Replaced, node, node->target(), "", "its factor is one");
      graph_.replace_all_uses_with(node->result(), outer->value);
      graph_.erase(node);
      return true;
    }
    const auto first = factor_of(inner);
    if (!first || outer->value->uses().size() != 1 || !alone_between(inner, node)) return false;
    if (options_.exact && !(first->exact() || outer->exact())) return false;
    const double forward = first->forward * outer->forward, backward = first->backward * outer->backward;
    if (!std::isfinite(forward) || !std::isfinite(backward) || forward != backward) return false;
    Node* made = insert(node, "aten::mul.Tensor", {first->value, forward});
    report_.add(ReportKind::Replaced, node, inner->target() + " and " + node->target(), made->target(),
                "their factors multiplied");
    graph_.replace_node(node, made);
    graph_.erase(inner);
    return true;
  }

  // node multiplies a product.
  bool fold_behind(Node* node) {
    const auto factor = factor_of(node);
    if (!factor) return false;
    Node* inner = factor->value->producer();
    auto product = product_of(inner);
    if (!product || factor->value->uses().size() != 1 || !alone_between(inner, node) || !takes(node, *factor))
      return false;
    product->multiply_result(*factor);
    replace(node, inner, put_product(node, *product), *factor);
    return true;
  }

  // node is a product of something multiplied, perhaps seen through views.
  bool fold_before(Node* node) {
    bool changed = false;
    for (int side = 0; side < 2; ++side) {
      auto product = product_of(node);
      if (!product) return changed;
      Arg& operand = side == 0 ? product->left : product->right;
      if (!operand.is_value()) continue;
      Node* inner = source_behind_views(operand.value());
      if (!inner || !alone_between(inner, node)) continue;
      const bool in_place = operand.value()->producer() == inner;
      auto factor = factor_of(inner);
      if (factor && !in_place && factor->value->meta()->strides != inner->result()->meta()->strides) continue;
      if (!factor) factor = factor_of_attention(inner);
      if (!factor || !takes(inner, *factor)) continue;
      side == 0 ? product->multiply_left(*factor) : product->multiply_right(*factor);
      if (!factor->value)
        drop_factor_of_attention(inner);
      else if (in_place)
        operand = factor->value;
      else
        graph_.replace_all_uses_with(inner->result(), factor->value);
      Node* made = put_product(node, *product);
      replace(node, inner, made, *factor);
      node = made;
      changed = true;
    }
    return changed;
  }

  void replace(Node* node, Node* inner, Node* made, const Factor& factor) {
    auto& entry = report_.add(ReportKind::Replaced, node, inner->target() + " and " + node->target(), made->target());
    entry.reason = factor.exact() ? "the factor is part of the product"
                                  : "the factor is part of the product: one rounding where there were two";
    graph_.replace_node(node, made);
    if (!inner->result()->has_uses()) graph_.erase(inner);
  }

  // ---- rounded values that are tracked

  Node* only_user(const Value* value) const { return value->uses().size() == 1 ? value->uses()[0].user : nullptr; }

  bool measure_while_rounding() {
    bool changed = false;
    for (Node* node : graph_.nodes()) {
      if (!node->is_op("plumb::simulate_format") || !node->arg("seed").is_constant()) continue;
      Node* before = node->input(0)->producer();
      Node* after = only_user(node->result());
      // The caller's own tensors are measured even where they need no gradient.
      if (!before->is_op("plumb::track") || !only_user(before->result()) || !alone_between(before, node) ||
          before->input(0)->producer()->kind() == NodeKind::Placeholder || !before->arg("slot").is_constant())
        before = nullptr;
      if (!after || !after->is_op("plumb::track") || !alone_between(node, after) || !after->arg("slot").is_constant())
        after = nullptr;
      if (before && after && before->arg("tracker") != after->arg("tracker")) before = nullptr;
      if (!before && !after) continue;
      const Arg tracker = (after ? after : before)->arg("tracker");
      Node* made = insert(node, "plumb::track_rounded",
                          {before ? before->input(0) : node->input(0), node->arg("fwd"), node->arg("bwd"),
                           node->arg("seed"), node->arg("dim"), before ? before->arg("slot") : Arg(int64_t(-1)),
                           after ? after->arg("slot") : Arg(int64_t(-1)), tracker});
      report_.add(ReportKind::Replaced, node, node->target() + " and plumb::track", made->target(),
                  "measured while it is rounded");
      const std::string name = node->result()->name();
      graph_.replace_all_uses_with((after ? after : node)->result(), made->result());
      if (after) fused_.push_back(after);
      fused_.push_back(node);
      if (before) fused_.push_back(before);
      node->result()->rename(graph_.unique_name(name + "_alone"));
      made->result()->rename(name);
      changed = true;
    }
    for (Node* node : fused_) graph_.erase(node);
    fused_.clear();
    return changed;
  }

  // ---- pointwise chains

  struct Tree {
    std::vector<Node*> nodes;  // operands first
    std::vector<Value*> inputs;
    PointwiseProgram program;
    std::vector<bool> cheap;  // steps whose results were computed again in the backward pass before
    size_t steps = 0;
  };

  const std::optional<LoweredNode>& lowered(const Node* node) {
    auto [it, fresh] = lowered_.try_emplace(node);
    if (fresh) it->second = lower_pointwise(node);
    return it->second;
  }

  // Why the node that makes `value` is not taken into its user's chain; empty: it is.
  std::string obstacle(const Value* value, const Node* root, size_t steps) {
    const Node* node = value->producer();
    if (value->uses().size() != 1) return "its result is used elsewhere";
    if (node->meta().grad_enabled != root->meta().grad_enabled) return "another grad mode";
    if (writes_.at(node) != writes_.at(root)) return "memory is written in between";
    if (value->meta()->strides != root->result()->meta()->strides) return "another layout in memory";
    if (steps + lowered(node)->steps.size() > kMaxSteps) return "the chain is long enough";
    for (const Value* operand : lowered(node)->operands) {
      if (operand->uses().size() > kOrderedUses && operand->meta()->requires_grad)
        return "an operand has several more uses: gradients would be summed in another order";
    }
    return "";
  }

  PointwiseArg emit(Node* node, Node* root, Tree& tree) {
    const LoweredNode& lower = *lowered(node);
    std::vector<PointwiseArg> operands;
    tree.steps += lower.steps.size();
    for (Value* operand : lower.operands) {
      Node* producer = operand->producer();
      if (lowered(producer)) {
        const std::string why = obstacle(operand, root, tree.steps);
        if (why.empty()) {
          operands.push_back(emit(producer, root, tree));
          continue;
        }
        if (reported_.insert(producer))
          report_.add(ReportKind::LeftAlone, producer, producer->target(), "", "not in the chain behind it: " + why);
      }
      operands.push_back({PointwiseArg::Input, static_cast<int64_t>(tree.inputs.size()), 0});
      tree.inputs.push_back(operand);
    }
    const auto first = static_cast<int64_t>(tree.program.steps.size());
    auto moved = [&](const PointwiseArg& arg) {
      if (arg.kind == PointwiseArg::Input) return operands[static_cast<size_t>(arg.index)];
      if (arg.kind == PointwiseArg::Step) return PointwiseArg{PointwiseArg::Step, arg.index + first, 0};
      return arg;
    };
    for (PointwiseStep step : lower.steps) {
      step.a = moved(step.a);
      step.b = moved(step.b);
      tree.program.steps.push_back(step);
      tree.cheap.push_back(lower.recomputes);
    }
    tree.nodes.push_back(node);
    return {PointwiseArg::Step, static_cast<int64_t>(tree.program.steps.size()) - 1, 0};
  }

  bool fuse() {
    bool changed = false;
    for (Node* root = graph_.last(); root;) {
      Node* next = root->prev();
      if (lowered(root)) {
        Tree tree;
        emit(root, root, tree);
        if (const std::string why = not_worth_it(root, tree); why.empty()) {
          next = replace(root, tree);
          changed = true;
        } else if (tree.nodes.size() > 1) {
          report_.add(ReportKind::LeftAlone, root, root->target(), "", why);
        }
      }
      root = next;
    }
    return changed;
  }

  // Why the operators one by one are as quick; empty: they are not.
  std::string not_worth_it(const Node* root, const Tree& tree) {
    const TensorMeta& meta = *root->result()->meta();
    Saving saving;
    for (const Node* node : tree.nodes) saving += saving_of(node, *lowered(node));
    if (saving.passes < kWorthwhile) return "too little to gain";
    if (meta.strides.size() != meta.sizes.size() || !at::geometry_is_contiguous(meta.sizes, meta.strides))
      return "its values are not in C order";
    if (meta.numel() < options_.min_elements && saving.calls < kMany) return "few operators on a small tensor";
    return "";
  }

  // Returns the node before the chain's place.
  Node* replace(Node* root, Tree& tree) {
    tree.program.num_inputs = static_cast<int64_t>(tree.inputs.size());
    merge_factors(tree.program, tree.cheap, options_.exact || !options_.fold);
    choose_kept(tree.program, tree.cheap);
    std::map<std::string, size_t> counts;
    for (const Node* node : tree.nodes) ++counts[std::string(node->op_name())];
    std::string from;
    for (const auto& [name, count] : counts) {
      from += (from.empty() ? "" : ", ") + name + (count > 1 ? " x" + std::to_string(count) : "");
    }
    Node* made =
        insert(root, "plumb::pointwise", {Arg::List(tree.inputs.begin(), tree.inputs.end()), tree.program.to_string()});
    report_.add(ReportKind::Replaced, root, from, "plumb::pointwise",
                std::to_string(tree.steps) + " steps in one pass over memory");
    const std::string name = root->result()->name();
    graph_.replace_all_uses_with(root->result(), made->result());
    for (auto it = tree.nodes.rbegin(); it != tree.nodes.rend(); ++it) {
      lowered_.erase(*it);
      graph_.erase(*it);
    }
    made->result()->rename(name);
    lowered_[made] = std::nullopt;
    return made->prev();
  }

  Graph& graph_;
  const OptimiseOptions& options_;
  Report& report_;
  std::unordered_map<const Node*, size_t> writes_;
  std::unordered_map<const Node*, std::optional<LoweredNode>> lowered_;
  NodeSet reported_;
  std::vector<Node*> fused_;
};

const RegisterTransform optimise_pass{
    "optimise",
    "Folds factors into matrix products and runs chains of pointwise operators as one kernel.",
    {{"fold", "true", "factors into products"},
     {"fuse", "true", "chains of pointwise operators"},
     {"exact", "false", "leave alone what would round once instead of twice"},
     {"measure", "true", "round and track in one pass"},
     {"min_elements", "262144", "shorter chains of smaller tensors are left alone"}},
    [](GraphModule& module, const PassOptions& given, Report& report) {
      OptimiseOptions options;
      options.fold = flag_option(given, "fold", true);
      options.fuse = flag_option(given, "fuse", true);
      options.exact = flag_option(given, "exact", false);
      options.measure = flag_option(given, "measure", true);
      options.min_elements = number_option(given, "min_elements", options.min_elements);
      return optimise(module, options, &report);
    },
};

}  // namespace

bool optimise(GraphModule& module, const OptimiseOptions& options, Report* report) {
  Report own("optimise");
  return Optimizer(module, options, report ? *report : own).run();
}

std::shared_ptr<TransformedModule> compile(const std::shared_ptr<GraphModule>& module, const OptimiseOptions& options) {
  return transformed(derive(not_null(module)), "optimise",
                     [&](GraphModule& made, Report& report) { return optimise(made, options, &report); });
}

}  // namespace plumb
