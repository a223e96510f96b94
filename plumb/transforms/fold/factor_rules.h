// How factors over an operator's operands become a factor over its results: f(a x) = a^n f(x). Not for other rooms.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/state.h"

namespace plumb {

enum class FactorRule {
  Fixed,      // operands and results keep the factor 1
  Ignores,    // results have 1, whatever the operands have: shapes, signs, places of the largest
  First,      // results have that of the first operand; further ones keep 1
  Shape,      // the same; further operands are looked at for their shape or type only
  Common,     // operands and results have one
  Product,    // that of the result is the product of the operands'; what is added has it, too
  Quotient,   // the first operand's factor divided by the second's
  Power,      // the first operand's to a power
  Norm,       // the first operand's vanishes, but for eps; the result has that of `weight` and `bias`, 1 without them
  Attention,  // query's times key's is `inner`; the result has that of `value`
  Gated,      // the second operand keeps 1, the result has that of the first
};

// A unit-scaled operator is torch's with factors: outer * f(inner * x). Those of torch's operators are 1.
struct FactorRelation {
  FactorRule rule = FactorRule::Fixed;
  double power = 1;  // exponent of Power
  double inner = 1;  // on the operand that keeps 1; for Attention what the product of query and key is to have
  double outer = 1;  // on the result
  double added = 1;  // on what a Product adds
  std::vector<double> weights;  // weights of the operands of Common, where they differ
  std::string holds_for;        // "a length of 32" if the factors follow from sizes of the input
};

// Returns nullopt for a unit-scaled operator whose factors are not known from the graph: sizes are symbols, or the
// scales are computed. Factors of random operators are those of evaluation.
std::optional<FactorRelation> factor_relation(const Node* node, const State& state);

// Returns the operators of torch that have a rule, without aten::, with an overload where only that one is meant.
std::vector<std::string_view> factor_rule_names();

// Returns the operand that a Product adds (a bias), by its argument's name; "" if there is none.
std::string_view added_argument(const Node* node);

// True for operators of plumb that are torch's with factors, or nothing but a factor.
bool is_unit_scaled(const Node* node);
// True for operators that return their operand, except for a factor: scale_fwd, residual_split.
bool is_factor_alone(const Node* node);

// A small positive number that keeps a root or a quotient finite; the argument that it is given as.
struct Epsilon {
  std::string_view argument;
  double value = 0;
  double power = 1;  // it stands beside the operand to this power
};
// Returns the epsilon of a norm, or of `x + 1e-6` and clamp(x, 1e-6) if only roots and quotients use the result.
std::optional<Epsilon> epsilon_of(const Node* node);

// Inserts torch's operator in place of a unit-scaled one, before the node. For its outer factors see factor_relation().
Node* build_plain(Graph& graph, const Node* node);

}  // namespace plumb
