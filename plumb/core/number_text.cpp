#include "plumb/core/number_text.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "plumb/core/table.h"

namespace plumb {

NumberCheck whole_number(int64_t least, int64_t most) {
  return [=](const std::string& text) -> std::string {
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(text.c_str(), &end, 10);
    const bool number = !text.empty() && *end == '\0';
    if (number && errno == 0 && value >= least && value <= most) return "";
    const bool open = most >= std::numeric_limits<int>::max();
    if (open && number && value > 0) return text + " is more than the largest possible, " + std::to_string(most);
    if (least == std::numeric_limits<int64_t>::min()) return text + " is no whole number of 64 bits";
    return text + " is no whole number " +
           (open ? "of " + std::to_string(least) + " or more"
                 : "from " + std::to_string(least) + " to " + std::to_string(most));
  };
}

NumberCheck number_within(double least, double most) {
  return [=](const std::string& text) -> std::string {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && std::isfinite(value) && value >= least && value <= most) return "";
    return text + " is no finite number " +
           (std::isinf(most) ? "of " + short_number(least) + " or more"
                             : "from " + short_number(least) + " to " + short_number(most, 7));
  };
}

std::string positive_number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (!text.empty() && *end == '\0' && std::isfinite(value) && value > 0) return "";
  return text + " is no positive, finite number";
}

}  // namespace plumb
