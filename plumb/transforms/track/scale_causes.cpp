#include "plumb/transforms/track/scale_causes.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"

namespace plumb {
namespace {

// Logarithm of a scale; zero, infinite and NaN scales are far off.
double log_of(double scale) {
  constexpr double kFar = 1e3;
  return std::isnan(scale) ? kFar : std::clamp(std::log(scale), -kFar, kFar);
}

double log_std(const Metrics::Data& data) { return log_of(data.std); }
double log_size(const Metrics::Data& data) { return log_of(std::hypot(data.std, data.abs_mean)); }
bool is_near(double log_scale) { return std::abs(log_scale) <= std::log(2.0); }

// The change from one scale to the next, both logarithms: what leads away from 1. A step across 1 begins there.
double away(double from, double to) { return to - ((from < 0) == (to < 0) ? from : 0); }

struct Change {
  double by = 0;  // logarithm
  size_t node = 0;
  size_t uses = 0;  // number of uses of a value whose gradients add up; else 0
};

// The largest changes on the way to a tensor, downward and upward.
struct Changes {
  Change down, up;

  void take(const Change& change) {
    if (change.by < down.by) down = change;
    if (change.by > up.by) up = change;
  }
  void take_all(const Changes& others) {
    take(others.down);
    take(others.up);
  }
};

class CauseFinder {
 public:
  explicit CauseFinder(const ScalesGraph& graph)
      : nodes_(graph.nodes), users_(nodes_.size()), of_value_(nodes_.size()), of_gradient_(nodes_.size()) {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      for (size_t input : nodes_[i].inputs) {
        if (users_[input].empty() || users_[input].back() != i) users_[input].push_back(i);
      }
    }
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (value(i)) follow_value(i);
    }
    for (size_t i = nodes_.size(); i-- > 0;) {
      if (gradient(i)) follow_gradient(i);
    }
  }

  const Metrics::Data* value(size_t i) const {
    return nodes_[i].metrics && nodes_[i].metrics->fwd.numel > 1 ? &nodes_[i].metrics->fwd : nullptr;
  }
  const Metrics::Data* gradient(size_t i) const {
    return value(i) && nodes_[i].metrics->bwd ? &*nodes_[i].metrics->bwd : nullptr;
  }
  const Changes& of_value(size_t i) const { return of_value_[i]; }
  const Changes& of_gradient(size_t i) const { return of_gradient_[i]; }

 private:
  // True if the node's scale is the product of its first two inputs' scales.
  bool multiplies(size_t i) const {
    static const char* const kProducts[] = {"aten::mul.", "plumb::linear", "plumb::matmul", "plumb::conv"};
    const auto& inputs = nodes_[i].inputs;
    return inputs.size() >= 2 && value(inputs[0]) && value(inputs[1]) &&
           std::any_of(std::begin(kProducts), std::end(kProducts),
                       [&](const char* name) { return nodes_[i].target.starts_with(name); });
  }

  void follow_value(size_t i) {
    const double here = log_std(*value(i));
    if (multiplies(i)) {
      double expected = 0;
      for (size_t input : {nodes_[i].inputs[0], nodes_[i].inputs[1]}) {
        expected += log_size(*value(input));
        if (!is_near(log_std(*value(input)))) of_value_[i].take_all(of_value_[input]);
      }
      return of_value_[i].take({log_size(*value(i)) - expected, i});
    }
    std::optional<size_t> nearest;
    for (size_t input : nodes_[i].inputs) {
      if (!value(input)) continue;
      if (!nearest || std::abs(here - log_std(*value(input))) < std::abs(here - log_std(*value(*nearest))))
        nearest = input;
    }
    const double before = nearest ? log_std(*value(*nearest)) : 0;
    of_value_[i].take({away(before, here), i});
    if (!is_near(before)) of_value_[i].take_all(of_value_[*nearest]);
  }

  void follow_gradient(size_t i) {
    const double here = log_std(*gradient(i));
    std::optional<size_t> nearest;
    size_t uses = 0;
    for (size_t user : users_[i]) {
      if (!gradient(user)) continue;
      ++uses;
      if (!nearest || std::abs(here - log_std(*gradient(user))) < std::abs(here - log_std(*gradient(*nearest))))
        nearest = user;
    }
    if (!nearest) return of_gradient_[i].take({here, users_[i].empty() ? i : users_[i].front()});
    double before = log_std(*gradient(*nearest));
    if (!is_near(before)) of_gradient_[i].take_all(of_gradient_[*nearest]);
    const auto& inputs = nodes_[*nearest].inputs;
    if (multiplies(*nearest) && (inputs[0] == i || inputs[1] == i)) {
      const size_t other = inputs[0] == i ? inputs[1] : inputs[0];
      if (!is_near(log_std(*value(other)))) of_gradient_[i].take_all(of_value_[other]);
      before += log_size(*value(other));
    }
    const bool adds_up = uses > 1 && here > before;
    of_gradient_[i].take({away(before, here), adds_up ? i : *nearest, adds_up ? uses : 0});
  }

