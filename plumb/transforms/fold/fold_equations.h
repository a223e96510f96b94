// The factors of a unit-scaled graph's tensors over the plain graph's: one linear equation between logarithms for each
// operator (factor_rules.h). A parameter's factor is an unknown that they decide; fold.h has the remaining choices.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/transforms/fold/factor_rules.h"
#include "plumb/transforms/report.h"

namespace plumb {

// The logarithm of a factor of the linear equations: a number plus multiples of unknowns.
struct LogFactor {
  double number = 0;
  std::vector<std::pair<int, double>> terms;  // (unknown, multiple), by unknown, no multiple is 0

  LogFactor() = default;
  LogFactor(double n) : number(n) {}  // NOLINT: implicit by design
};
LogFactor operator+(const LogFactor& a, const LogFactor& b);
LogFactor operator*(const LogFactor& a, double multiple);
inline LogFactor operator-(const LogFactor& a, const LogFactor& b) { return a + b * -1; }

class FactorEquations {
 public:
  // An equation decides, of two unknowns, the one of the higher rank, then the one made later.
  LogFactor add_unknown(int rank);

  // Returns whether `a` and `b` are equal from now on. False if what was equated before says otherwise: nothing changes
  // then, and resolve(a - b) is a number.
  bool equate(const LogFactor& a, const LogFactor& b);

  // Returns `a` in terms of unknowns that no equation has decided.
  LogFactor resolve(const LogFactor& a);
  // Returns the rank of its undecided unknown that would be decided first; nothing if it is a number.
  std::optional<int> highest_rank(const LogFactor& a);
  // Returns `a` with 0 for the remaining unknowns.
  double value(const LogFactor& a) { return resolve(a).number; }

 private:
  struct Unknown {
    int rank = 0;
    std::optional<LogFactor> is;  // once decided
  };
  int choose(const LogFactor& resolved) const;
  std::vector<Unknown> unknowns_;
};

class FoldEquations {
 public:
  struct Parameter {
    std::vector<std::string> names;  // names of one tensor
    LogFactor factor;
    bool used = false;
  };
  // An operand that no parameter can give the factor that it must have there: by this logarithm it is too large.
  struct Remaining {
    Node* node;
    size_t place;
    LogFactor factor;
  };
  struct EpsilonOf {
    Node* node;
    Value* operand;
    Epsilon epsilon;
  };
  struct ToPlain {
    Node* node;
    std::string holds_for;  // the sizes that its factor follows from; empty: any
  };

  // Solves the equations. Names in `report` what it leaves alone. Throws Error(Unsupported) as fold() does.
  FoldEquations(GraphModule& module, Report& report);

  // Returns the factor of a tensor of the graph.
  const LogFactor& factor(const Value* value) const;
  double value(const LogFactor& factor) { return equations_.value(factor); }
  const Parameter& parameter(const at::Tensor& tensor) const { return parameters_.at(tensor.unsafeGetTensorImpl()); }

  const std::vector<Remaining>& remains() const { return remains_; }
  const std::vector<EpsilonOf>& epsilons() const { return epsilons_; }
  // Unit-scaled operators, in the graph's order.
  const std::vector<ToPlain>& unit_scaled() const { return plain_; }

 private:
  void add_parameters();
  // Returns whether a value has a factor: numbers that are no reals have none. Complex ones have a real factor.
  bool carries(const Value* value) const;
  // Lets an operand, by its place among the inputs, have the factor `wanted`: from now on, or by a multiplication.
  void align(Node* node, size_t place, const LogFactor& wanted);
  // As above, for an argument that may be None.
  void align(Node* node, std::string_view argument, const LogFactor& wanted);
  // Returns the places of inputs that have a factor.
  std::vector<size_t> operands_of(const Node* node) const;
  void keep_all(Node* node, double inner = 1);
  void set_results(const Node* node, const LogFactor& factor);
  void relate(Node* node);
  // Makes a node's result take a factor if it can; memory that the node writes must have it, too.
  bool can_have(const Node* node, const LogFactor& result);
  void relate_attribute(Node* node);
  void leave_alone(Node* node, const std::string& why);
  // Returns the factor of the results, without `outer`.
  LogFactor relate_call(Node* node, const FactorRelation& relation);
  // Lets the others follow the first operand; in a residual layer the branch follows the skip, which comes last.
  LogFactor relate_common(Node* node, const FactorRelation& relation, const std::vector<size_t>& operands);
  LogFactor relate_first(Node* node, const FactorRelation& relation, const std::vector<size_t>& operands);
  // Returns whether a node adds a number beside tensors, or a tensor without a factor, which takes no factor. Zero and
  // the infinities are themselves with every factor.
  bool adds_number(const Node* node) const;
  LogFactor relate_quotient(const Node* node, const std::vector<size_t>& operands) const;
  LogFactor relate_product(Node* node, const FactorRelation& relation, const std::vector<size_t>& operands);
  LogFactor relate_norm(Node* node, const LogFactor& input);
  LogFactor relate_attention(Node* node, const FactorRelation& relation);
  void choose_freely();

  GraphModule& module_;
  Graph& graph_;
  Report& report_;
  FactorEquations equations_;
  std::unordered_map<const c10::TensorImpl*, Parameter> parameters_;
  std::unordered_map<const Value*, LogFactor> factors_;  // none: 1
  std::vector<Remaining> remains_;
  std::vector<EpsilonOf> epsilons_;
  std::vector<LogFactor> products_;
  std::vector<ToPlain> plain_;
};

}  // namespace plumb
