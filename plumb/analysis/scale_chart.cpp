#include "plumb/analysis/scale_chart.h"

#include <algorithm>
#include <cstdio>
#include <list>
#include <unordered_map>

#include "plumb/analysis/svg.h"
#include "plumb/core/error.h"
#include "plumb/core/table.h"

namespace plumb {
namespace {

using svg::number;

constexpr size_t kMostRows = 20000;
constexpr double kLabel = 330, kPanel = 360, kLost = 46, kGap = 18;
constexpr double kPitch = 9;          // from one variant to the next in a row
constexpr double kLeastShare = 5e-3;  // least share of lost elements that gets a label

// One row of the picture: a tensor of each variant, or null.
struct Line {
  std::vector<const ScaleRow*> rows;
  const ScaleRow& any() const {
    return **std::ranges::find_if(rows, [](const ScaleRow* row) { return row != nullptr; });
  }
};

// Rows of the first variant in order; what only later ones have comes after what precedes it there.
std::vector<Line> merged(const ScaleChart& chart) {
  std::list<Line> lines;
  std::unordered_map<std::string, std::list<Line>::iterator> places;
  for (size_t v = 0; v < chart.variants.size(); ++v) {
    std::unordered_map<std::string, int> seen;
    auto next = lines.begin();
    for (const ScaleRow& row : chart.variants[v].rows) {
      std::string key = row.key.empty() ? row.module_path + '\n' + row.name : row.key;
      // Rows of the same key in one variant are not one tensor.
      if (const int again = seen[key]++) key += '\n' + std::to_string(again);
      auto [place, is_new] = places.try_emplace(key);
      if (is_new) {
        place->second = lines.insert(next, Line{std::vector<const ScaleRow*>(chart.variants.size())});
      }
      place->second->rows[v] = &row;
      next = std::next(place->second);
    }
  }
  return {std::make_move_iterator(lines.begin()), std::make_move_iterator(lines.end())};
}

struct Panel {
  bool bwd = false;
  double left = 0;
  int e0 = 0, e1 = 1;  // exponents at its sides
  const std::optional<FormatBand>* band = nullptr;

