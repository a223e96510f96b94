// Helpers that every pass needs: options as values.
#pragma once

#include <string_view>

#include "plumb/graph/pass.h"

namespace plumb {

// Options as given; the default where they are not. Throw an Error that names option and pass.
bool flag_option(const PassOptions& options, std::string_view name, bool fallback);
int64_t number_option(const PassOptions& options, std::string_view name, int64_t fallback);
double real_option(const PassOptions& options, std::string_view name, double fallback);

// Returns whether any of the node's results is used.
bool is_used(const Node& node);

}  // namespace plumb
