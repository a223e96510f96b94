// The page's part of history_view.h: the numbers, packed for the script that draws them.
#include <algorithm>
#include <cmath>
#include <list>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/history_view.h"
#include "plumb/analysis/svg.h"
#include "plumb/core/error.h"
#include "plumb/recording/statistic.h"

namespace plumb {
namespace {

using nlohmann::json;

// Columns of a row: std, mean_abs, abs_max, abs_min, zero share, NaN and infinities (NaN: no row); three of each
// format.
constexpr size_t kFirst = 6, kOfFormat = 3;
constexpr int kMostBins = 64;

// Tensors of all runs in one list: the first run's in order; one of a later run only follows its predecessor there.
struct Lines {
  std::vector<const HistoryTensor*> tensors;
  std::vector<std::vector<size_t>> of_run;  // a run's tensor -> the line; SIZE_MAX: never recorded
};

Lines lines_of(const HistoryView& view) {
  struct Line {
    const HistoryTensor* tensor;
    std::vector<std::pair<size_t, size_t>> of;  // run, tensor
  };
  std::list<Line> lines;
  std::unordered_map<std::string, std::list<Line>::iterator> places;
  Lines out;
  for (size_t r = 0; r < view.runs.size(); ++r) {
    const History& history = view.runs[r].history;
    std::set<uint32_t> recorded;
    for (const HistoryStep& step : history.steps) {
      for (const HistoryRow& row : step.rows) recorded.insert(row.tensor);
    }
    std::unordered_map<std::string, int> seen;
    auto next = lines.begin();
    for (uint32_t t : recorded) {
      const HistoryTensor& tensor = history.tensors[t];
      // A name alone, so that aten::linear stands beside plumb::linear; the same name again is another tensor.
      const std::string key = c10::str(tensor.name, '\n', seen[tensor.name]++);
      const auto [place, is_new] = places.try_emplace(key);
      if (is_new) place->second = lines.insert(next, Line{&tensor, {}});
      place->second->of.emplace_back(r, t);
      next = std::next(place->second);
    }
    out.of_run.emplace_back(history.tensors.size(), SIZE_MAX);
  }
  for (const Line& line : lines) {
    for (const auto& [run, tensor] : line.of) out.of_run[run][tensor] = out.tensors.size();
    out.tensors.push_back(line.tensor);
  }
  return out;
}

// Indices of the steps that are kept.
std::vector<size_t> thinned(size_t steps, size_t most) {
  std::vector<size_t> out;
  most = std::max<size_t>(most, 2);
  for (size_t i = 0; i < std::min(steps, most); ++i) {
    out.push_back(steps <= most ? i
                                : static_cast<size_t>(std::llround(double(i) * double(steps - 1) / double(most - 1))));
  }
  return out;
}

// Exponents' bins that hold anything, as many as are drawn.
struct Bins {
  int low = 0, high = -1;
  size_t count() const { return high < low ? 0 : static_cast<size_t>(high - low + 1); }
};

Bins bins_of(const HistoryView& view) {
  int low = 256, high = -1;
  for (const HistoryRun& run : view.runs) {
    for (const HistoryStep& step : run.history.steps) {
      for (const HistoryRow& row : step.rows) {
        if (!row.data.histogram) continue;
        for (int b = 1; b < 255; ++b) {
          if (row.data.histogram->counts[static_cast<size_t>(b)]) low = std::min(low, b), high = std::max(high, b);
        }
      }
    }
  }
  if (high < 0) return {0, -1};
  return {std::max(low, high - kMostBins + 1), high};
}

json json_of(const FPFormat& format) {
  json out = {{"name", format.name()}};
  if (const auto band = band_of(format)) {
    out.update({{"sub", band->min_subnormal}, {"normal", band->min_normal}, {"max", band->max}});
  }
  return out;
}

// Returns the numbers of one run, packed.
json json_of(const HistoryRun& run, const std::vector<size_t>& of, const std::vector<size_t>& kept, size_t n,
             const std::vector<FPFormat>& formats, const Bins& bins, std::vector<int64_t>& sizes) {
  const size_t fields = kFirst + kOfFormat * formats.size();
  std::vector<float> numbers(kept.size() * n * 2 * fields, std::nanf(""));
  std::vector<uint16_t> shares(kept.size() * n * 2 * bins.count());
  json steps = json::array(), operators = json::array(), parts = json::array();
  for (size_t i = 0; i < n; ++i) operators.push_back(""), parts.push_back("");
  for (size_t t = 0; t < run.history.tensors.size(); ++t) {
    const HistoryTensor& tensor = run.history.tensors[t];
    if (of[t] != SIZE_MAX) operators[of[t]] = tensor.operation, parts[of[t]] = tensor.part();
  }
  for (size_t k = 0; k < kept.size(); ++k) {
    const HistoryStep& step = run.history.steps[kept[k]];
    steps.push_back(step.step);
    for (const HistoryRow& row : step.rows) {
      const size_t line = of[row.tensor], at = (k * n + line) * 2 + row.backward;
      const TensorMetrics m = row.data.full();
      float* to = &numbers[at * fields];
      // None of them is below zero: -1 says that it was not measured, NaN that there is no row.
      const auto first = [&](StatisticKind kind) { return row.has({kind}) ? Statistic{kind}.of(m) : -1; };
      const bool counted = row.has({StatisticKind::NanCount}) && row.has({StatisticKind::InfCount});
      const double firsts[kFirst] = {first(StatisticKind::Std),       first(StatisticKind::MeanAbs),
                                     first(StatisticKind::AbsMax),    first(StatisticKind::AbsMin),
                                     first(StatisticKind::ZeroShare), counted ? double(m.nan_count + m.inf_count) : -1};
      for (size_t f = 0; f < kFirst; ++f) to[f] = static_cast<float>(firsts[f]);
      const int64_t elements = c10::multiply_integers(run.history.tensors[row.tensor].sizes);
      sizes[line] = std::max(sizes[line], row.has({StatisticKind::Numel}) ? m.numel : elements);
      if (!m.histogram) continue;
      for (size_t f = 0; f < formats.size() && row.has({StatisticKind::Underflow, formats[f]}); ++f) {
        float* shares_of = to + kFirst + kOfFormat * f;
        shares_of[0] = static_cast<float>(m.underflow_share(formats[f]));
        shares_of[1] = static_cast<float>(m.subnormal_share(formats[f]));
        shares_of[2] = static_cast<float>(m.overflow_share(formats[f]));
      }
      double total = 0;
      for (int64_t count : m.histogram->counts) total += static_cast<double>(count);
      for (size_t b = 0; b < bins.count() && total > 0; ++b) {
        double count = static_cast<double>(m.histogram->counts[static_cast<size_t>(bins.low) + b]);
        // The lowest bin drawn stands for what is below it too.
        for (int below = 1; b == 0 && below < bins.low; ++below) {
          count += static_cast<double>(m.histogram->counts[static_cast<size_t>(below)]);
        }
        // Something stays visible.
        if (count > 0) {
          shares[at * bins.count() + b] = static_cast<uint16_t>(std::max(1.0, std::round(count / total * 65535)));
        }
      }
    }
  }
  return {{"name", run.name},          {"steps", std::move(steps)},       {"operators", std::move(operators)},
          {"parts", std::move(parts)}, {"numbers", svg::packed(numbers)}, {"shares", svg::packed(shares)}};
}

std::string key_of(const HistoryView& view) {
  auto entry = [](const char* kind, const char* text) {
    return "<span><i class=\"" + std::string(kind) + "\"></i>" + text + "</span>";
  };
  std::string out = "<p class=\"key\">" + entry("mark-std", "standard deviation") + entry("mark-mean", "mean |x|") +
                    entry("mark-bar", "90 % of elements") + entry("mark-range", "all elements");
  if (!view.formats.empty()) {
    out += entry("swatch band-normal", "normal") + entry("swatch band-sub", "subnormal: digits lost") +
           entry("swatch band-lost", "becomes 0, or too large");
  }
  return out + "</p>\n";
}

}  // namespace

std::string to_html(const HistoryView& view, RunColors& colors) {
  if (view.runs.empty() || view.runs.size() > svg::kSeriesColors) {
    throw Error(ErrorKind::InvalidArgument,
                c10::str("a page shows one to ", svg::kSeriesColors, " runs side by side, not ", view.runs.size()));
  }
  check_recorded(view);
  const Lines lines = lines_of(view);
  const Bins bins = bins_of(view);
  // To choose from: those of roles first, each once.
  std::vector<FPFormat> formats;
  for (const auto* list : {&view.formats, &view.asked}) {
    for (const FPFormat& f : *list) {
      if (std::ranges::find(formats, f.name(), &FPFormat::name) == formats.end()) {
        formats.push_back(f);
      }
    }
  }
  const size_t n = lines.tensors.size(), fields = kFirst + kOfFormat * formats.size();
  const size_t bytes_of_step = std::max<size_t>(1, n * 2 * (fields * sizeof(float) + bins.count() * sizeof(uint16_t)));
  const size_t most = view.max_bytes / view.runs.size() / bytes_of_step;

  json data = {{"bins", bins.count()},
               {"low", bins.low - 127},
               {"runs", json::array()},
               {"tensors", json::array()},
               {"formats", json::array()}};
  for (const FPFormat& f : formats) data["formats"].push_back(json_of(f));
  std::vector<int64_t> sizes(n);
  std::string note, runs;
  for (size_t r = 0; r < view.runs.size(); ++r) {
    const HistoryRun& run = view.runs[r];
    const std::vector<size_t> kept = thinned(run.history.steps.size(), most);
    if (kept.size() < run.history.steps.size()) {
      note += c10::str(" ", run.name, ": ", kept.size(), " of ", run.history.steps.size(), " recorded steps.");
    }
    const size_t color = colors.of(run.name) % svg::kSeriesColors;
    data["runs"].push_back(json_of(run, lines.of_run[r], kept, n, formats, bins, sizes));
    data["runs"].back()["color"] = color;
    runs += "<span class=\"" + svg::series_class(color) + "\"><span class=\"dot\"></span>" + svg::escaped(run.name) +
            "</span>";
  }
  for (size_t i = 0; i < n; ++i) {
    const HistoryTensor& t = *lines.tensors[i];
    data["tensors"].push_back({t.module, local_name(t), sizes[i], t.sizes, layer_of(t.module)});
  }
  return "<figure class=\"history-view\">\n" +
         (view.title.empty() ? "" : "<h3>" + svg::escaped(view.title) + "</h3>\n") +
         (view.runs.size() > 1 ? "<p class=\"key\">" + runs + "</p>\n" : "") + key_of(view) +
         (note.empty() ? "" : "<p class=\"key\">Thinned to fit the page:" + svg::escaped(note) + "</p>\n") +
         "<div class=\"tools\"><label class=\"stepper\">step <input type=\"range\" min=\"0\" max=\"0\" value=\"0\"> "
         "<output></output></label> <input type=\"search\" placeholder=\"filter: module, name or operator\" "
         "aria-label=\"filter rows\"> <label hidden>show <select class=\"side\"><option>values</option>"
         "<option>gradients</option></select></label> <label>values in <select class=\"of-fwd\"></select></label> "
         "<label>gradients in <select class=\"of-bwd\"></select></label> <label class=\"lossy\"><input "
         "type=\"checkbox\"> only what loses 1 % or more</label> <span class=\"count\"></span></div>\n<div "
         "class=\"history-head\"></div>\n<div class=\"history-scroll\" tabindex=\"0\"><div "
         "class=\"history-space\"></div></div>\n<div class=\"detail\" hidden></div>\n<div class=\"courses\" "
         "hidden><h3>Each layer over the steps</h3>\n<div class=\"tools\"><label>the <select "
         "class=\"layer-what\"></select></label> <label>of <select class=\"layer-which\"></select></label></div>\n"
         "<div class=\"layers\"></div></div>\n" +
         svg::data_script(data) + "</figure>\n";
}

}  // namespace plumb
