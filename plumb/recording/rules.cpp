#include "plumb/recording/rules.h"

#include <cmath>
#include <initializer_list>
#include <sstream>

#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/toml_text.h"

namespace plumb {
namespace {

// Reads one document and knows where it stands in it.
class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  RecordRules read(const toml::table& document) {
    check_keys(document, {"every", "rule"}, "every = 10 and [[rule]] tables");
    RecordRules out;
    const int64_t every = count(document, "every", 10);
    const toml::node* rules = document.get("rule");
    if (rules == nullptr) {
      throw Error(ErrorKind::InvalidArgument, file_ + ": has no rule, so nothing would be recorded", "",
                  "write [[rule]] for one that records everything");
    }
    if (!rules->is_array() || rules->as_array()->empty()) fail(*rules, "rule", "is no list of tables", "[[rule]]");
    for (const toml::node& each : *rules->as_array()) {
      if (!each.is_table()) fail(each, "rule", "is no table", "[[rule]]");
      out.rules.push_back(rule(*each.as_table(), every));
    }
    return out;
  }

  [[noreturn]] void fail(const toml::node& at, const std::string& key, const std::string& what,
                         const std::string& fix) const {
    throw Error(ErrorKind::InvalidArgument, place(at.source().begin) + ": " + key + " " + what, "", fix);
  }

  std::string place(const toml::source_position& at) const { return c10::str(file_, ":", at.line); }

 private:
  void check_keys(const toml::table& table, std::initializer_list<std::string_view> known,
                  const std::string& fix) const {
    for (const auto& [key, value] : table) {
      if (std::ranges::find(known, key.str()) == known.end()) {
        throw Error(ErrorKind::UnknownName,
                    place(key.source().begin) + ": \"" + std::string(key.str()) + "\" is no key that is known here", "",
                    fix);
      }
    }
  }

  int64_t count(const toml::table& table, const char* key, int64_t otherwise) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) return otherwise;
    const auto value = node->value_exact<int64_t>();
    if (!value || *value < 1) {
      fail(*node, key, "is no number of steps", c10::str(key, " = ", otherwise));
    }
    return *value;
  }

  std::string word(const toml::node& node, const std::string& key, const std::string& fix) const {
    const auto value = node.value_exact<std::string>();
    if (!value || value->empty()) fail(node, key, "is no text", fix);
    return *value;
  }

  std::vector<std::string> words(const toml::table& table, const char* key, const std::string& fix) const {
    const toml::node* node = table.get(key);
    if (node == nullptr) return {"*"};
    std::vector<std::string> out;
    if (const toml::array* list = node->as_array()) {
      for (const toml::node& each : *list) out.push_back(word(each, key, fix));
      if (out.empty()) fail(*node, key, "is an empty list, which no tensor fits", fix);
    } else {
      out.push_back(word(*node, key, fix));
    }
    return out;
  }

  Statistic statistic(const toml::node& node, const std::string& key) const {
    const std::string text = word(node, key, key + " = \"std\"");
    try {
      return Statistic::parse(text);
    } catch (const Error& e) {
      fail(node, key + ":", e.message(), e.remedy());
    }
  }

  RecordCondition condition(const toml::node& node) const {
    const std::string fix = "when = { statistic = \"nan_count\", above = 0 }";
    const toml::table* table = node.as_table();
    if (table == nullptr) fail(node, "when", "is no table", fix);
    check_keys(*table, {"statistic", "above", "below"}, fix);
    const toml::node* of = table->get("statistic");
    if (of == nullptr) fail(node, "when", "has no statistic", fix);
    RecordCondition out{statistic(*of, "statistic")};
    if (out.statistic.kind == StatisticKind::Histogram || out.statistic.kind == StatisticKind::Hash) {
      fail(*of, "statistic", "of a condition must be a number, and a " + out.statistic.to_string() + " is none", fix);
    }
    for (const auto& [key, into] : {std::pair{"above", &out.above}, std::pair{"below", &out.below}}) {
      const toml::node* limit = table->get(key);
      if (limit == nullptr) continue;
      const auto value = limit->value<double>();
      if (!limit->is_number() || !value || std::isnan(*value)) fail(*limit, key, "is no number", fix);
      *into = value;
    }
    if (!out.above && !out.below) fail(node, "when", "says neither above nor below what", fix);
    return out;
  }

  RecordRule rule(const toml::table& table, int64_t every) const {
    check_keys(table, {"name", "operator", "direction", "statistics", "every", "when", "then", "limit"},
               "name, operator, direction, statistics, every, when, then or limit");
    RecordRule out;
    out.where = place(table.source().begin);
    out.names = words(table, "name", "name = \"layers.*.attn*\", or a list of such patterns");
    out.operators = words(table, "operator", "operator = \"aten::linear\", \"parameter\", \"input\" or a list");
    if (const toml::node* node = table.get("direction")) {
      const std::string fix = "direction = \"forward\", \"backward\" or \"both\"";
      const std::string text = word(*node, "direction", fix);
      if (text != "forward" && text != "backward" && text != "both") {
        fail(*node, "direction", "is \"" + text + "\"", fix);
      }
      out.forward = text != "backward", out.backward = text != "forward";
    }
    if (const toml::node* node = table.get("statistics")) {
      const toml::array* list = node->as_array();
      if (list == nullptr || list->empty()) {
        fail(*node, "statistics", "is no list with something in it", "statistics = [\"std\", \"underflow(e5m2)\"]");
      }
      out.statistics = 0;
      for (const toml::node& each : *list) out.statistics |= statistic(each, "statistics").bits();
    }
    out.every = count(table, "every", every);
    if (const toml::node* node = table.get("when")) out.when = condition(*node);
    for (const char* key : {"then", "limit"}) {
      const toml::node* node = table.get(key);
      if (node != nullptr && !out.when) {
        fail(*node, key, "is only for rules with a condition", "add when = { ... }, or take it out");
      }
    }
    out.limit = count(table, "limit", 100);
    if (const toml::node* node = table.get("then")) {
      if (word(*node, "then", "then = \"all\"") != "all") fail(*node, "then", "is not \"all\"", "then = \"all\"");
      out.then_all = true;
    }
    return out;
  }

  const std::string& file_;
};

}  // namespace

std::string RecordCondition::to_string() const {
  std::ostringstream out;
  if (above) out << statistic.to_string() << " > " << *above;
  if (above && below) out << " or ";
  if (below) out << statistic.to_string() << " < " << *below;
  return out.str();
}

bool RecordRule::histogram() const {
  return (statistics >> static_cast<unsigned>(StatisticKind::Histogram) & 1) ||
         (when && when->statistic.needs_histogram());
}

RecordRules RecordRules::everything(int64_t every) { return parse(c10::str("every = ", every, "\n\n[[rule]]\n")); }

RecordRules RecordRules::parse(std::string_view text, const std::string& file) {
  RecordRules out =
      Reader(file).read(parse_toml(text, file, "see docs/history.md for the rules' keys; texts stand in quotes"));
  out.text = text;
  return out;
}

RecordRules RecordRules::load(const std::filesystem::path& path) { return parse(read_file(path), path.string()); }

}  // namespace plumb
