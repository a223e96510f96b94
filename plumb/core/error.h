// One exception type at the edge of the whole API.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace plumb {

// The kinds of errors, each with its meaning. Callers decide by the kind of an error, never by its text.
#define PLUMB_ERROR_KINDS(X)                                                                                      \
  X(InvalidArgument, "An argument, option or environment variable has a value that cannot be used.")              \
  X(UnknownName, "No pass, option, operator, module, parameter, schedule or format has the name that was given.") \
  X(TensorMismatch, "A tensor has another shape, dtype, device or layout than its user needs.")                   \
  X(StructureMismatch, "Inputs, outputs, gradients or targets differ in number or nesting from what is needed.")  \
  X(InvalidState, "A call came before the one it builds on, or after one that ends what it needs.")               \
  X(Unsupported, "An operator, value or module cannot be held, transformed, saved or sent here.")                 \
  X(ExecutionFailed, "Torch, the system or the user's code failed while a graph, stage or callback ran.")         \
  X(Capture, "A forward does something that a graph cannot hold.")                                                \
  X(DataDependent, "A forward takes values out of tensors, so that one graph cannot stand for all inputs.")       \
  X(GuardFailed, "Values or sizes of this run are not those that the graph was captured for.")                    \
  X(InvalidGraph, "A graph breaks its own rules, or its text cannot be parsed.")                                  \
  X(Partition, "A graph cannot be cut into stages in the way that was asked for.")                                \
  X(Schedule, "A pipeline schedule is incomplete, deadlocked, misplaced or made for another pipeline.")           \
  X(Numerics, "NaN or infinity turned up where a check was asked for.")                                           \
  X(BadFile, "A file or bytes cannot be read: missing, truncated, corrupt, hostile or of an unknown version.")    \
  X(CannotWrite, "An output cannot be written: no folder, no permission, no room, or it exists already.")         \
  X(Communication, "A peer is lost, late, or sent something that was not agreed.")                                \
  X(Internal, "A bug in plumb.")

enum class ErrorKind {
#define PLUMB_ERROR_KIND(name, meaning) name,
  PLUMB_ERROR_KINDS(PLUMB_ERROR_KIND)
#undef PLUMB_ERROR_KIND
};

// "InvalidArgument", "BadFile", ...
std::string_view to_string(ErrorKind kind);

// Every error that plumb throws. what() reads "<message>\n  at: <where>\n  try: <remedy>", parts left out when empty.
class Error : public std::runtime_error {
 public:
  // message: one sentence that names the node, parameter or file it is about.
  // where:   module path and the user's source line, if known ("layers.0.attn (model.py:12)").
  // remedy:  what to do about it.
  Error(ErrorKind kind, std::string message, std::string where = "", std::string remedy = "");

  // Returns the text of what().
  static std::string text(const std::string& message, const std::string& where, const std::string& remedy);

  ErrorKind kind() const noexcept { return kind_; }
  const std::string& message() const noexcept { return message_; }
  const std::string& where() const noexcept { return where_; }
  const std::string& remedy() const noexcept { return remedy_; }

 private:
  ErrorKind kind_;
  std::string message_, where_, remedy_;
};

}  // namespace plumb
