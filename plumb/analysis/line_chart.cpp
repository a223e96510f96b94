#include "plumb/analysis/line_chart.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "plumb/analysis/svg.h"
#include "plumb/analysis/table.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

using svg::number;

constexpr size_t kMostPoints = 2400;

// A curve as it is drawn.
struct Drawn {
  std::vector<double> x, raw, y;
  std::optional<double> lost;  // the step from which no value is finite
};

double mean_of_last(const std::vector<double>& values, size_t i, size_t window) {
  double sum = 0;
  int n = 0;
  for (size_t k = i + 1 - std::min(i + 1, window); k <= i; ++k) {
    if (std::isfinite(values[k])) sum += values[k], ++n;
  }
  return n ? sum / n : NAN;
}

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
      // What is not finite must stay to break the line.
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

Drawn drawn(const Curve& curve, const LineChart& chart) {
  const size_t n = curve.values.size();
  auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::InvalidArgument, "curve \"" + curve.name + "\": " + what, chart.title,
                "give one step a value, ascending, or no steps at all");
  };
  if (!curve.steps.empty() && curve.steps.size() != n) {
    fail(std::to_string(curve.steps.size()) + " steps for " + std::to_string(n) + " values");
  }
  for (size_t i = 0; i < curve.steps.size(); ++i) {
    if (!std::isfinite(curve.steps[i]) || (i && curve.steps[i] < curve.steps[i - 1])) fail("its steps do not ascend");
  }
  std::vector<double> usable = curve.values;
  for (double& v : usable) {
    if (!std::isfinite(v) || (chart.log_y && v <= 0)) v = NAN;
  }
  Drawn out;
  for (size_t i : thinned(usable)) {
    out.x.push_back(curve.steps.empty() ? static_cast<double>(i) : curve.steps[i]);
    out.raw.push_back(usable[i]);
    out.y.push_back(chart.smooth > 1 && std::isfinite(usable[i])
                        ? mean_of_last(usable, i, static_cast<size_t>(chart.smooth))
                        : usable[i]);
  }
  size_t last = n;
  while (last > 0 && !std::isfinite(curve.values[last - 1])) --last;
  if (last < n) out.lost = curve.steps.empty() ? static_cast<double>(last) : curve.steps[last];
  return out;
}

struct Frame {
  double left = 64, top = 0, width = 0, height = 0;  // of the plot
  double x0 = 0, x1 = 1, y0 = 0, y1 = 1;             // of the data; y in log10 if log
  bool log = false;
  double px(double x) const { return left + (x - x0) / (x1 - x0) * width; }
  double value(double y) const { return log ? std::log10(y) : y; }
  double py(double y) const { return top + height - (value(y) - y0) / (y1 - y0) * height; }
};

void widen(double& lo, double& hi, double share) {
  if (!(lo <= hi)) lo = 0, hi = 1;
  double by = (hi - lo) * share;
  if (!(hi > lo)) by = std::max(0.5, std::fabs(hi) * 0.05);
  lo -= by, hi += by;
}

Frame frame_of(const LineChart& chart, const std::vector<Drawn>& curves, double top) {
  Frame f;
  f.log = chart.log_y;
  f.top = top;
  f.width = std::max(100, chart.width) - f.left - 20;
  f.height = std::max(60.0, chart.height - top - 46);
  f.x0 = f.y0 = INFINITY, f.x1 = f.y1 = -INFINITY;
  for (const Drawn& c : curves) {
    for (size_t i = 0; i < c.x.size(); ++i) {
      f.x0 = std::min(f.x0, c.x[i]), f.x1 = std::max(f.x1, c.x[i]);
      if (!std::isfinite(c.y[i])) continue;
      f.y0 = std::min(f.y0, f.value(c.y[i])), f.y1 = std::max(f.y1, f.value(c.y[i]));
    }
  }
  auto limit = [&](const std::optional<double>& y, double& side) {
    if (!y) return;
    if (!std::isfinite(*y) || (f.log && *y <= 0)) {
      throw Error(ErrorKind::InvalidArgument, "a limit of the y axis is not on it: " + short_number(*y), chart.title);
    }
    side = f.value(*y);
  };
  widen(f.x0, f.x1, 0);
  widen(f.y0, f.y1, 0.04);
  limit(chart.y_min, f.y0);
  limit(chart.y_max, f.y1);
  if (!(f.y0 < f.y1)) f.y1 = f.y0 + 1;
  return f;
}

std::string axes(const LineChart& chart, const Frame& f) {
  std::string out;
  std::vector<double> marks = svg::ticks(f.y0, f.y1, 6);
  if (f.log) {
    marks.clear();
    for (double e = std::floor(f.y0); e <= f.y1; ++e) {
      for (int m : {1, 2, 5}) {
        if (m > 1 && f.y1 - f.y0 > 3) continue;
        const double at = e + std::log10(m);
        if (at >= f.y0 && at <= f.y1) marks.push_back(at);
      }
    }
    if (marks.size() < 2 || marks.size() > 14) marks = svg::ticks(f.y0, f.y1, 6);
  }
  for (double m : marks) {
    const double y = f.top + f.height - (m - f.y0) / (f.y1 - f.y0) * f.height;
    out += svg::line(f.left, y, f.left + f.width, y, "grid");
    out += svg::text(f.left - 8, y + 4, short_number(f.log ? std::pow(10, m) : m), {"muted", "end", 11});
  }
  for (double x : svg::ticks(f.x0, f.x1, 10)) {
    out += svg::line(f.px(x), f.top + f.height, f.px(x), f.top + f.height + 4, "axis");
    out += svg::text(f.px(x), f.top + f.height + 17, short_number(x), {"muted", "middle", 11});
  }
  out += svg::line(f.left, f.top + f.height, f.left + f.width, f.top + f.height, "axis");
  out += svg::text(f.left + f.width / 2, f.top + f.height + 36, chart.x_label, {"muted", "middle", 12});
  const std::string y_label = chart.y_label + (f.log && !chart.y_label.empty() ? " (log)" : "");
  if (!y_label.empty()) {
    out += "<g transform=\"translate(14 " + number(f.top + f.height / 2) + ") rotate(-90)\">" +
           svg::text(0, 0, y_label, {"muted", "middle", 12}) + "</g>";
  }
  return out + "\n";
}

