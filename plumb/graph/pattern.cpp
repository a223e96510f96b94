#include "plumb/graph/pattern.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <unordered_set>

#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"

namespace plumb {
namespace {

// One attempt at a match. Patterns are a dozen nodes: recursion is as deep as the pattern.
class Matcher {
 public:
  explicit Matcher(bool through_casts) : through_casts_(through_casts) {}

  bool node(const Node* pattern, Node* candidate) {
    for (const auto& [known, node] : nodes) {
      if (known == pattern) return node == candidate;
    }
    if (!candidate->is_call() || !same_operator(*pattern, *candidate)) return false;
    if (candidate->result_layout() != pattern->result_layout()) return false;
    const bool swaps = is_commutative(*pattern) && is_commutative(*candidate);
    for (int order = 0; order < (swaps ? 2 : 1); ++order) {
      const std::array before = {nodes.size(), bound.size(), inner_casts.size(), input_casts.size()};
      nodes.emplace_back(pattern, candidate);
      bool fits = true;
      for (size_t i = 0; i < pattern->args().size() && fits; ++i) {
        fits = argument(pattern->arg(i), candidate->arg(order == 1 && i < 2 ? 1 - i : i));
      }
      if (fits) return true;
      nodes.resize(before[0]);
      bound.resize(before[1]);
      inner_casts.resize(before[2]);
      input_casts.resize(before[3]);
    }
    return false;
  }

  // The match's nodes and arguments, by nodes and placeholders of the pattern. Most attempts end early.
  c10::SmallVector<std::pair<const Node*, Node*>, 12> nodes;
  std::vector<std::pair<const Node*, Arg>> bound;
  std::vector<Node*> inner_casts, input_casts;

 private:
  bool is_transparent(const Node* node) const { return through_casts_ ? is_float_cast(node) : is_cast_to_same(node); }

  // A number beside a tensor has two spellings: mul.Tensor with a wrapped number, and mul.Scalar.
  static bool same_operator(const Node& pattern, const Node& candidate) {
    if (candidate.target() == pattern.target()) return true;
    return candidate.target().ends_with(".Scalar") && pattern.target().ends_with(".Tensor") &&
           candidate.op_name() == pattern.op_name() && candidate.args().size() == pattern.args().size();
  }

  static bool is_commutative(const Node& node) {
    if (node.target() == "aten::mul.Tensor") return true;
    if (node.target() != "aten::add.Tensor") return false;
    const Arg& alpha = node.arg(2);
    return alpha.is_constant() && alpha.constant().isInt() && alpha.constant().toInt() == 1;
  }

  bool argument(const Arg& pattern, const Arg& candidate) {
    if (pattern.is_value()) {
      const Value* v = pattern.value();
      if (v->producer()->kind() == NodeKind::Placeholder) return bind(*v, candidate);
      if (!candidate.is_value()) return false;
      Value* value = candidate.value();
      while (is_transparent(value->producer()) && !same_operator(*v->producer(), *value->producer())) {
        inner_casts.push_back(value->producer());
        value = value->producer()->input(0);
      }
      return value->result_index() == v->result_index() && node(v->producer(), value->producer());
    }
    if (pattern.is_list()) {
      if (!candidate.is_list() || candidate.list().size() != pattern.list().size()) return false;
      for (size_t i = 0; i < pattern.list().size(); ++i) {
        if (!argument(pattern.list()[i], candidate.list()[i])) return false;
      }
      return true;
    }
    if (is_number(pattern) && is_number(candidate)) return number(pattern) == number(candidate);
    return pattern == candidate;
  }

  static double number(const Arg& arg) { return arg.constant().toScalar().toDouble(); }

  bool bind(const Value& placeholder, const Arg& candidate) {
    if (placeholder.type() == ValueType::Other) {
      if (!candidate.is_constant()) return false;
    } else {
      if (candidate.is_list() || candidate.is_none()) return false;
      // A number fits both kinds, a value its own.
      if (candidate.is_value() ? candidate.value()->is_tensor() != placeholder.is_tensor() : !is_number(candidate))
        return false;
    }
    for (const auto& [known, arg] : bound) {
      if (known != placeholder.producer()) continue;
      return arg == candidate || (candidate.is_value() && arg.is_value() && source(candidate) == source(arg));
    }
    bound.emplace_back(placeholder.producer(), candidate);
    return true;
  }

