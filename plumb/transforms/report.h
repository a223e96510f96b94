// The report of a transform, node by node: which operator replaced which, which adds are residual with which tau, which
// nodes were left alone and why. Printable as text and as JSON.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

enum class ReportKind {
  Replaced,       // an operator by another
  Residual,       // an add by a residual layer with weight tau
  Unconstrained,  // an operator's scales are no longer tied together
  Weight,         // a parameter was divided by its standard deviation
  Bias,           // a parameter was set to zero
  Quantised,      // inputs rounded to a format, or the gradient of the output
  Tracked,        // a value is measured
  Folded,         // a parameter or buffer was divided by a factor
  Remains,        // a factor that no parameter takes stays, as a multiplication
  LeftAlone,      // nothing was done, and `reason` says why
};
std::string_view to_string(ReportKind kind);  // "replaced", ..., "left_alone"

struct ReportEntry {
  ReportKind kind = ReportKind::LeftAlone;
  std::string node;    // the value's name; for Weight and Bias the parameter's full name
  std::string module;  // path of the module that calls it, "" when unknown or the root
  std::string source;  // "model.py:12", "" when unknown
  std::string from;    // operator before, or the statistic that was changed
  std::string to;      // operator after
  std::optional<double> tau;
  std::string reason;
  bool asked = false;  // the caller's map of operators wanted it, no rule

  // Returns the texts that may be empty, by the names of their fields in JSON and Python.
  std::array<std::pair<const char*, std::string_view>, 5> texts() const {
    return {{{"module", module}, {"source", source}, {"from", from}, {"to", to}, {"reason", reason}}};
  }
};

class Report {
 public:
  explicit Report(std::string pass = "") : pass_(std::move(pass)) {}

  const std::string& pass() const { return pass_; }
  const std::vector<ReportEntry>& entries() const { return entries_; }
  void add(ReportEntry entry) { entries_.push_back(std::move(entry)); }
  // Adds an entry about this node, with its name, module path and source line filled in.
  ReportEntry& add(ReportKind kind, const Node* node, std::string from = "", std::string to = "",
                   std::string reason = "");

  // Takes out entries that a later stage of a pass has made untrue.
  void drop(ReportKind kind, const std::unordered_set<std::string>& nodes);

  size_t count(ReportKind kind) const;
  std::vector<const ReportEntry*> of_kind(ReportKind kind) const;
  // Returns null unless there is an entry of this kind for a node or parameter of this name.
  const ReportEntry* find(ReportKind kind, std::string_view node) const;

  // Returns one line an entry, under a line of counts.
  std::string to_text() const;
  std::vector<std::string> lines() const;
  // {"pass": ..., "entries": [{"kind": ..., "node": ..., ...}]}; empty fields are left out.
  std::string to_json() const;

 private:
  std::string pass_;
  std::vector<ReportEntry> entries_;
};

}  // namespace plumb
