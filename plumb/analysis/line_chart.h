// Named curves over steps: losses, learning rates, times.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// Numbers runs by name, in the order in which they are first named; a page draws run N in its color N (svg.h).
class RunColors {
 public:
  size_t of(std::string_view run) {
    const auto at = std::ranges::find(names_, run);
    if (at != names_.end()) return static_cast<size_t>(at - names_.begin());
    names_.emplace_back(run);
    return names_.size() - 1;
  }
  bool knows(std::string_view run) const { return std::ranges::find(names_, run) != names_.end(); }

 private:
  std::vector<std::string> names_;
};

struct Curve {
  std::string name;                // the run's: it has the same color everywhere on a page
  std::vector<double> values;      // NaN and infinities break the line and are marked
  std::vector<double> steps = {};  // ascending; empty: 0, 1, 2, ...
  bool dashed = false;
};

struct LineChart {
  std::string title;
  std::string x_label = "step";
  std::string y_label = {};
  std::vector<Curve> curves = {};
  bool log_y = false;  // values of zero and below are then left out
  // Above 1: a line is a mean over about the last `smooth` steps, weighted towards the last ones, and the values
  // themselves are faint behind it.
  int smooth = 1;
  bool peak = false;  // conclusion() names the largest value, too (of a learning rate)
  int height = 400;
};

// Returns the chart for a page, in a <figure> that its script draws: lines can be smoothed, hidden, hovered over and
// zoomed into, and the axis made logarithmic. A line that lies on another one stands out around it. Throws
// Error(InvalidArgument) that names the curve if the numbers of its steps and values differ, or its steps do not
// ascend. Long curves are thinned; peaks stay.
std::string to_html(const LineChart& chart, RunColors& colors);

// Returns the curves' last values, lowest first, and which are equal or lost: "B ends lowest, at 2.08 (mean of the last
// 30 steps); A is at 2.205, 6.0 % above. C equals B at every step." The mean is over the values of the last `smooth`
// steps: a curve with a value every 50 steps has its last one. It says so if no curve has a finite value.
std::string conclusion(const LineChart& chart);

}  // namespace plumb
