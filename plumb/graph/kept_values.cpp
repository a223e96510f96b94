#include "plumb/graph/kept_values.h"

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

// Returns the letters of the operator in autograd's "which is output 0 of ExpBackward0, is at version 1"; "" if it says
// none.
std::string maker_in(const std::string& words) {
  const size_t at = words.find("which is output ");
  if (at == words.npos) return "";
  const size_t begin = words.find(" of ", at) + 4;
  const std::string maker = letters_of(words.substr(begin, words.find_first_of(", ;.", begin) - begin));
  return maker.substr(0, maker.rfind("backward"));
}

}  // namespace

void rethrow_with_writes(const Graph& graph, const std::exception& error) {
  const auto* own = dynamic_cast<const Error*>(&error);
  const std::string words = own ? own->message() : first_line(error_text(error));
  if (words.find("modified by an inplace operation") == words.npos) throw;
  const std::string maker = maker_in(words);
  std::vector<std::string> likely, others;
  for (const Node* node : graph.nodes()) {
    for (const Value* value : node->written_inputs()) {
      const Node* from = value->producer();
      const bool state = from->kind() == NodeKind::GetAttr;
      const std::string where = node->meta().where();
      const std::string text = (state ? from->target() : "%" + value->name()) + " by " + node->describe() +
                               (where.empty() ? "" : " at " + where);
      (from->is_call() && letters_of(from->op_name()) == maker ? likely : others).push_back(text);
    }
  }
  std::vector<std::string>& named = likely.empty() ? others : likely;
  constexpr size_t kMost = 4;
  const size_t more = named.size() - std::min(named.size(), kMost);
  named.resize(named.size() - more);
  const std::string nodes = join(named, {}, "; ") + (more == 0 ? "" : "; and " + std::to_string(more) + " more");
  std::throw_with_nested(Error(
      own ? own->kind() : ErrorKind::ExecutionFailed,
      words.substr(0, words.find(" Hint: ")) + (nodes.empty() ? "" : " Written in place: " + nodes + "."),
      own ? own->where() : "",
      own && !own->remedy().empty() ? own->remedy() : "write to a clone() of the value, or compute without writing"));
}

}  // namespace plumb
