// One colour a run over a whole page.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// Numbers runs by name, in the order in which they are first named; a page draws run N in its colour N (svg.h).
class RunColors {
 public:
  size_t of(std::string_view run) {
    const auto at = std::find(names_.begin(), names_.end(), run);
    if (at != names_.end()) return static_cast<size_t>(at - names_.begin());
    names_.emplace_back(run);
    return names_.size() - 1;
  }
  bool knows(std::string_view run) const { return std::find(names_.begin(), names_.end(), run) != names_.end(); }

 private:
  std::vector<std::string> names_;
};

}  // namespace plumb
