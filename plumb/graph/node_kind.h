// The kinds of nodes as users see them, in every report and in Python.
#pragma once

#include <cstdint>
#include <string_view>

namespace plumb {

enum class NodeKind : uint8_t;

// "placeholder", "get_attr", "call_function", "output".
std::string_view to_string(NodeKind kind);

}  // namespace plumb
