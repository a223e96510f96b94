#include "plumb/core/error.h"

#include "plumb/core/text.h"

namespace plumb {

std::string Error::text(const std::string& message, const std::string& where, const std::string& remedy) {
  std::string text = message;
  if (!where.empty()) text += "\n  at: " + where;
  if (!remedy.empty()) text += "\n  try: " + remedy;
  return text;
}

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
#define PLUMB_ERROR_KIND(name, meaning) \
  case ErrorKind::name: return #name;
    PLUMB_ERROR_KINDS(PLUMB_ERROR_KIND)
#undef PLUMB_ERROR_KIND
  }
  return "Unknown";
}

Error::Error(ErrorKind kind, std::string message, std::string where, std::string remedy)
    : std::runtime_error(printable(text(message, where, remedy))),
      kind_(kind),
      message_(printable(message)),
      where_(printable(where)),
      remedy_(printable(remedy)) {}

}  // namespace plumb
