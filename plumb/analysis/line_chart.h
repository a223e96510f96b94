// Named curves over steps: losses, learning rates, times.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace plumb {

struct Curve {
  std::string name;
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
  // Above 1: a line is the mean of the last `smooth` values, and the values themselves are faint behind it.
  int smooth = 0;
  std::optional<double> y_min = {}, y_max = {};  // default: all that is drawn
  int width = 1160, height = 400;
};

// A picture that stands alone. Raises Error(InvalidArgument) that names the curve for steps of another number than
// values, or not ascending. Long curves are thinned; peaks stay.
std::string to_svg(const LineChart& chart);

// The same for a page, in a <figure> with what its script needs for hovering and for hiding curves.
std::string to_html(const LineChart& chart);

}  // namespace plumb
