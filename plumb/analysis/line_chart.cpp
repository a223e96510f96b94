#include "plumb/analysis/line_chart.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "plumb/analysis/svg.h"
#include "plumb/core/error.h"
#include "plumb/core/table.h"

namespace plumb {
namespace {

constexpr size_t kMostPoints = 50000;

double step_of(const Curve& curve, size_t i) { return curve.steps.empty() ? static_cast<double>(i) : curve.steps[i]; }

// In every stretch of indices the smallest and the largest, so that peaks stay.
std::vector<size_t> thinned(const std::vector<double>& values) {
  std::vector<size_t> kept;
  const size_t n = values.size();
  if (n <= kMostPoints) {
    for (size_t i = 0; i < n; ++i) kept.push_back(i);
    return kept;
  }
  const size_t stretches = kMostPoints / 2;
  for (size_t s = 0; s < stretches; ++s) {
    const size_t begin = s * n / stretches, end = (s + 1) * n / stretches;
    size_t low = begin, high = begin;
    for (size_t i = begin; i < end; ++i) {
      // A value that is not finite must stay, to break the line.
      if (!std::isfinite(values[i])) low = i;
      if (values[i] < values[low]) low = i;
      if (values[i] > values[high]) high = i;
    }
    kept.push_back(std::min(low, high));
    if (low != high) kept.push_back(std::max(low, high));
  }
  if (kept.back() != n - 1) kept.push_back(n - 1);
  return kept;
}

void check(const Curve& curve, const LineChart& chart) {
  auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::InvalidArgument, "curve \"" + curve.name + "\": " + what, chart.title,
                "give one step a value, ascending, or no steps at all");
  };
  if (!curve.steps.empty() && curve.steps.size() != curve.values.size()) {
    fail(std::to_string(curve.steps.size()) + " steps for " + std::to_string(curve.values.size()) + " values");
  }
  for (size_t i = 0; i < curve.steps.size(); ++i) {
    if (!std::isfinite(curve.steps[i]) || (i && curve.steps[i] < curve.steps[i - 1])) fail("its steps do not ascend");
  }
}

bool equal(const Curve& a, const Curve& b) {
  if (a.values.size() != b.values.size() || a.values.empty()) return false;
  for (size_t i = 0; i < a.values.size(); ++i) {
    const bool same = a.values[i] == b.values[i] || (std::isnan(a.values[i]) && std::isnan(b.values[i]));
    if (!same || step_of(a, i) != step_of(b, i)) return false;
  }
  return true;
}

}  // namespace

std::string to_html(const LineChart& chart, RunColors& colors) {
  nlohmann::json data = {{"x_label", chart.x_label},
                         {"y_label", chart.y_label},
                         {"height", std::max(80, chart.height)},
                         {"log", chart.log_y},
                         {"smooth", std::max(1, chart.smooth)},
                         {"curves", nlohmann::json::array()}};
  for (const Curve& curve : chart.curves) {
    check(curve, chart);
    std::vector<float> values;
    std::vector<double> steps;
    std::vector<double> usable = curve.values;
    for (double& v : usable) v = std::isfinite(v) ? v : NAN;
    const std::vector<size_t> kept = thinned(usable);
    for (size_t i : kept) {
      values.push_back(static_cast<float>(usable[i]));
      steps.push_back(step_of(curve, i));
    }
    data["curves"].push_back({{"name", curve.name},
                              {"color", colors.of(curve.name) % svg::kSeriesColors},
                              {"dashed", curve.dashed},
                              {"y", svg::packed(values)}});
    if (!curve.steps.empty() || kept.size() < curve.values.size()) data["curves"].back()["x"] = svg::packed(steps);
  }
  return "<figure class=\"line-chart\">\n" +
         (chart.title.empty() ? "" : "<h3>" + svg::escaped(chart.title) + "</h3>\n") + svg::data_script(data) +
         "</figure>\n";
}

std::string conclusion(const LineChart& chart) {
  struct End {
    const Curve* curve;
    double value;
  };
  std::vector<End> ends;
  std::string more;
  const size_t window = static_cast<size_t>(std::max(1, chart.smooth));
  for (size_t c = 0; c < chart.curves.size(); ++c) {
    const Curve& curve = chart.curves[c];
    const auto twin = std::find_if(chart.curves.begin(), chart.curves.begin() + static_cast<std::ptrdiff_t>(c),
                                   [&](const Curve& other) { return equal(curve, other); });
    if (twin != chart.curves.begin() + static_cast<std::ptrdiff_t>(c)) {
      more += " **" + curve.name + "** equals **" + twin->name + "** at every " + chart.x_label + ", bit for bit.";
      continue;
    }
    size_t last = curve.values.size();
    while (last > 0 && !std::isfinite(curve.values[last - 1])) --last;
    if (last < curve.values.size()) {
      more += " **" + curve.name + "** is not finite from " + chart.x_label + " " + short_number(step_of(curve, last)) +
              " on.";
      continue;
    }
    double sum = 0, n = 0;
    for (size_t i = last; i-- > 0 && step_of(curve, i) > step_of(curve, last - 1) - static_cast<double>(window);) {
      if (std::isfinite(curve.values[i])) sum += curve.values[i], ++n;
    }
    if (n > 0) ends.push_back({&curve, sum / n});
  }
  if (ends.empty()) return more.empty() ? "No run has a value." : more.substr(1);
  std::ranges::stable_sort(ends, {}, &End::value);
  std::string out = "**" + ends[0].curve->name + "** ends " + (ends.size() > 1 ? "lowest, " : "") + "at " +
                    short_number(ends[0].value);
  if (window > 1) out += " (mean of the last " + std::to_string(window) + " " + chart.x_label + "s)";
  if (ends.size() == 1) {
    const auto& values = ends[0].curve->values;
    const double first = *std::ranges::find_if(values, [](double v) { return std::isfinite(v); });
    const auto largest = std::ranges::max_element(
        values, [](double a, double b) { return std::isfinite(b) && (!std::isfinite(a) || a < b); });
    if (chart.peak && std::ranges::all_of(values, [&](double v) { return !std::isfinite(v) || v == first; }))
      return "**" + ends[0].curve->name + "** is " + short_number(first) + " at every " + chart.x_label + "." + more;
    out += " and began at " + short_number(first);
    if (chart.peak) {
      out += "; its peak is " + short_number(*largest) + ", at " + chart.x_label + " " +
             short_number(step_of(*ends[0].curve, static_cast<size_t>(largest - values.begin())));
    }
  }
  for (size_t i = 1; i < ends.size(); ++i) {
    out += (i == 1 ? "; **" : ", **") + ends[i].curve->name + "** at " + short_number(ends[i].value);
    if (ends[0].value > 0) out += " (" + percent(ends[i].value / ends[0].value - 1) + " above)";
  }
  return out + "." + more;
}

}  // namespace plumb
