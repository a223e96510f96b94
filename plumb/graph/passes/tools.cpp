#include "plumb/graph/passes/tools.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "plumb/core/error.h"

namespace plumb {

bool flag_option(const PassOptions& options, std::string_view name, bool fallback) {
  auto it = options.find(std::string(name));
  if (it == options.end()) return fallback;
  if (it->second == "true" || it->second == "1" || it->second.empty()) return true;
  if (it->second == "false" || it->second == "0") return false;
  throw Error(ErrorKind::InvalidArgument, "option " + it->first + " is true or false, got '" + it->second + "'");
}

namespace {

template <class T>
T parsed(const PassOptions& options, std::string_view name, T fallback, T least, const char* what) {
  auto it = options.find(std::string(name));
  if (it == options.end()) return fallback;
  T v = 0;
  const char* end = it->second.data() + it->second.size();
  auto [stop, error] = std::from_chars(it->second.data(), end, v);
  if (error != std::errc() || stop != end || v < least)
    throw Error(ErrorKind::InvalidArgument, "option " + it->first + " is " + what + ", got '" + it->second + "'");
  return v;
}

}  // namespace

int64_t number_option(const PassOptions& options, std::string_view name, int64_t fallback) {
  return parsed<int64_t>(options, name, fallback, 0, "a number from 0");
}

double real_option(const PassOptions& options, std::string_view name, double fallback) {
  return parsed(options, name, fallback, std::numeric_limits<double>::lowest(), "a number");
}

bool is_used(const Node& node) {
  const auto results = node.results();
  return std::any_of(results.begin(), results.end(), [](const Value* r) { return r->has_uses(); });
}

}  // namespace plumb
