#include "plumb/core/error.h"

#include <utility>

namespace plumb {
namespace {

std::string compose(const std::string& message, const std::string& where, const std::string& remedy) {
  std::string text = message;
  if (!where.empty()) text += "\n  at: " + where;
  if (!remedy.empty()) text += "\n  try: " + remedy;
  return text;
}

}  // namespace

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::InvalidArgument: return "invalid argument";
    case ErrorKind::InvalidGraph: return "invalid graph";
    case ErrorKind::Capture: return "capture";
    case ErrorKind::BadFile: return "bad file";
    case ErrorKind::Schedule: return "schedule";
    case ErrorKind::Communication: return "communication";
    case ErrorKind::Numerics: return "numerics";
    case ErrorKind::Internal: return "internal";
  }
  return "unknown";
}

Error::Error(ErrorKind kind, std::string message, std::string where, std::string remedy)
    : std::runtime_error(compose(message, where, remedy)),
      kind_(kind),
      message_(std::move(message)),
      where_(std::move(where)),
      remedy_(std::move(remedy)) {}

}  // namespace plumb
