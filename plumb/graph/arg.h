// An argument of a node: a value of the graph, a constant, or a list of arguments.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace plumb {

class Value;

// A number constant given where an operator's schema asks for a Tensor is what eager calls a wrapped number
// (`x * 2`): it takes part in type promotion as a Python scalar does.
class Arg {
 public:
  using List = std::vector<Arg>;

  Arg() : data_(c10::IValue()) {}
  Arg(Value* value) : data_(value) {}                                 // NOLINT: implicit by design
  Arg(c10::IValue constant) : data_(std::move(constant)) {}           // NOLINT
  Arg(c10::Scalar number) : data_(c10::IValue(std::move(number))) {}  // NOLINT
  Arg(std::nullopt_t) : data_(c10::IValue()) {}                       // NOLINT
  Arg(bool v) : data_(c10::IValue(v)) {}                              // NOLINT
  Arg(int v) : data_(c10::IValue(static_cast<int64_t>(v))) {}         // NOLINT
  Arg(int64_t v) : data_(c10::IValue(v)) {}                           // NOLINT
  Arg(double v) : data_(c10::IValue(v)) {}                            // NOLINT
  Arg(const char* v) : data_(c10::IValue(std::string(v))) {}          // NOLINT
  Arg(std::string v) : data_(c10::IValue(std::move(v))) {}            // NOLINT
  Arg(List elements) : data_(std::move(elements)) {}                  // NOLINT

  bool is_value() const { return std::holds_alternative<Value*>(data_); }
  bool is_list() const { return std::holds_alternative<List>(data_); }
  bool is_constant() const { return std::holds_alternative<c10::IValue>(data_); }
  bool is_none() const { return is_constant() && constant().isNone(); }

  // Returns null unless is_value().
  Value* value() const { return is_value() ? std::get<Value*>(data_) : nullptr; }
  // Only when is_constant() / is_list().
  const c10::IValue& constant() const { return std::get<c10::IValue>(data_); }
  const List& list() const { return std::get<List>(data_); }

  // True if a value is anywhere in it.
  bool has_values() const;
  // Same structure, same values, equal constants (bit for bit; NaN equals NaN).
  friend bool operator==(const Arg& a, const Arg& b);

 private:
  friend class Node;
  friend class Graph;
  std::variant<Value*, c10::IValue, List> data_;
};

// Equality of constants as Arg means it.
bool same_constant(const c10::IValue& a, const c10::IValue& b);

}  // namespace plumb
