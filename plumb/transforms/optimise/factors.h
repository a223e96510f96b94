// Numbers that multiply whole tensors, and products that can take them over. Not for other rooms.
#pragma once

#include <optional>

#include "plumb/graph/graph.h"

namespace plumb {

// Returns whether multiplying by it rounds nothing.
bool is_power_of_two(double x);

struct Factor {
  Value* value = nullptr;  // what is multiplied; null for attention, which multiplies its own result
  double forward = 1, backward = 1;
  bool exact() const;  // both directions are powers of two
};

// Returns the factor of x * 3, x / 3, scale_fwd and scale_bwd.
std::optional<Factor> factor_of(const Node* node);

// Returns the factor over the result of a unit-scaled attention, where it is not one.
std::optional<Factor> factor_of_attention(const Node* node);
void drop_factor_of_attention(Node* node);

// Returns the node that makes `operand` of `user`, seen through views that have no other user; null if another uses it.
Node* source_behind_views(const Value* operand);

// A product whose factors are known: plumb::linear and plumb::matmul, or torch's with none.
struct ScaledProduct {
  bool linear = false;
  Arg left, right, bias;
  double output = 1, grad_left = 1, grad_right = 1;  // what the operator multiplies
  double bias_output = 1, grad_bias = 1;             // and over a bias

  // Multiplies its result, and with it all gradients.
  void multiply_result(const Factor& factor);
  // Multiplies an operand: so are the result, except for the bias, and the other operand's gradient.
  void multiply_left(const Factor& factor);
  void multiply_right(const Factor& factor);
};

// Returns nullopt for operands of unknown, symbolic or mixed types, and for lone numbers' and vectors' products.
std::optional<ScaledProduct> product_of(const Node* node);

// Inserts the call of plumb::linear or plumb::matmul at the graph's insertion point.
Node* call_product(Graph& graph, const ScaledProduct& product);

}  // namespace plumb
