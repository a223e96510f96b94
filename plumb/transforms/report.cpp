#include "plumb/transforms/report.h"

#include <map>
#include <nlohmann/json.hpp>

#include "plumb/core/table.h"

namespace plumb {

std::string_view to_string(ReportKind kind) {
  switch (kind) {
    case ReportKind::Replaced: return "replaced";
    case ReportKind::Residual: return "residual";
    case ReportKind::Unconstrained: return "unconstrained";
    case ReportKind::Weight: return "weight";
    case ReportKind::Bias: return "bias";
    case ReportKind::Quantised: return "quantised";
    case ReportKind::Tracked: return "tracked";
    case ReportKind::Folded: return "folded";
    case ReportKind::Remains: return "remains";
    case ReportKind::LeftAlone: return "left_alone";
  }
  return "unknown";
}

ReportEntry& Report::add(ReportKind kind, const Node* node, std::string from, std::string to, std::string reason) {
  ReportEntry entry;
  entry.kind = kind;
  if (node->num_results() > 0) entry.node = node->result(0)->name();
  entry.module = node->meta().module_path();
  if (const auto& source = node->meta().source) {
    const size_t slash = source->file.rfind('/');
    entry.source = (slash == std::string::npos ? source->file : source->file.substr(slash + 1)) + ":" +
                   std::to_string(source->line);
  }
  entry.from = std::move(from);
  entry.to = std::move(to);
  entry.reason = std::move(reason);
  entries_.push_back(std::move(entry));
  return entries_.back();
}

void Report::drop(ReportKind kind, const std::unordered_set<std::string>& nodes) {
  std::erase_if(entries_, [&](const ReportEntry& entry) { return entry.kind == kind && nodes.contains(entry.node); });
}

size_t Report::count(ReportKind kind) const { return of_kind(kind).size(); }

std::vector<const ReportEntry*> Report::of_kind(ReportKind kind) const {
  std::vector<const ReportEntry*> found;
  for (const auto& entry : entries_) {
    if (entry.kind == kind) found.push_back(&entry);
  }
  return found;
}

const ReportEntry* Report::find(ReportKind kind, std::string_view node) const {
  for (const auto& entry : entries_) {
    if (entry.kind == kind && entry.node == node) return &entry;
  }
  return nullptr;
}

std::vector<std::string> Report::lines() const {
  std::vector<std::string> lines;
  for (const auto& e : entries_) {
    std::string line = std::string(to_string(e.kind)) + " " + e.node;
    if (!e.from.empty()) line += " " + e.from;
    if (!e.to.empty()) line += " -> " + e.to;
    if (e.tau) line += " tau=" + short_number(*e.tau, 6);
    if (!e.reason.empty()) line += ": " + e.reason;
    if (!e.module.empty()) line += " [" + e.module + "]";
    if (!e.source.empty()) line += " (" + e.source + ")";
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string Report::to_text() const {
  std::map<ReportKind, size_t> counts;
  for (const auto& entry : entries_) ++counts[entry.kind];
  std::string text = pass_ + ":";
  if (entries_.empty()) text += " nothing to do";
  bool first = true;
  for (const auto& [kind, n] : counts) {
    text += (first ? " " : ", ") + std::to_string(n) + " " + std::string(to_string(kind));
    first = false;
  }
  text += "\n";
  for (const auto& line : lines()) text += "  " + line + "\n";
  return text;
}

std::string Report::to_json() const {
  nlohmann::ordered_json entries = nlohmann::ordered_json::array();
  for (const auto& e : entries_) {
    nlohmann::ordered_json entry = {{"kind", std::string(to_string(e.kind))}, {"node", e.node}};
    for (const auto& [name, text] : e.texts()) {
      if (!text.empty()) entry[name] = text;
    }
    if (e.tau) entry["tau"] = *e.tau;
    if (e.asked) entry["asked"] = true;
    entries.push_back(std::move(entry));
  }
  nlohmann::ordered_json all = {{"pass", pass_}, {"entries", std::move(entries)}};
  // Names from a model may hold any bytes.
  return all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace plumb