std::string path_of(const Frame& f, const std::vector<double>& x, const std::vector<double>& y) {
  std::string path;
  bool pen = false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(y[i])) {
      pen = false;
      continue;
    }
    path += (pen ? "L" : "M") + number(f.px(x[i]) - f.left) + " " + number(f.py(y[i]) - f.top);
    // A lone point is drawn by the line's round ends.
    if (!pen && (i + 1 == x.size() || !std::isfinite(y[i + 1]))) path += "h0";
    pen = true;
  }
  return path;
}

std::string draw(const LineChart& chart, bool standalone, nlohmann::json* data) {
  std::vector<Drawn> curves;
  for (const Curve& curve : chart.curves) curves.push_back(drawn(curve, chart));

  std::string body, legend;
  double y = 0;
  if (!chart.title.empty()) body += svg::text(0, y += 18, chart.title, {"text", "start", 15, true});
  double x = 0;
  y += 24;
  for (size_t i = 0; i < curves.size(); ++i) {
    const std::string& name = chart.curves[i].name;
    const double width = 40 + svg::text_width(name, 12.5);
    if (x > 0 && x + width > chart.width) x = 0, y += 20;
    const std::string color(svg::series_color(i));
    legend += "<g class=\"legend " + svg::series_class(i) + "\" data-curve=\"" + std::to_string(i) +
              "\"><line class=\"line\" stroke=\"" + color + "\" stroke-width=\"3\"" +
              (chart.curves[i].dashed ? " stroke-dasharray=\"5 3\"" : "") + " x1=\"" + number(x) + "\" x2=\"" +
              number(x + 18) + "\" y1=\"" + number(y - 4) + "\" y2=\"" + number(y - 4) + "\"/>" +
              svg::text(x + 24, y, name, {"text", "start", 12.5}) + "</g>\n";
    x += width;
  }
  const Frame f = frame_of(chart, curves, y + 14);
  body += legend + axes(chart, f);
  // An inner picture cuts off what lies beyond the plot.
  body += "<svg x=\"" + number(f.left) + "\" y=\"" + number(f.top) + "\" width=\"" + number(f.width) + "\" height=\"" +
          number(f.height) + "\" overflow=\"hidden\">\n";
  for (size_t i = 0; i < curves.size(); ++i) {
    const Drawn& c = curves[i];
    const std::string color(svg::series_color(i));
    const std::string stroke =
        "\" class=\"line\" fill=\"none\" stroke-linejoin=\"round\" stroke-linecap=\"round\" stroke=\"" + color + "\"";
    body += "<g class=\"curve " + svg::series_class(i) + "\" data-curve=\"" + std::to_string(i) + "\">";
    if (chart.smooth > 1) {
      body += "<path d=\"" + path_of(f, c.x, c.raw) + stroke + " stroke-width=\"1\" opacity=\"0.22\"/>";
    }
    body += "<path d=\"" + path_of(f, c.x, c.y) + stroke + " stroke-width=\"2\"" +
            (chart.curves[i].dashed ? " stroke-dasharray=\"7 4\"" : "") + "/>";
    if (c.lost) {
      size_t last = c.y.size();
      while (last > 0 && !std::isfinite(c.y[last - 1])) --last;
      const double cy = last ? std::clamp(f.py(c.y[last - 1]) - f.top, 8.0, f.height - 8) : 10;
      const double cx = std::clamp(f.px(*c.lost) - f.left, 6.0, f.width - 6);
      body += "<path class=\"line\" stroke=\"" + color + "\" stroke-width=\"2.5\" d=\"M" + number(cx - 5) + " " +
              number(cy - 5) + "l10 10m0 -10l-10 10\"><title>" + svg::escaped(chart.curves[i].name) +
              ": not finite from " + svg::escaped(chart.x_label) + " " + short_number(*c.lost) + " on</title></path>";
    }
    body += "</g>\n";
  }
  body += "</svg>\n";

  if (data) {
    *data = {{"left", f.left},
             {"top", f.top},
             {"width", f.width},
             {"height", f.height},
             {"x0", f.x0},
             {"x1", f.x1},
             {"y0", f.y0},
             {"y1", f.y1},
             {"log", f.log},
             {"x_label", chart.x_label},
             {"curves", nlohmann::json::array()}};
    for (size_t i = 0; i < curves.size(); ++i) {
      auto values = nlohmann::json::array();
      for (double v : curves[i].y) {
        values.push_back(std::isfinite(v) ? nlohmann::json(std::stod(short_number(v))) : nlohmann::json());
      }
      (*data)["curves"].push_back({{"name", chart.curves[i].name}, {"x", curves[i].x}, {"y", std::move(values)}});
    }
  }
  return svg::picture(chart.width, std::max<double>(chart.height, f.top + f.height + 46), body, standalone);
}

}  // namespace

std::string to_svg(const LineChart& chart) { return draw(chart, true, nullptr); }

std::string to_html(const LineChart& chart) {
  nlohmann::json data;
  const std::string picture = draw(chart, false, &data);
  return "<figure class=\"line-chart\">\n" + picture + "<script type=\"application/json\">" +
         svg::script_json(data.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)) +
         "</script>\n</figure>\n";
}

}  // namespace plumb
