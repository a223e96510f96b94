// Constraints tie the scale factors of one operator together, so that its gradients stay those of one function.
// Source: Unit Scaling (arXiv 2303.11257), section 4 and appendix E.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// From an operator's own scales, output first and then one for each constrained input's gradient, the one scale to use.
using ConstraintFn = std::function<double(std::span<const double> scales)>;

double gmean(std::span<const double> scales);  // geometric mean
double hmean(std::span<const double> scales);  // harmonic mean
double amean(std::span<const double> scales);  // arithmetic mean

// The constraint of an operator: one by name ("gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale",
// "to_left_grad_scale", "to_right_grad_scale"), none at all, or a function of the user's own. Throws
// Error(UnknownName) for an unknown name.
class Constraint {
 public:
  Constraint(std::nullopt_t) {}                                                // NOLINT: each scale as its rule says
  Constraint(const char* name) : Constraint(std::string_view(name)) {}         // NOLINT
  Constraint(const std::string& name) : Constraint(std::string_view(name)) {}  // NOLINT
  Constraint(std::string_view name);                                           // NOLINT: "" means none
  Constraint(ConstraintFn fn) : fn_(std::move(fn)) {}                          // NOLINT

  // Returns the name, where it has one; none for no constraint and for a user's function.
  const std::optional<std::string>& name() const { return name_; }
  bool is_user_function() const { return fn_ && !name_; }
  // Returns the scales after the constraint: all equal, or untouched when there is none. Throws Error(Numerics) if a
  // user's function returns no finite number.
  std::vector<double> apply(std::vector<double> scales) const;

 private:
  std::optional<std::string> name_;
  ConstraintFn fn_;
};

// Throws Error(UnknownName) for an unknown name, Error(InvalidArgument) for one that does not fit the number of scales.
std::vector<double> apply_constraint(std::optional<std::string_view> name, std::vector<double> scales);

}  // namespace plumb
