// The rows of operator_facts.h as data. For operator_facts.cpp alone.
#pragma once

#include <span>
#include <string_view>

#include "plumb/graph/operator_facts.h"

namespace plumb {

constexpr const char* kTrustsSaved = "its kernel takes what a forward pass saved on trust";

// Operators, or whole namespaces, whose rows are equal.
struct OperatorGroup {
  std::string_view space;    // "aten::"; "" where the names have theirs
  std::string_view names;    // apart by spaces
  OperatorFacts facts = {};  // of each of them, but for the name
};
std::span<const OperatorGroup> operator_groups();

// Why operators without a row are refused, by how their names begin: for the message.
struct RefusedFamily {
  std::string_view prefixes, why;  // prefixes: apart by spaces
};
std::span<const RefusedFamily> refused_families();

bool is_torch_namespace(std::string_view space);

}  // namespace plumb
