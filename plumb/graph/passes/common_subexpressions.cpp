#include "plumb/graph/passes/common_subexpressions.h"

#include <algorithm>
#include <bit>
#include <string>

#include "plumb/graph/aliases.h"
#include "plumb/graph/pass.h"

namespace plumb {
namespace {

using Memory = Aliases::Memory;

void mix(size_t& h, size_t v) { h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2); }

void mix_constant(size_t& h, const c10::IValue& v) {
  if (v.isInt()) return mix(h, std::hash<int64_t>()(v.toInt()));
  if (v.isDouble()) return mix(h, std::bit_cast<uint64_t>(v.toDouble()));
  if (v.isBool()) return mix(h, v.toBool() ? 1 : 2);
  if (v.isComplexDouble()) {
    mix(h, std::bit_cast<uint64_t>(v.toComplexDouble().real()));
    return mix(h, std::bit_cast<uint64_t>(v.toComplexDouble().imag()));
  }
  if (v.isString()) return mix(h, std::hash<std::string>()(v.toStringRef()));
  if (v.isList()) {
    for (const c10::IValue& e : v.toListRef()) mix_constant(h, e);
  }
  mix(h, std::hash<std::string>()(v.tagKind()));
}

void mix_arg(size_t& h, const Arg& arg) {
  if (arg.is_value()) return mix(h, std::hash<const Value*>()(arg.value()));
  if (arg.is_constant()) return mix_constant(h, arg.constant());
  mix(h, arg.list().size());
  for (const Arg& e : arg.list()) mix_arg(h, e);
}

class Merger {
 public:
  Merger(Graph& graph, const State* state, const CommonSubexpressionsOptions& options)
      : graph_(graph), aliases_(graph, state), flow_(graph, aliases_, state), options_(options) {}

  bool run() {
    bool changed = false;
    for (Node* node : graph_.nodes()) {
      for (Memory m : aliases_.written(node)) ++written_[m];
      if (node->kind() == NodeKind::GetAttr) {
        auto [it, fresh] = attributes_.emplace(node->target(), node);
        if (!fresh) changed = merge(node, it->second) || changed;
      } else if (is_candidate(*node)) {
        changed = look_up(node) || changed;
      }
    }
    return changed;
  }

 private:
  struct Seen {
    Node* node;
    std::vector<uint32_t> times;  // number of earlier writes to each input's memory
  };

  bool is_candidate(const Node& node) const {
    if (!node.is_call() || node.num_results() == 0 || !aliases_.written(&node).empty()) return false;
    if (node.is_random() || is_uninitialized(node) || has_hidden_effects(node)) return false;
    for (const Value* r : node.results()) {
      const Node* last = aliases_.last_write(aliases_.memory(r));
      if (last && node.is_before(last)) return false;
      if (!options_.differentiable && flow_.may_require_grad(r)) return false;
    }
    return true;
  }

  bool look_up(Node* node) {
    Seen now{node, {}};
    size_t h = std::hash<std::string>()(node->target()) + node->meta().grad_enabled;
    for (const Arg& arg : node->args()) mix_arg(h, arg);
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      auto it = written_.find(aliases_.memory(node->input(i)));
      now.times.push_back(it == written_.end() ? 0 : it->second);
      mix(h, now.times.back());
    }
    auto [first, last] = table_.equal_range(h);
    for (auto it = first; it != last; ++it) {
      if (is_same(now, it->second)) return merge(node, it->second.node);
    }
    table_.emplace(h, std::move(now));
    return false;
  }

  static bool is_same(const Seen& a, const Seen& b) {
    const Node &x = *a.node, &y = *b.node;
    if (x.target() != y.target() || x.meta().grad_enabled != y.meta().grad_enabled || a.times != b.times) return false;
    return x.result_layout() == y.result_layout() && std::ranges::equal(x.args(), y.args());
  }

  bool is_returned(const Value* v) const {
    const Memory m = aliases_.memory(v);
    return aliases_.is_returned(m) || returned_.count(m);
  }

  bool merge(Node* node, Node* earlier) {
    if (node->kind() != NodeKind::GetAttr) {
      for (size_t i = 0; i < node->num_results(); ++i) {
        if (is_returned(node->result(i)) && is_returned(earlier->result(i))) return false;
      }
    }
    for (size_t i = 0; i < node->num_results(); ++i) {
      if (is_returned(node->result(i))) returned_[aliases_.memory(earlier->result(i))] = true;
      graph_.replace_all_uses_with(node->result(i), earlier->result(i));
      if (!earlier->result(i)->meta()) earlier->result(i)->set_meta(node->result(i)->meta());
    }
    graph_.erase(node);
    return true;
  }

  Graph& graph_;
  Aliases aliases_;
  GradientFlow flow_;
  CommonSubexpressionsOptions options_;
  std::unordered_map<Memory, uint32_t> written_;
  std::unordered_map<Memory, bool> returned_;
  std::unordered_map<std::string, Node*> attributes_;
  std::unordered_multimap<size_t, Seen> table_;
};

const RegisterPass common_subexpressions_pass({
    "common_subexpressions",
    "Computes once what is computed twice.",
    {{"differentiable", "false", "also merge values that carry gradients (their sums then round differently)"}},
    [](GraphModule& module, const PassOptions& options, std::vector<std::string>* report) {
      const size_t before = module.graph().size();
      const bool changed =
          common_subexpressions(module.graph(), &module.state(), {flag_option(options, "differentiable", false)});
      if (report && changed) report->push_back("merged " + std::to_string(before - module.graph().size()) + " nodes");
      return changed;
    },
});

}  // namespace

bool common_subexpressions(Graph& graph, const State* state, const CommonSubexpressionsOptions& options) {
  return Merger(graph, state, options).run();
}

}  // namespace plumb
