// One exception type at the edge of the whole API.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace plumb {

// What kind of thing went wrong: a family, so that callers can decide without reading the sentence.
enum class ErrorKind {
  InvalidArgument,  // the caller gave something that cannot be used
  InvalidGraph,     // a graph breaks its own rules (lint, parse)
  Capture,          // a module does something that a graph cannot hold
  BadFile,          // a file is truncated, corrupt, hostile or of an unknown version
  Schedule,         // a pipeline schedule is incomplete, deadlocked or misplaced
  Communication,    // a peer is lost, late, or sent what was not agreed
  Numerics,         // NaN or infinity where a check was asked for
  Internal,         // a bug in plumb
};

// "invalid argument", "bad file", ...
std::string_view to_string(ErrorKind kind);

// Every error plumb raises. what() reads "<message>\n  at: <where>\n  try: <remedy>", parts left out when empty.
class Error : public std::runtime_error {
 public:
  // message: one sentence that names the node, parameter or file it is about.
  // where:   module path and the user's source line, if known ("layers.0.attn (model.py:12)").
  // remedy:  what to do about it.
  Error(ErrorKind kind, std::string message, std::string where = "", std::string remedy = "");

  ErrorKind kind() const noexcept { return kind_; }
  const std::string& message() const noexcept { return message_; }
  const std::string& where() const noexcept { return where_; }
  const std::string& remedy() const noexcept { return remedy_; }

 private:
  ErrorKind kind_;
  std::string message_, where_, remedy_;
};

}  // namespace plumb