  // Returns the value that the casts before `arg` start from.
  const Value* source(const Arg& arg) {
    const Value* value = arg.value();
    for (Node* cast; is_transparent(cast = value->producer()); value = cast->input(0)) {
      if (!is_cast_to_same(cast)) input_casts.push_back(cast);
    }
    return value;
  }

  static bool is_number(const Arg& arg) {
    return arg.is_constant() && (arg.constant().isInt() || arg.constant().isDouble() || arg.constant().isBool());
  }

  bool through_casts_;
};

}  // namespace

bool is_float_cast(const Node* node) {
  if (!node->is_op("aten::to") && !node->is_op("aten::type_as") && !node->is_op("aten::_to_copy")) return false;
  if (node->num_results() != 1 || !node->args()[0].is_value()) return false;
  const auto &from = node->args()[0].value()->meta(), &to = node->result()->meta();
  return from && to && from->is_floating_point() && to->is_floating_point() && from->device == to->device;
}

bool is_cast_to_same(const Node* node) {
  return is_float_cast(node) && node->args()[0].value()->meta()->dtype == node->result()->meta()->dtype;
}

const Arg& Match::at(std::string_view name) const {
  auto it = bound.find(std::string(name));
  if (it == bound.end())
    throw Error(ErrorKind::UnknownName, "the pattern has no placeholder '" + std::string(name) + "'");
  return it->second;
}

Pattern::Pattern(std::string_view text) : graph_(parse_graph(text)) {
  const Node* out = graph_.output_node();
  if (!out || out->num_inputs() != 1 || !out->input(0)->producer()->is_call()) {
    throw Error(ErrorKind::InvalidArgument, "a pattern has one output, the result of an operator");
  }
  root_ = out->input(0)->producer();
}

std::optional<Match> Pattern::match(Node* root, bool through_casts) const {
  Matcher matcher(through_casts);
  if (!matcher.node(root_, root)) return std::nullopt;
  Match match;
  match.root = root;
  match.nodes = std::move(matcher.inner_casts);
  match.casts = std::move(matcher.input_casts);
  for (const auto& [pattern, node] : matcher.nodes) match.nodes.push_back(node);
  std::sort(match.nodes.begin(), match.nodes.end(),
            [](const Node* a, const Node* b) { return a != b && a->is_before(b); });
  match.nodes.erase(std::unique(match.nodes.begin(), match.nodes.end()), match.nodes.end());
  for (auto& [placeholder, arg] : matcher.bound) match.bound.emplace(placeholder->target(), std::move(arg));
  return match;
}

bool is_private(const Match& match, size_t reach) {
  const std::unordered_set<const Node*> inside(match.nodes.begin(), match.nodes.end());
  // An inner value that is one of the match's inputs as well (x.t() @ x.t()) stays in use.
  std::unordered_set<const Value*> bound;
  for (const auto& [name, arg] : match.bound) {
    if (arg.is_value()) bound.insert(arg.value());
  }
  const bool grad = match.root->meta().grad_enabled;
  for (const Node* node : match.nodes) {
    if (node->meta().grad_enabled != grad || node->is_random()) return false;
    if (node == match.root) continue;
    for (const Value* r : node->results()) {
      if (bound.contains(r)) return false;
      for (const Use& use : r->uses()) {
        if (!inside.count(use.user)) return false;
      }
    }
    if (node->writes()) return false;
  }
  // Between first and last nothing may write, the root (an in-place sum) into its own inner value excepted.
  const Node* first = match.nodes.front();
  for (const Node* cast : match.casts) first = cast->is_before(first) ? cast : first;
  for (const Node* node = first; node != match.root; node = node->next()) {
    if (reach-- == 0) return false;
    if (!inside.count(node) && may_write(*node)) return false;
  }
  for (const Value* v : match.root->written_inputs()) {
    if (!inside.count(v->producer()) || v->producer()->result_aliases_input()) return false;
  }
  return true;
}

}  // namespace plumb
