// Texts in a row: join(names) is "a, b, c".
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace plumb {

// `text_of` gives an element's text: a member, or a function. Elements may be texts themselves.
template <class Range, class TextOf = std::identity>
std::string join(const Range& range, TextOf text_of = {}, std::string_view between = ", ") {
  std::string all;
  bool first = true;
  for (const auto& element : range) {
    if (!first) all += between;
    all += std::invoke(text_of, element);
    first = false;
  }
  return all;
}

}  // namespace plumb