  const std::vector<ScaleNode>& nodes_;
  std::vector<std::vector<size_t>> users_;
  std::vector<Changes> of_value_, of_gradient_;
};

bool is_parameter(const ScaleNode& node) { return node.kind == NodeKind::GetAttr; }
const std::string& name_of(const ScaleNode& node) { return is_parameter(node) ? node.target : node.name; }

std::string reason_of(const ScaleNode& node, size_t uses,
                      const std::unordered_map<std::string, const ReportEntry*>& said) {
  if (uses) return "the gradients of " + std::to_string(uses) + " uses add up";
  if (is_parameter(node)) return "its scale is as the model made it";
  if (node.kind == NodeKind::Placeholder) return "its scale is the caller's";
  if (node.kind == NodeKind::Output) return "the loss gives gradients of this scale";
  auto it = said.find(node.name);
  if (it != said.end() && !it->second->reason.empty()) return it->second->reason;
  if (node.target.starts_with("plumb::"))
    return "its factors are for independent inputs of unit scale, and a constraint gives gradients that of the output";
  return "it is not unit-scaled: nothing makes up for what it does to the scale";
}

}  // namespace

std::vector<ScaleCause> scale_causes(const ScalesGraph& graph, const std::vector<Report>& reports, double low,
                                     double high) {
  if (!(low > 0 && low < high))
    throw Error(ErrorKind::InvalidArgument,
                str("scale_causes: limits must be 0 < low < high, got ", low, " and ", high));
  if (std::ranges::none_of(graph.nodes, [](const ScaleNode& node) { return node.metrics && node.metrics->bwd; }))
    throw Error(ErrorKind::InvalidState, "scale_causes: no gradient was measured", "",
                "a backward after the forward: loss.backward()");
  std::unordered_map<std::string, const ReportEntry*> said;
  for (const Report& report : reports) {
    for (const ReportEntry& entry : report.entries()) {
      const bool of_operator = entry.kind == ReportKind::Replaced || entry.kind == ReportKind::Residual ||
                               entry.kind == ReportKind::LeftAlone;
      if (of_operator) said.insert_or_assign(entry.node, &entry);
    }
  }
  const CauseFinder finder(graph);
  struct Group {
    ScaleCause cause;
    std::map<size_t, double> changes;
  };
  std::map<std::tuple<bool, bool, std::string, std::string>, Group> groups;
  auto explain = [&](size_t i, const Metrics::Data& data, bool gradients, const Changes& changes) {
    if (data.std >= low && data.std <= high) return;
    const bool small = data.std < low;
    const Change& change = small ? changes.down : changes.up;
    const ScaleNode& node = graph.nodes[change.node];
    const std::string target = is_parameter(node)                   ? "a parameter"
                               : node.kind == NodeKind::Placeholder ? "an input"
                                                                    : node.target;
    const std::string reason = reason_of(node, change.uses, said);
    auto [it, fresh] = groups.try_emplace(std::tuple(gradients, small, target, reason));
    auto& [cause, at] = it->second;
    if (fresh) cause = {gradients, small, target, reason, 1, data.std, data.std, {}, {}};
    cause.least = std::min(cause.least, data.std);
    cause.most = std::max(cause.most, data.std);
    cause.tensors.push_back(name_of(graph.nodes[i]));
    if (at.try_emplace(change.node, change.by).second) cause.nodes.push_back(name_of(node));
  };
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Metrics::Data* gradient = finder.gradient(i);
    if (!gradient) continue;
    if (!is_parameter(graph.nodes[i])) explain(i, *finder.value(i), false, finder.of_value(i));
    explain(i, *gradient, true, finder.of_gradient(i));
  }
  std::vector<ScaleCause> causes;
  for (auto& [key, group] : groups) {
    double sum = 0;
    for (const auto& [node, by] : group.changes) sum += by;
    group.cause.factor = std::exp(sum / static_cast<double>(group.changes.size()));
    causes.push_back(std::move(group.cause));
  }
  std::stable_sort(causes.begin(), causes.end(),
                   [](const auto& a, const auto& b) { return a.tensors.size() > b.tensors.size(); });
  return causes;
}

std::string to_text(const std::vector<ScaleCause>& causes) {
  std::ostringstream text;
  text.precision(3);
  auto few = [](const std::vector<std::string>& names) {
    return join(std::span(names).first(std::min<size_t>(names.size(), 3))) + (names.size() > 3 ? ", ..." : "");
  };
  for (const ScaleCause& cause : causes) {
    text << cause.tensors.size() << (cause.gradients ? " gradients" : " values")
         << (cause.small ? " are small" : " are large") << ", std " << cause.least << " to " << cause.most << " ("
         << few(cause.tensors) << "): x " << cause.factor << " at " << cause.nodes.size() << " x " << cause.target
         << " (" << few(cause.nodes) << "): " << cause.reason << "\n";
  }
  return text.str();
}

}  // namespace plumb
