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

}  // namespace

void rethrow_with_writes(const Graph& graph, const std::exception& error) {
  const auto* own = dynamic_cast<const Error*>(&error);
  const std::string words = own ? own->message() : first_line(error_text(error));
  if (words.find("modified by an inplace operation") == words.npos) throw;
  constexpr std::string_view kOf = "which is output ";
  std::string maker;
  if (const size_t at = words.find(kOf); at != words.npos) {
    const size_t begin = words.find(" of ", at) + 4;
    maker = letters_of(std::string_view(words).substr(begin, words.find_first_of(", ;.", begin) - begin));
    if (const size_t end = maker.rfind("backward"); end != maker.npos) maker.resize(end);
  }
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
