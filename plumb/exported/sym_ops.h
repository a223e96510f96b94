// Arithmetic on sizes: Python's operators on symbolic numbers as operators of the graph.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "plumb/exported/exported.h"

namespace plumb {

// Returns the operator that stands for a Python function with a result of this type: ("_operator.add", Int) ->
// "plumb::sym_add.int". Returns nullopt for functions that are no arithmetic.
std::optional<std::string> sym_operator(std::string_view python, ValueType result);
// Returns the inverse: "plumb::sym_add.int" -> "_operator.add".
std::optional<std::string> python_function(std::string_view op);

// Returns the ranges in the spec of a plumb::check_sizes node: its lines "symbol NAME MIN MAX", "-" for no bound.
std::map<std::string, SizeRange> ranges_in(std::string_view spec);

}  // namespace plumb