  const std::optional<ScaleStats>& stats(const ScaleRow& row) const { return bwd ? row.bwd : row.fwd; }
  double at_exponent(double e) const { return left + (std::clamp<double>(e, e0, e1) - e0) / (e1 - e0) * kPanel; }
  double at(double value) const { return at_exponent(value > 0 ? std::log2(value) : e0); }
};

void check_band(const FormatBand& band) {
  if (0 < band.min_subnormal && band.min_subnormal <= band.min_normal && band.min_normal < band.max &&
      std::isfinite(band.max)) {
    return;
  }
  throw Error(ErrorKind::InvalidArgument, "the range of format \"" + band.name +
                                              "\" is not one: " + short_number(band.min_subnormal) + ", " +
                                              short_number(band.min_normal) + ", " + short_number(band.max));
}

// Exponents between which lie all but 5 % of the nonzero finite elements on either side.
std::optional<std::pair<double, double>> middle(const ScaleStats& s) {
  int64_t total = 0;
  auto counts = [](int e) { return e > -127 && e < 128; };
  for (const auto& [e, n] : s.exponents) total += counts(e) ? n : 0;
  if (total == 0) return std::nullopt;
  // Elements are taken as spread evenly in their bin.
  auto at = [&](double share) {
    double want = share * static_cast<double>(total);
    double last = 0;
    for (const auto& [e, n] : s.exponents) {
      if (!counts(e) || n == 0) continue;
      last = e + 1;
      if (want <= static_cast<double>(n)) return e + want / static_cast<double>(n);
      want -= static_cast<double>(n);
    }
    return last;
  };
  // A bin's far side may lie beyond all elements.
  auto inside = [&](double e) {
    if (s.abs_min > 0 && std::isfinite(s.abs_min)) e = std::max(e, std::log2(s.abs_min));
    if (s.abs_max > 0 && std::isfinite(s.abs_max)) e = std::min(e, std::log2(s.abs_max));
    return e;
  };
  return std::pair{inside(at(0.05)), inside(at(0.95))};
}

Panel panel_of(const std::vector<Line>& lines, bool bwd, const std::optional<FormatBand>& band) {
  Panel p{bwd, 0, 1000, -1000, &band};
  auto take = [&](double value) {
    if (!std::isfinite(value) || value <= 0) return;
    p.e0 = std::min(p.e0, static_cast<int>(std::floor(std::log2(value))));
    p.e1 = std::max(p.e1, static_cast<int>(std::ceil(std::log2(value))));
  };
  for (const Line& line : lines) {
    for (const ScaleRow* row : line.rows) {
      if (!row || !p.stats(*row)) continue;
      const ScaleStats& s = *p.stats(*row);
      for (double v : {s.std, s.mean_abs, s.abs_max}) take(v);
      if (auto m = middle(s)) take(std::exp2(m->first));
    }
  }
  if (band) take(band->min_subnormal), take(band->max);
  if (p.e0 > p.e1) p.e0 = -8, p.e1 = 8;
  p.e1 += 1;
  // Values that are all but zero would leave no room for the others.
  p.e0 = std::max(p.e0 - 2, p.e1 - 64);
  return p;
}

std::string power_label(double x, double y, int e) {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) +
         "\" class=\"muted\" fill=\"#64748b\" font-size=\"11\" text-anchor=\"middle\">2<tspan dy=\"-4\" "
         "font-size=\"8\">" +
         std::to_string(e) + "</tspan></text>";
}

std::string header_of(const ScaleChart& chart, const std::vector<Panel>& panels, double height) {
  std::string out;
  double x = 0;
  for (size_t v = 0; v < chart.variants.size(); ++v) {
    const std::string& name = chart.variants[v].name;
    out += "<g class=\"" + svg::series_class(v) + "\"><circle class=\"area\" cx=\"" + number(x + 6) +
           "\" cy=\"11\" r=\"4.5\" fill=\"" + std::string(svg::series_color(v)) + "\"/>" +
           svg::text(x + 16, 15, name, {"text", "start", 12.5, true}) + "</g>";
    x += 36 + svg::text_width(name, 12.5);
  }
  out += svg::text(0, height - 6, "tensor, in graph order", {"muted", "start", 11});
  out += svg::text(x, 15, "dot: standard deviation, stroke: mean |x|, thick line: 90 % of the elements, thin line: all",
                   {"muted", "start", 11});
  for (const Panel& p : panels) {
    const auto& band = *p.band;
    out += svg::text(p.left, 34, p.bwd ? "Gradients (backward)" : "Values (forward)", {"text", "start", 13, true});
    out += svg::text(p.left + kPanel, 34, "|x|, powers of two", {"muted", "end", 11});
    if (band) {
      const double a = p.at(band->min_subnormal), b = p.at(band->min_normal), c = p.at(band->max);
      auto label = [&](double from, double to, const std::string& what) {
        // Words that do not fit are left out: the page's key names the bands' colors, too.
        if (svg::text_width(what, 10) <= to - from) {
          out += svg::text((from + to) / 2, 50, what, {"muted", "middle", 10});
        }
      };
      label(a, b, "subnormal");
      label(b, c, band->name + " normal");
      label(p.at_exponent(p.e0), a, "becomes 0");
    }
    const int step = std::max(1, static_cast<int>(std::ceil((p.e1 - p.e0) * 34 / kPanel)));
    for (int e = p.e0; e <= p.e1; ++e) {
      if (e % step) continue;
      out += power_label(p.at_exponent(e), height - 6, e);
    }
    out += svg::text(p.left + kPanel + kLost - 2, height - 6, "lost", {"muted", "end", 11});
  }
  return out + "\n";
}

std::string ground_of(const std::vector<Panel>& panels, double top, double height) {
  std::string out;
  auto band = [&](double a, double b, const char* look) {
    if (b > a) out += svg::rect(look, a, top, b - a, height);
  };
  constexpr const char* kLostLook = R"(class="band-lost" fill="#fee2e2")";
  for (const Panel& p : panels) {
    const double left = p.at_exponent(p.e0), right = p.at_exponent(p.e1);
    if (const auto& f = *p.band) {
      band(left, p.at(f->min_subnormal), kLostLook);
      band(p.at(f->min_subnormal), p.at(f->min_normal), R"(class="band-sub" fill="#fef3c7")");
      band(p.at(f->min_normal), p.at(f->max), R"(class="band-normal" fill="#dcfce7")");
      band(p.at(f->max), right, kLostLook);
    } else {
      band(left, right, R"(class="band-none" fill="#f8fafc")");
    }
    if (p.e0 < 0 && p.e1 > 0) {
      out += svg::line(R"(class="one" stroke="#64748b" stroke-dasharray="2 3")", p.at(1), top, p.at(1), top + height);
    }
  }
  return out + "\n";
}

double lost_share(const ScaleStats& s) { return s.underflow.value_or(0) + s.overflow.value_or(0); }

std::string lost_label(const ScaleStats& s) {
  const double lost = lost_share(s);
  if (s.nan_count || s.inf_count) return s.nan_count ? "NaN" : "inf";
  if (!(lost >= kLeastShare)) return "";
  return percent(lost, 0);
}

// Marks of one tensor in one panel, at height y.
std::string marks_of(const Panel& p, const ScaleStats& s, double y, const std::string& color) {
  std::string out;
  auto stroke = [&](double a, double b, const char* look) {
    out += svg::line("class=\"line\" stroke=\"" + color + "\" " + look, a, y, b, y);
  };
  if (std::isfinite(s.abs_max) && s.abs_max > 0 && s.abs_min >= 0)
    stroke(p.at(s.abs_min), p.at(s.abs_max), R"(stroke-width="1" opacity=".45")");
  if (auto m = middle(s)) stroke(p.at_exponent(m->first), p.at_exponent(m->second), R"(stroke-width="5" opacity=".3")");
  if (std::isfinite(s.mean_abs) && s.mean_abs > 0) {
    out += "<path class=\"line\" stroke=\"" + color + "\" stroke-width=\"1.5\" d=\"M" + number(p.at(s.mean_abs)) + " " +
           number(y - 4) + "v8\"/>";
  }
  if (s.nan_count || s.inf_count) {
    out += "<path class=\"bad\" stroke=\"#dc2626\" stroke-width=\"2\" d=\"M" + number(p.at_exponent(p.e1) - 9) + " " +
           number(y - 3.5) + "l7 7m0 -7l-7 7\"/>";
  } else if (s.std > 0 && std::isfinite(s.std)) {
    out += "<circle class=\"area\" fill=\"" + color + "\" cx=\"" + number(p.at(s.std)) + "\" cy=\"" + number(y) +
           "\" r=\"3.4\"/>";
  } else if (s.abs_max == 0) {
    out += svg::text(p.at_exponent(p.e0) + 2, y + 3.5, "all 0", {"muted", "start", 9});
  }
  return out;
}

std::string told(const ScaleStats& s, const std::optional<FormatBand>& band) {
  auto value = [&](double v) {
    if (std::isnan(v) && !s.nan_count && !s.inf_count) return std::string("not measured");
    std::string out = short_number(v);
    if (v > 0 && std::isfinite(v)) {
      char power[32];
      std::snprintf(power, sizeof power, " (2^%.1f)", std::log2(v));
      out += power;
    }
    return out;
  };
  std::string out = "std " + value(s.std) + ", mean |x| " + value(s.mean_abs) + ", max " + value(s.abs_max);
  if (s.numel) out += ", " + std::to_string(s.numel) + " elements";
  if (s.zero_count) out += ", " + std::to_string(s.zero_count) + " zero";
  if (s.nan_count) out += ", " + std::to_string(s.nan_count) + " NaN";
  if (s.inf_count) out += ", " + std::to_string(s.inf_count) + " infinite";
  std::string format = band ? " in " + band->name : "";
  if (s.underflow) out += "\n      " + percent(*s.underflow) + " become 0" + format;
  if (s.subnormal) out += ", " + percent(*s.subnormal) + " lose digits";
  if (s.overflow) out += ", " + percent(*s.overflow) + " too large";
  return out;
}

std::string title_of(const ScaleChart& chart, const Line& line) {
  const ScaleRow& first = line.any();
  std::string out = (first.module_path.empty() ? "" : first.module_path + "  ") + first.name;
  for (size_t v = 0; v < line.rows.size(); ++v) {
    const ScaleRow* row = line.rows[v];
    if (!row) continue;
    out += "\n" + chart.variants[v].name + (row->op.empty() ? "" : ": " + row->op);
    if (row->fwd) out += "\n  fwd " + told(*row->fwd, chart.fwd_band);
    if (row->bwd) out += "\n  bwd " + told(*row->bwd, chart.bwd_band);
  }
  return out;
}

std::string row_of(const ScaleChart& chart, const std::vector<Panel>& panels, const Line& line, double width, double y,
                   double height) {
  const ScaleRow& first = line.any();
  std::string marks;
  for (size_t v = 0; v < line.rows.size(); ++v) {
    if (!line.rows[v]) continue;
    const double at = height / 2 + kPitch * (static_cast<double>(v) - (static_cast<double>(line.rows.size()) - 1) / 2);
    const std::string color(svg::series_color(v));
    marks += "<g class=\"" + svg::series_class(v) + "\">";
    for (const Panel& p : panels) {
      const auto& stats = p.stats(*line.rows[v]);
      if (!stats) continue;
      marks += marks_of(p, *stats, at, color);
      if (const std::string label = lost_label(*stats); !label.empty()) {
        marks += svg::text(p.left + kPanel + kLost - 2, at + 3.5, label, {"area", "end", 9.5, false, color});
      }
    }
    marks += "</g>";
  }
  const double middle_y = height / 2 + 4;
  const double name_width = std::min(svg::text_width(first.name, 11.5), kLabel * 0.6);
  std::string out = "<g class=\"row\" transform=\"translate(0 " + number(y) + ")\"><title>" +
                    svg::escaped(title_of(chart, line)) + "</title>" +
                    svg::rect(R"(fill="none" pointer-events="all")", 0, 0, width, height);
  out +=
      svg::text(0, middle_y, svg::shortened(first.module_path, kLabel - name_width - 22, 11), {"muted", "start", 11});
  out += svg::text(kLabel - 10, middle_y, svg::shortened(first.name, kLabel * 0.6, 11.5), {"text", "end", 11.5});
  return out + marks + "</g>\n";
}

}  // namespace

std::string to_svg(const ScaleChart& chart) {
  for (const auto* band : {&chart.fwd_band, &chart.bwd_band}) {
    if (*band) check_band(**band);
  }
  const std::vector<Line> lines = merged(chart);
  if (lines.size() > kMostRows) {
    throw Error(ErrorKind::InvalidArgument,
                "a chart of " + std::to_string(lines.size()) + " tensors is more than a page shows", chart.title,
                "prune tensors of the same scale, or show one part of the model");
  }
  bool any_bwd = false;
  for (const Line& line : lines) {
    for (const ScaleRow* row : line.rows) any_bwd = any_bwd || (row && row->bwd);
  }
  std::vector<Panel> panels = {panel_of(lines, false, chart.fwd_band)};
  if (any_bwd) panels.push_back(panel_of(lines, true, chart.bwd_band));
  double width = kLabel;
  for (Panel& p : panels) p.left = width, width += kPanel + kLost + kGap;
  width -= kGap;

  const double row_height = 13 + kPitch * static_cast<double>(std::max<size_t>(1, chart.variants.size()) - 1);
  const double header_height = 72, title_height = chart.title.empty() ? 0 : 26;
  const double height = row_height * static_cast<double>(lines.size());
  std::string rows;
  const std::string header = header_of(chart, panels, header_height);
  for (size_t i = 0; i < lines.size(); ++i) {
    rows += row_of(chart, panels, lines[i], width, static_cast<double>(i) * row_height, row_height);
  }
  std::string body;
  if (title_height > 0) body += svg::text(0, 18, chart.title, {"text", "start", 15, true});
  body += "<g transform=\"translate(0 " + number(title_height) + ")\">" + header + "</g>\n<g transform=\"translate(0 " +
          number(title_height + header_height) + ")\">" + ground_of(panels, 0, height) + rows + "</g>\n";
  return svg::picture(width, title_height + header_height + height + 4, body, true);
}

}  // namespace plumb
