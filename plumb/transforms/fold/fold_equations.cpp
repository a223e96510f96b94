#include "plumb/transforms/fold/fold_equations.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_set>

#include "plumb/core/error.h"
#include "plumb/graph/aliases.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/optimise/pointwise_steps.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/recurrent.h"

namespace plumb {
namespace {

// The order in which equations decide factors: first those that nothing else depends on.
enum Rank : int { kEmbedding = 1, kGain, kWeight, kBias, kStatistics };

// Products of very many factors are no layers: such values keep the factor 1.
constexpr size_t kMostTerms = 1000;
constexpr double kLargestMultiple = 1e6;

// Returns the argument of a node that this input stands in, seen through lists.
std::string_view argument_of(const Node* node, const Value* value) {
  if (!node->is_call()) return "";
  for (size_t i = 0; i < node->args().size(); ++i) {
    if (node->args()[i].value() == value) return node->schema().arguments()[i].name();
  }
  return "";
}

int rank_of(const Value* value) {
  int rank = kStatistics;
  for (const Use& use : effective_uses(value)) {
    int here = kGain;
    const std::string_view argument = argument_of(use.user, use.user->input(use.index));
    if (use.user->is_call()) {
      const OperatorFacts& facts = use.user->facts();
      if (use.user->op_name().ends_with("::embedding")) {
        here = kEmbedding;
      } else if (argument == "running_mean" || argument == "running_var") {
        here = kStatistics;
      } else if (!argument.empty() && (argument == "bias" || argument == added_argument(use.user))) {
        here = kBias;
      } else if (facts.contraction || facts.recurrent != RecurrentLayer::None || is_factor_alone(use.user)) {
        here = kWeight;
      }
    }
    rank = std::min(rank, here);
  }
  return rank;
}

std::optional<size_t> place_of(const Node* node, std::string_view argument) {
  const Arg* arg = node->try_arg(argument);
  if (!arg || !arg->is_value()) return std::nullopt;
  for (size_t i = 0, place = 0; i < node->args().size(); ++i) {
    if (&node->args()[i] == arg) return place;
    std::vector<Value*> before;
    collect_values(node->args()[i], before);
    place += before.size();
  }
  return std::nullopt;
}

// unit_scale puts its factor into weights, where nothing tells it from others.
void refuse_dropout_between_layers(const Node* node) {
  const Arg* dropout = is_recurrent(node) ? node->try_arg("dropout") : nullptr;
  if (!dropout || number_of(*dropout).value_or(1) == 0 || !is_set(node, "train")) return;
  throw Error(ErrorKind::Unsupported,
              node->describe() + " has dropout between its layers: factors of its weights are those of training",
              node->meta().where(), "fold the graph of evaluation: model.eval(), and capture or run it again");
}

}  // namespace

FoldEquations::FoldEquations(GraphModule& module, Report& report)
    : module_(module), graph_(module.graph()), report_(report) {
  add_parameters();
  for (Node* node : graph_.nodes()) relate(node);
  choose_freely();
}

void FoldEquations::add_parameters() {
  std::unordered_map<const void*, const c10::TensorImpl*> memory;
  std::unordered_set<const c10::TensorImpl*> overlapping;
  for (const Attr& attr : module_.state()) {
    if (!attr.tensor.defined()) continue;
    const auto* impl = attr.tensor.unsafeGetTensorImpl();
    auto [it, fresh] = parameters_.try_emplace(impl);
    it->second.names.push_back(attr.name);
    if (!fresh || !attr.tensor.has_storage() || attr.tensor.is_meta() || attr.tensor.numel() == 0) continue;
    // Two views of one memory cannot be divided each.
    auto [first, alone] = memory.try_emplace(attr.tensor.storage().data(), impl);
    if (!alone) overlapping.insert({impl, first->second});
  }
  std::map<std::string, std::vector<const Node*>> nodes;
  for (const Node* node : graph_.attributes()) nodes[node->target()].push_back(node);
  for (const Attr& attr : module_.state()) {
    if (!attr.tensor.defined()) continue;
    const auto* impl = attr.tensor.unsafeGetTensorImpl();
    Parameter& parameter = parameters_.at(impl);
    if (parameter.names[0] != attr.name) continue;
    std::optional<int> rank;
    for (const std::string& name : parameter.names) {
      for (const Node* node : nodes[name]) {
        parameter.used = true;
        const int here = rank_of(node->result());
        rank = std::min(rank.value_or(here), here);
      }
    }
    const bool statistics = rank == kStatistics;
    if (!rank || overlapping.count(impl) || !at::isFloatingType(attr.tensor.scalar_type())) continue;
    if (attr.kind == AttrKind::Parameter || (attr.kind == AttrKind::Buffer && statistics))
      parameter.factor = equations_.add_unknown(*rank);
  }
}

bool FoldEquations::carries(const Value* value) const {
  if (!value->is_tensor()) return false;
  const auto dtype = dtype_of(value, module_.state());
  return !dtype || at::isFloatingType(*dtype) || at::isComplexType(*dtype);
}

const LogFactor& FoldEquations::factor(const Value* value) const {
  static const LogFactor one;
  auto it = factors_.find(value);
  return it == factors_.end() ? one : it->second;
}

void FoldEquations::align(Node* node, size_t place, const LogFactor& wanted) {
  const Value* operand = node->input(place);
  if (!carries(operand) || equations_.equate(factor(operand), wanted)) return;
  remains_.push_back({node, place, factor(operand) - wanted});
}

void FoldEquations::align(Node* node, std::string_view argument, const LogFactor& wanted) {
  if (const auto place = place_of(node, argument)) align(node, *place, wanted);
}

std::vector<size_t> FoldEquations::operands_of(const Node* node) const {
  std::vector<size_t> found;
  for (size_t i = 0; i < node->num_inputs(); ++i) {
    if (carries(node->input(i))) found.push_back(i);
  }
  return found;
}

void FoldEquations::keep_all(Node* node, double inner) {
  const std::vector<size_t> operands = operands_of(node);
  for (size_t i = 0; i < operands.size(); ++i) align(node, operands[i], i == 0 ? -std::log(inner) : 0.0);
}

void FoldEquations::set_results(const Node* node, const LogFactor& factor) {
  for (const Value* result : node->results()) {
    if (carries(result)) factors_[result] = factor;
  }
}

void FoldEquations::relate(Node* node) {
  switch (node->kind()) {
    case NodeKind::Placeholder: return;
    case NodeKind::GetAttr: return relate_attribute(node);
    case NodeKind::Output: return keep_all(node);
    case NodeKind::CallFunction: break;
  }
  const auto relation = factor_relation(node, module_.state());
  if (!relation) {
    return leave_alone(node,
                       "its factors are not known from the graph: they follow from sizes that are symbols, or "
                       "from scales that are computed");
  }
  refuse_dropout_between_layers(node);
  if (is_unit_scaled(node)) {
    plain_.push_back({node, relation->holds_for});
  } else if (node->op_name() == "plumb::pointwise") {
    return leave_alone(node, "operators made one by optimise: fold before that");
  }
  const LogFactor result = relate_call(node, *relation) + std::log(relation->outer);
  if (can_have(node, result)) return set_results(node, result);
  keep_all(node);
  set_results(node, std::log(relation->outer));
}

bool FoldEquations::can_have(const Node* node, const LogFactor& result) {
  if (result.terms.size() > kMostTerms || !std::isfinite(result.number)) return false;
  for (const auto& term : result.terms) {
    if (!(std::abs(term.second) < kLargestMultiple)) return false;
  }
  for (const Value* written : node->written_inputs()) {
    if (written->producer()->kind() == NodeKind::GetAttr && argument_of(node, written).starts_with("running_"))
      continue;
    if (carries(written) && !equations_.equate(factor(written), result)) return false;
  }
  return true;
}

void FoldEquations::relate_attribute(Node* node) {
  const Attr* attr = module_.state().find(node->target());
  if (!attr || !attr->tensor.defined()) return;
  set_results(node, parameters_.at(attr->tensor.unsafeGetTensorImpl()).factor);
}

void FoldEquations::leave_alone(Node* node, const std::string& why) {
  keep_all(node);
  if (node->op_name().starts_with("plumb::")) report_.add(ReportKind::LeftAlone, node, node->target(), "", why);
}

LogFactor FoldEquations::relate_call(Node* node, const FactorRelation& relation) {
  const std::vector<size_t> operands = operands_of(node);
  if (operands.empty() || relation.rule == FactorRule::Ignores) return {};
  const LogFactor first = factor(node->input(operands[0]));
  const std::optional<Epsilon> epsilon = epsilon_of(node);
  if (epsilon && relation.rule != FactorRule::Fixed) epsilons_.push_back({node, node->input(operands[0]), *epsilon});
  switch (relation.rule) {
    case FactorRule::Fixed: return keep_all(node, relation.inner), LogFactor();
    case FactorRule::Ignores: return {};
    case FactorRule::First:
    case FactorRule::Shape: return relate_first(node, relation, operands);
    case FactorRule::Common:
      return !epsilon && adds_number(node) ? (keep_all(node), LogFactor()) : relate_common(node, relation, operands);
    case FactorRule::Product: return relate_product(node, relation, operands);
    case FactorRule::Quotient: return relate_quotient(node, operands);
    case FactorRule::Power: return first * relation.power;
    case FactorRule::Norm: return relate_norm(node, first);
    case FactorRule::Attention: return relate_attention(node, relation);
    case FactorRule::Gated: return align(node, operands.back(), -std::log(relation.inner)), first;
  }
  return {};
}

LogFactor FoldEquations::relate_common(Node* node, const FactorRelation& relation,
                                       const std::vector<size_t>& operands) {
  auto weight = [&](size_t i) { return relation.weights.empty() ? 0.0 : std::log(relation.weights[i]); };
  const size_t reference = relation.weights.empty() ? 0 : operands.size() - 1;
  const LogFactor result = factor(node->input(operands[reference])) + weight(operands[reference]);
  for (size_t i = 0; i < operands.size(); ++i) {
    if (i != reference) align(node, operands[i], result - weight(operands[i]));
  }
  return result;
}

LogFactor FoldEquations::relate_first(Node* node, const FactorRelation& relation, const std::vector<size_t>& operands) {
  const bool casts = relation.rule == FactorRule::Shape && node->num_results() && !carries(node->result());
  if (casts || adds_number(node)) return keep_all(node), LogFactor();
  for (size_t i = 1; relation.rule == FactorRule::First && i < operands.size(); ++i) align(node, operands[i], {});
  return factor(node->input(operands[0]));
}

bool FoldEquations::adds_number(const Node* node) const {
  auto keeps = [&](const Arg& arg) {
    if (arg.is_value()) return !carries(arg.value());
    const auto n = number_of(arg);
    return !arg.is_none() && (!n || (*n != 0 && std::isfinite(*n)));
  };
  for (std::string_view argument : {"self", "other", "value", "min", "max", "tensors"}) {
    const Arg* arg = node->try_arg(argument);
    if (!arg) continue;
    if (arg->is_list() ? std::any_of(arg->list().begin(), arg->list().end(), keeps) : keeps(*arg)) return true;
  }
  return false;
}

LogFactor FoldEquations::relate_quotient(const Node* node, const std::vector<size_t>& operands) const {
  LogFactor result;
  for (size_t place : operands) {
    const bool divided = place == 0 && node->args()[0].is_value();
    result = result + factor(node->input(place)) * (divided ? 1 : -1);
  }
  return result;
}

LogFactor FoldEquations::relate_product(Node* node, const FactorRelation& relation,
                                        const std::vector<size_t>& operands) {
  const std::string_view added = added_argument(node);
  constexpr size_t kNone = SIZE_MAX;
  const size_t sum = added.empty() ? kNone : place_of(node, added).value_or(kNone);
  LogFactor product;
  for (size_t place : operands) {
    if (place != sum) product = product + factor(node->input(place));
  }
  if (sum != kNone) align(node, sum, product + std::log(relation.outer) - std::log(relation.added));
  products_.push_back(product + std::log(relation.outer));
  return product;
}

LogFactor FoldEquations::relate_norm(Node* node, const LogFactor& input) {
  align(node, "running_mean", input);
  align(node, "running_var", input * 2);
  const auto weight = place_of(node, "weight");
  const LogFactor result = weight ? factor(node->input(*weight)) : LogFactor();
  align(node, "bias", result);
  return result;
}

LogFactor FoldEquations::relate_attention(Node* node, const FactorRelation& relation) {
  const LogFactor key = factor(node->arg("key").value()), logits = std::log(relation.inner);
  if (!equations_.equate(factor(node->arg("query").value()) + key, logits)) align(node, "query", logits - key);
  align(node, "attn_mask", {});
  return factor(node->arg("value").value());
}

void FoldEquations::choose_freely() {
  for (const auto& [node, operand, epsilon] : epsilons_) equations_.equate(factor(operand), 0);
  for (const LogFactor& product : products_) {
    if (equations_.highest_rank(product) == kWeight) equations_.equate(product, 0);
  }
}

namespace {

// Logarithms are sums of a few dozen numbers near 1: what is left of equal ones.
constexpr double kRounding = 1e-9;

}  // namespace

LogFactor operator+(const LogFactor& a, const LogFactor& b) {
  LogFactor sum(a.number + b.number);
  auto i = a.terms.begin(), j = b.terms.begin();
  while (i != a.terms.end() || j != b.terms.end()) {
    if (j == b.terms.end() || (i != a.terms.end() && i->first < j->first)) {
      sum.terms.push_back(*i++);
    } else if (i == a.terms.end() || j->first < i->first) {
      sum.terms.push_back(*j++);
    } else {
      if (const double both = i->second + j->second; std::abs(both) > kRounding) sum.terms.emplace_back(i->first, both);
      ++i, ++j;
    }
  }
  return sum;
}

LogFactor operator*(const LogFactor& a, double multiple) {
  if (multiple == 0) return {};
  LogFactor product = a;
  product.number *= multiple;
  for (auto& term : product.terms) term.second *= multiple;
  return product;
}

LogFactor FactorEquations::add_unknown(int rank) {
  LogFactor factor;
  factor.terms.emplace_back(static_cast<int>(unknowns_.size()), 1.0);
  unknowns_.push_back({rank, std::nullopt});
  return factor;
}

// Decided unknowns are kept in terms of undecided ones, so that chains of them stay short. Every step leaves fewer
// decided ones, for none is in terms of itself.
LogFactor FactorEquations::resolve(const LogFactor& a) {
  LogFactor open = a;
  for (bool again = true; again;) {
    again = false;
    LogFactor next(open.number);
    for (const auto& [unknown, multiple] : open.terms) {
      const auto& known = unknowns_[static_cast<size_t>(unknown)].is;
      again = again || known.has_value();
      LogFactor term;
      term.terms.emplace_back(unknown, 1.0);
      next = next + (known ? *known : term) * multiple;
    }
    open = std::move(next);
  }
  if (a.terms.size() == 1 && a.number == 0 && a.terms[0].second == 1) {
    if (auto& known = unknowns_[static_cast<size_t>(a.terms[0].first)].is) known = open;
  }
  return open;
}

int FactorEquations::choose(const LogFactor& resolved) const {
  int best = -1;
  for (const auto& [unknown, multiple] : resolved.terms) {
    if (best < 0 || unknowns_[static_cast<size_t>(unknown)].rank >= unknowns_[static_cast<size_t>(best)].rank)
      best = unknown;
  }
  return best;
}

std::optional<int> FactorEquations::highest_rank(const LogFactor& a) {
  const int unknown = choose(resolve(a));
  if (unknown < 0) return std::nullopt;
  return unknowns_[static_cast<size_t>(unknown)].rank;
}

bool FactorEquations::equate(const LogFactor& a, const LogFactor& b) {
  LogFactor difference = resolve(a - b);
  const int unknown = choose(difference);
  if (unknown < 0) return std::abs(difference.number) < kRounding;
  double multiple = 0;
  std::erase_if(difference.terms, [&](const auto& term) {
    if (term.first == unknown) multiple = term.second;
    return term.first == unknown;
  });
  unknowns_[static_cast<size_t>(unknown)].is = difference * (-1 / multiple);
  return true;
}

}  // namespace plumb
