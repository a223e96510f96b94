// Texts made of parts: str("rank ", 1, " of ", 4) is "rank 1 of 4".
#pragma once

#include <string>
#include <type_traits>

namespace plumb {

// Numbers as std::to_string() writes them, characters and texts as they are.
template <class... Parts>
std::string str(const Parts&... parts) {
  std::string all;
  const auto add = [&all]<class Part>(const Part& part) {
    if constexpr (std::is_arithmetic_v<Part> && !std::is_same_v<Part, char>) {
      all += std::to_string(part);
    } else {
      all += part;
    }
  };
  (add(parts), ...);
  return all;
}

}  // namespace plumb
