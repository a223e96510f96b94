// The rows of torch's operators as data. For operator_facts.cpp alone.
#pragma once

#include <span>
#include <string_view>

#include "plumb/operators/operator_facts.h"

namespace plumb {

std::span<const OperatorGroup> torch_operators();

// Why operators without a row are refused, by how their names begin: for the message.
struct RefusedFamily {
  std::string_view prefixes, why;  // prefixes: apart by spaces
};
std::span<const RefusedFamily> refused_families();

bool is_torch_namespace(std::string_view space);

}  // namespace plumb
