// The page's part of history_view.h: the numbers, packed for the script that draws them.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "plumb/analysis/adapters.h"
#include "plumb/analysis/history_view.h"
#include "plumb/analysis/svg.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

using nlohmann::json;

// Of a row: std, mean_abs, abs_max, abs_min, zero share, NaN and infinities (NaN: no row), then three of each format.
constexpr size_t kFirst = 6, kOfFormat = 3;
constexpr int kMostBins = 64;

std::string base64(const void* data, size_t size) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::string out;
  out.reserve((size + 2) / 3 * 4);
  for (size_t i = 0; i < size; i += 3) {
    const uint32_t a = bytes[i], b = i + 1 < size ? bytes[i + 1] : 0, c = i + 2 < size ? bytes[i + 2] : 0;
    const uint32_t word = a << 16 | b << 8 | c;
    out += kDigits[word >> 18];
    out += kDigits[word >> 12 & 63];
    out += i + 1 < size ? kDigits[word >> 6 & 63] : '=';
    out += i + 2 < size ? kDigits[word & 63] : '=';
  }
  return out;
}

// Tensors of all runs in one list; those of the same name and operator are one.
struct Lines {
  std::vector<const HistoryTensor*> tensors;
  std::vector<std::vector<size_t>> of_run;  // a run's tensor -> the line
};

