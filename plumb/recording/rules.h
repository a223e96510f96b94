// The rules of a recorder say what it measures, and when: a file in TOML (docs/history.md).
//
//   every = 10                                     # steps 1, 11, 21, ... for rules that do not say
//
//   [[rule]]
//   name = "layers.*.attn*"                        # a pattern or a list of them; of full names
//   operator = ["aten::linear", "parameter"]       # or "input", "buffer"; patterns too
//   direction = "backward"                         # "forward", "both"
//   statistics = ["std", "underflow(e5m2)"]        # all if left out
//   every = 50
//
//   [[rule]]
//   when = { statistic = "nan_count", above = 0 }  # recorded only where this holds
//   every = 1
//   then = "all"                                   # and the next step is recorded whole
//   limit = 20                                     # steps that this rule may record
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/recording/statistic.h"

namespace plumb {

struct RecordCondition {
  Statistic statistic;
  // One or both bounds: it holds beyond one of them. NaN is beyond nothing; nan_count counts it.
  std::optional<double> above = {}, below = {};

  bool holds(double value) const { return (above && value > *above) || (below && value < *below); }
  std::string to_string() const;  // "underflow(e5m2) > 0.01"
};

struct RecordRule {
  // A tensor is meant if one of its names fits one of the patterns, in which * stands for any text and ? for a
  // character; of operators "aten::add" stands for every overload.
  std::vector<std::string> names = {"*"}, operators = {"*"};
  bool forward = true, backward = true;
  uint16_t statistics = kAllStatistics;  // bits
  int64_t every = 10;
  std::optional<RecordCondition> when = {};
  bool then_all = false;
  int64_t limit = 100;     // steps that a rule with a condition records at most
  std::string where = {};  // "rules.toml:7"

  bool histogram() const;
  bool hash() const { return (statistics & kHashBit) != 0; }
};

struct RecordRules {
  std::vector<RecordRule> rules;
  std::string text;  // as it was read; kept in the history

  // Returns one rule: every tensor and gradient, with histograms, every `every` steps.
  static RecordRules everything(int64_t every = 10);
  // Throws Error(InvalidArgument) that names file, line and key, and what to write instead. `file` is for messages.
  static RecordRules parse(std::string_view text, const std::string& file = "rules");
  // Throws Error(BadFile) if the file cannot be read.
  static RecordRules load(const std::filesystem::path& path);
};

}  // namespace plumb
