#include "plumb/operators/operator_facts.h"

#include <algorithm>
#include <cctype>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/operators/operator_table.h"

namespace plumb {
namespace {

std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> found;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    found.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return found;
}

struct Table {
  std::deque<std::pair<std::string, OperatorFacts>> named;  // the facts' names refer to the strings
  std::unordered_map<std::string_view, const OperatorFacts*> by_name;

  Table() { add(torch_operators()); }

  void add(std::span<const OperatorGroup> groups) {
    for (const OperatorGroup& operators : groups) {
      for (std::string_view word : words(operators.names)) {
        auto& [name, facts] = named.emplace_back(std::string(operators.space).append(word), operators.facts);
        facts.name = name;
        if (!by_name.emplace(name, &facts).second)
          throw Error(ErrorKind::Internal, "two rows of operator facts for " + name);
      }
    }
  }

  const OperatorFacts* find(std::string_view name) const {
    auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : it->second;
  }
};

// A function's static, so that registration from other files' initializers is safe.
Table& facts_table() {
  static Table* table = new Table;
  return *table;
}

std::string_view without_overload(std::string_view name) { return name.substr(0, name.find('.')); }
std::string_view space_of(std::string_view name) { return name.substr(0, std::min(name.find("::"), name.size())); }

struct Allowed {
  std::mutex mutex;
  std::set<std::string, std::less<>> names;
};
Allowed& allowed() {
  static Allowed* a = new Allowed;
  return *a;
}

bool is_allowed(std::string_view name) {
  std::lock_guard lock(allowed().mutex);
  return allowed().names.count(name) || allowed().names.count(space_of(name));
}

bool is_plain_name(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

}  // namespace

RegisterOperators::RegisterOperators(std::initializer_list<OperatorGroup> groups) { facts_table().add(groups); }

const OperatorFacts* find_operator_facts(std::string_view name) { return facts_table().find(without_overload(name)); }

const OperatorFacts& operator_facts(std::string_view name) {
  static constexpr OperatorFacts kUnknown{.name = "", .refused = "plumb does not know it as tensor arithmetic"};
  name = without_overload(name);
  if (const OperatorFacts* own = facts_table().find(name)) return *own;
  const OperatorFacts* whole = facts_table().find(name.substr(0, space_of(name).size() + 2));
  return whole ? *whole : kUnknown;
}

std::span<const OperatorFacts* const> operator_table() {
  static const std::vector<const OperatorFacts*> rows = [] {
    std::vector<const OperatorFacts*> all;
    for (const auto& [name, facts] : facts_table().named) all.push_back(&facts);
    std::ranges::sort(all, {}, &OperatorFacts::name);
    return all;
  }();
  return rows;
}

std::optional<OperatorRefusal> refused_in_files(std::string_view name) {
  name = without_overload(name);
  const OperatorFacts* facts = &operator_facts(name);
  // "aten::add_" is the in-place form of "aten::add".
  if (facts->name != name && name.ends_with('_') && !name.ends_with("__")) {
    if (const OperatorFacts* twin = facts_table().find(name.substr(0, name.size() - 1))) facts = twin;
  }
  if (facts->refused.empty() || is_allowed(name)) return std::nullopt;
  const std::string text(name);
  std::string why(facts->refused);
  for (const auto& [prefixes, reason] : refused_families()) {
    for (std::string_view prefix : words(prefixes)) {
      if (facts->name.empty() && name.starts_with(prefix)) why = reason;
    }
  }
  if (facts->name.empty() && name.starts_with("aten::") && name.ends_with("_backward")) why = kTrustsSaved;
  return OperatorRefusal{text + " may not stand in a file: " + why,
                         "if you trust this file with it, allow it in every process that writes or reads it: "
                         "plumb::allow_operators(\"" +
                             text + "\"), in Python plumb.allow_operators(\"" + text + "\"), plumb --allow-operators " +
                             text + " COMMAND"};
}

void allow_operators(std::string_view name) {
  const std::string_view space = space_of(name);
  const std::string_view rest = name.substr(space.size());
  if (!is_plain_name(space) || (!rest.empty() && !is_plain_name(rest.substr(std::min<size_t>(2, rest.size()))))) {
    throw Error(ErrorKind::InvalidArgument, "allow_operators: '" + std::string(name) + "' names no operators", "",
                "give \"mylib::op\" without an overload, or a namespace \"mylib\"");
  }
  if (rest.empty() && is_torch_namespace(space)) {
    throw Error(ErrorKind::InvalidArgument,
                "allow_operators: '" + std::string(space) + "' is torch's own, and has operators that no file may call",
                "", "name the operators: \"" + std::string(space) + "::op\"");
  }
  std::lock_guard lock(allowed().mutex);
  allowed().names.emplace(name);
}

}  // namespace plumb