Lines lines_of(const HistoryView& view) {
  Lines out;
  std::unordered_map<std::string, size_t> places;
  for (const HistoryRun& run : view.runs) {
    std::set<uint32_t> recorded;
    for (const HistoryStep& step : run.history.steps) {
      for (const HistoryRow& row : step.rows) recorded.insert(row.tensor);
    }
    std::vector<size_t> of(run.history.tensors.size(), SIZE_MAX);
    std::unordered_map<std::string, int> seen;
    for (uint32_t t : recorded) {
      const HistoryTensor& tensor = run.history.tensors[t];
      // A name alone, so that aten::linear stands beside plumb::linear; the same name again is another tensor.
      const std::string key = tensor.name + '\n' + std::to_string(seen[tensor.name]++);
      const auto [place, is_new] = places.try_emplace(key, out.tensors.size());
      if (is_new) out.tensors.push_back(&tensor);
      of[t] = place->second;
    }
    out.of_run.push_back(std::move(of));
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

std::pair<int, int> bins_of(const HistoryView& view) {
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

}  // namespace

std::string to_html(const HistoryView& view) {
  if (view.runs.empty() || view.runs.size() > 2) {
    throw Error(ErrorKind::InvalidArgument,
                "a page shows one run or two side by side, not " + std::to_string(view.runs.size()));
  }
  check_recorded(view);
  const Lines lines = lines_of(view);
  const size_t n = lines.tensors.size(), fields = kFirst + kOfFormat * view.formats.size();
  const auto [low, high] = bins_of(view);
  const size_t bins = high < low ? 0 : static_cast<size_t>(high - low + 1);
  const size_t bytes_of_step = std::max<size_t>(1, n * 2 * (fields * sizeof(float) + bins * sizeof(uint16_t)));
  const size_t most = view.max_bytes / view.runs.size() / bytes_of_step;

  json data = {{"bins", bins},
               {"low", low - 127},
               {"runs", json::array()},
               {"tensors", json::array()},
               {"formats", json::array()}};
  for (const FPFormat& f : view.formats) {
    json format = {{"name", f.name()}};
    if (const auto band = band_of(f)) {
      format.update({{"sub", band->min_subnormal}, {"normal", band->min_normal}, {"max", band->max}});
    }
    data["formats"].push_back(std::move(format));
  }
  std::vector<int64_t> sizes(n);
  std::string note;
  for (size_t r = 0; r < view.runs.size(); ++r) {
    const History& history = view.runs[r].history;
    const std::vector<size_t> kept = thinned(history.steps.size(), most);
    if (kept.size() < history.steps.size()) {
      note += " " + view.runs[r].name + ": " + std::to_string(kept.size()) + " of " +
              std::to_string(history.steps.size()) + " recorded steps.";
    }
    std::vector<float> numbers(kept.size() * n * 2 * fields, std::nanf(""));
    std::vector<uint16_t> shares(kept.size() * n * 2 * bins);
    json steps = json::array(), operators = json::array(), parts = json::array();
    for (size_t i = 0; i < n; ++i) operators.push_back(""), parts.push_back("");
    for (size_t t = 0; t < history.tensors.size(); ++t) {
      const size_t line = lines.of_run[r][t];
      if (line != SIZE_MAX) operators[line] = history.tensors[t].operation, parts[line] = history.tensors[t].part();
    }
    for (size_t k = 0; k < kept.size(); ++k) {
      const HistoryStep& step = history.steps[kept[k]];
      steps.push_back(step.step);
      for (const HistoryRow& row : step.rows) {
        const size_t line = lines.of_run[r][row.tensor], at = (k * n + line) * 2 + row.backward;
        const TensorMetrics m = row.data.full();
        float* to = &numbers[at * fields];
        const double firsts[kFirst] = {m.std,     m.mean_abs,     m.abs_max,
                                       m.abs_min, m.zero_share(), static_cast<double>(m.nan_count + m.inf_count)};
        for (size_t f = 0; f < kFirst; ++f) to[f] = static_cast<float>(firsts[f]);
        sizes[line] = std::max(sizes[line], m.numel);
        if (!m.histogram) continue;
        for (size_t f = 0; f < view.formats.size(); ++f) {
          float* shares_of = to + kFirst + kOfFormat * f;
          shares_of[0] = static_cast<float>(m.underflow_share(view.formats[f]));
          shares_of[1] = static_cast<float>(m.subnormal_share(view.formats[f]));
          shares_of[2] = static_cast<float>(m.overflow_share(view.formats[f]));
        }
        double total = 0;
        for (int64_t count : m.histogram->counts) total += static_cast<double>(count);
        for (size_t b = 0; b < bins && total > 0; ++b) {
          double count = static_cast<double>(m.histogram->counts[static_cast<size_t>(low) + b]);
          // The lowest bin drawn stands for what is below it too.
          if (b == 0) {
            for (int below = 1; below < low; ++below) count += double(m.histogram->counts[static_cast<size_t>(below)]);
          }
          // Something stays visible.
          if (count > 0)
            shares[at * bins + b] = static_cast<uint16_t>(std::max(1.0, std::round(count / total * 65535)));
        }
      }
    }
    data["runs"].push_back({{"name", view.runs[r].name},
                            {"steps", std::move(steps)},
                            {"operators", std::move(operators)},
                            {"parts", std::move(parts)},
                            {"numbers", base64(numbers.data(), numbers.size() * sizeof(float))},
                            {"shares", base64(shares.data(), shares.size() * sizeof(uint16_t))}});
  }
  for (size_t i = 0; i < n; ++i) {
    const HistoryTensor& t = *lines.tensors[i];
    const bool below = !t.module.empty() && t.name.starts_with(t.module + ".");
    data["tensors"].push_back({t.module, below ? t.name.substr(t.module.size() + 1) : t.name, sizes[i], t.sizes});
  }
  std::string out = "<figure class=\"history-view\">\n";
  if (!view.title.empty()) out += "<h3>" + svg::escaped(view.title) + "</h3>\n";
  out +=
      "<p class=\"key\"><span class=\"mark-std\"></span> standard deviation <span class=\"mark-mean\"></span> mean |x| "
      "<span class=\"mark-range\"></span> all elements";
  if (!view.formats.empty()) {
    out +=
        " <span class=\"swatch band-normal\"></span> normal <span class=\"swatch band-sub\"></span> subnormal: digits "
        "lost <span class=\"swatch band-lost\"></span> becomes 0, or too large";
  }
  out += "</p>\n";
  if (!note.empty()) out += "<p class=\"key\">Thinned to fit the page:" + svg::escaped(note) + "</p>\n";
  return out +
         "<div class=\"tools\"><label class=\"stepper\">step <input type=\"range\" min=\"0\" max=\"0\" value=\"0\"> "
         "<output></output></label> <input type=\"search\" placeholder=\"filter: module, name or operator\" "
         "aria-label=\"filter rows\"> <label>values in <select class=\"of-fwd\"></select></label> <label>gradients in "
         "<select class=\"of-bwd\"></select></label> <label><input type=\"checkbox\"> only what loses 1 % or "
         "more</label> <span class=\"count\"></span></div>\n<div class=\"history-head\"></div>\n<div "
         "class=\"history-scroll\" tabindex=\"0\"><div class=\"history-space\"></div></div>\n<div class=\"detail\" "
         "hidden></div>\n<script type=\"application/json\">" +
         svg::script_json(data.dump(-1, ' ', true, json::error_handler_t::replace)) + "</script>\n</figure>\n";
}

}  // namespace plumb
