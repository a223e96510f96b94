#include "plumb/graph/backward_errors.h"

#include <algorithm>
#include <cctype>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/graph/describe.h"

namespace plumb {
namespace {

// "aten::log_softmax" and autograd's "LogSoftmax" are both "logsoftmax".
std::string letters_of(std::string_view name) {
  std::string letters;
  for (const char c : name.substr(name.rfind(':') + 1)) {
    if (std::isalnum(static_cast<unsigned char>(c)))
      letters += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return letters;
}

// Returns what stands in `words` between two texts; "" if the first is not there.
std::string between(const std::string& words, std::string_view begin, std::string_view ends) {
  const size_t at = words.find(begin);
  if (at == words.npos) return "";
  return words.substr(at + begin.size(), words.find_first_of(ends, at + begin.size()) - at - begin.size());
}

std::string with_place(const Node& node) {
  const std::string where = node.meta().where();
  return node.describe() + (where.empty() ? "" : " at " + where);
}

// Returns the nodes that write in place, and what they write: results of the operator that the error is about
// ("which is output 0 of ExpBackward0, is at version 1"), or all.
std::vector<std::string> writes(const Graph& graph, const std::string& words) {
  const std::string of = between(words, "which is output ", ",;."), node_of = letters_of(of.substr(of.rfind(' ') + 1));
  const std::string maker = node_of.substr(0, node_of.rfind("backward"));
  std::vector<std::string> likely, others;
  for (const Node* node : graph.nodes()) {
    for (const Value* value : node->written_inputs()) {
      const Node* from = value->producer();
      const bool state = from->kind() == NodeKind::GetAttr;
      const bool is_maker = from->is_call() && letters_of(from->op_name()) == maker;
      (is_maker ? likely : others)
          .push_back((state ? from->target() : "%" + value->name()) + " by " + with_place(*node));
    }
  }
  return likely.empty() ? others : likely;
}

// Returns the nodes of the operator that has no derivative: "derivative for aten::heaviside is not implemented", or
// "the derivative for 'igamma: input' is not implemented".
std::vector<std::string> without_derivative(const Graph& graph, const std::string& words) {
  const std::string quoted = between(words, "derivative for '", ":'");
  const std::string name = letters_of(quoted.empty() ? between(words, "derivative for ", " ") : quoted);
  std::vector<std::string> nodes;
  for (const Node* node : graph.nodes()) {
    if (node->is_call() && letters_of(node->op_name()) == name) nodes.push_back(with_place(*node));
  }
  return nodes;
}

}  // namespace

void rethrow_named(const Graph& graph, const std::exception& error) {
  const auto* own = dynamic_cast<const Error*>(&error);
  const std::string words = own ? own->message() : first_line(error_text(error));
  const bool written = words.find("modified by an inplace operation") != words.npos;
  if (!written && (words.find("derivative for ") == words.npos || words.find(" is not implemented") == words.npos))
    throw;
  std::vector<std::string> named = written ? writes(graph, words) : without_derivative(graph, words);
  constexpr size_t kMost = 4;
  const size_t more = named.size() - std::min(named.size(), kMost);
  named.resize(named.size() - more);
  const std::string nodes = join(named, {}, "; ") + (more == 0 ? "" : "; and " + std::to_string(more) + " more");
  const std::string text = words.substr(0, words.find(" Hint: ")) + (written || words.ends_with('.') ? "" : ".");
  const char* remedy = written ? "write to a clone() of the value, or compute without writing"
                               : "detach() what it takes, or compute it from operators that have one";
  std::throw_with_nested(
      Error(own ? own->kind() : ErrorKind::ExecutionFailed,
            text + (nodes.empty() ? "" : (written ? " Written in place: " : " It is of ") + nodes + "."),
            own ? own->where() : "", own && !own->remedy().empty() ? own->remedy() : remedy));
}

}  // namespace plumb
