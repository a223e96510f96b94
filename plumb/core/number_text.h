// Numbers that people write, in options and files.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

namespace plumb {

// "" if the text is a whole number (a number) within the range, both ends included, else what is wrong in words: "0 is
// no whole number from 1 to 1024".
using NumberCheck = std::function<std::string(const std::string& text)>;
NumberCheck whole_number(int64_t least, int64_t most = std::numeric_limits<int>::max());
NumberCheck number_within(double least, double most);
std::string positive_number(const std::string& text);

}  // namespace plumb
