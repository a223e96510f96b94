#include "plumb/analysis/history_view.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>

#include "plumb/analysis/adapters.h"
#include "plumb/core/error.h"
#include "plumb/core/text.h"
#include "plumb/graph/names.h"
#include "plumb/recording/history_format.h"

namespace plumb {
namespace {

// Returns the last row at or before `step` of each tensor and direction, in the tensors' order.
std::vector<const HistoryRow*> rows_at(const History& history, int64_t step) {
  std::vector<const HistoryRow*> found(history.tensors.size() * 2);
  for (const HistoryStep& each : history.steps) {
    if (step > 0 && each.step > step) break;
    for (const HistoryRow& row : each.rows) found[row.tensor * 2 + row.backward] = &row;
  }
  return found;
}

// Returns whether tensors are known to be of ranks or stages.
bool of_parts(const HistoryView& view) {
  return std::ranges::any_of(view.runs, [](const HistoryRun& run) {
    const auto& tensors = run.history.tensors;
    return std::ranges::any_of(tensors, [](const HistoryTensor& t) { return !t.part().empty(); });
  });
}

struct FormatLoss {
  double under = 0, digits = 0, over = 0;
  bool bad = false;  // NaN or infinities: worse than any loss
  double lost() const { return bad ? 2 : under + over; }
  bool counts() const { return lost() >= 0.01; }
};

FormatLoss loss_of(const TensorMetrics& m, const FPFormat& format) {
  return {m.underflow_share(format), m.subnormal_share(format), m.overflow_share(format),
          m.nan_count + m.inf_count > 0};
}

// Returns the measured statistics; a share of the format only if everything it is computed from was measured.
ScaleStats stats_of(const HistoryRow& row, const FPFormat* format) {
  Metrics::Data data = row.data;
  const auto lacks = [&](size_t kind) { return !row.has({static_cast<StatisticKind>(kind)}); };
  for (size_t i = 0; i < 5; ++i)
    if (lacks(i)) data.*history_format::kReals[i] = NAN;
  for (size_t i = 0; i < 4; ++i)
    if (lacks(5 + i)) data.*history_format::kCounts[i] = 0;
  return scale_stats(data.full(), format && row.has({StatisticKind::Underflow, *format}) ? format : nullptr);
}

// A tensor or its gradient against its role's format.
struct LossRow {
  const std::string* run = nullptr;
  const HistoryTensor* tensor = nullptr;
  bool backward = false;
  FormatLoss loss;
  std::vector<FormatLoss> asked;
};

void add_rows(std::vector<LossRow>& rows, const HistoryView& view, const HistoryRun& run, int64_t step) {
  const auto found = rows_at(run.history, step);
  for (size_t i = 0; i < found.size(); ++i) {
    const bool backward = i % 2;
    const FPFormat* role = view.role(backward);
    if (!found[i] || !role || !found[i]->has({StatisticKind::Underflow, *role})) continue;
    const TensorMetrics m = found[i]->data.full();
    LossRow row{&run.name, &run.history.tensors[i / 2], backward, loss_of(m, *role), {}};
    for (const FPFormat& f : view.asked) row.asked.push_back(loss_of(m, f));
    rows.push_back(std::move(row));
  }
}

// Returns the rows of all runs, the worst first.
std::vector<LossRow> loss_rows(const HistoryView& view, int64_t step) {
  std::vector<LossRow> rows;
  for (const HistoryRun& run : view.runs) add_rows(rows, view, run, step);
  std::ranges::stable_sort(rows, std::greater(), [](const LossRow& row) { return row.loss.lost(); });
  return rows;
}

// "41 of 138": tensors of a run that lose 1 % or more, of those that are known; empty where none is.
std::string lossy_of(const HistoryView& view, const HistoryRun& run, int64_t step) {
  std::vector<LossRow> rows;
  add_rows(rows, view, run, step);
  std::map<const HistoryTensor*, bool> tensors;
  for (const LossRow& row : rows) {
    bool& counts = tensors[row.tensor];
    counts = counts || row.loss.counts();
  }
  const auto lossy = std::ranges::count_if(tensors, [](const auto& t) { return t.second; });
  return tensors.empty() ? "" : c10::str(lossy, " of ", tensors.size());
}

std::vector<std::string> naming_header(const HistoryView& view, const std::string& first) {
  std::vector<std::string> header = {first, "operator"};
  if (of_parts(view)) header.push_back("part");
  header.push_back("of");
  if (view.runs.size() > 1) header.push_back("run");
  return header;
}

std::vector<std::string> naming_cells(const HistoryView& view, const HistoryTensor& tensor, bool backward,
                                      const std::string& run, const std::string& first) {
  std::vector<std::string> cells = {first, tensor.operation};
  if (of_parts(view)) cells.push_back(tensor.part());
  cells.push_back(backward ? "gradient" : "value");
  if (view.runs.size() > 1) cells.push_back(run);
  return cells;
}

std::vector<std::string> header_of(const HistoryView& view, const std::string& first) {
  std::vector<std::string> header = naming_header(view, first);
  for (const char* what : {"format", "becomes 0", "loses digits", "too large"}) header.push_back(what);
  for (const FPFormat& f : view.asked) {
    for (const char* what : {" to 0", " loses digits", " too large"}) header.push_back(f.name() + what);
  }
  return header;
}

std::vector<std::string> cells_of(const HistoryView& view, const LossRow& row, const std::string& first) {
  std::vector<std::string> cells = naming_cells(view, *row.tensor, row.backward, *row.run, first);
  cells.push_back(view.role(row.backward)->name());
  for (double share : {row.loss.under, row.loss.digits, row.loss.over}) cells.push_back(percent(share));
  for (const FormatLoss& loss : row.asked) {
    for (double share : {loss.under, loss.digits, loss.over}) cells.push_back(percent(share));
  }
  return cells;
}

}  // namespace

const FPFormat* HistoryView::role(bool backward) const {
  if (formats.empty()) return nullptr;
  return backward ? &formats.back() : &formats.front();
}

std::string local_name(const HistoryTensor& tensor) {
  const bool below = !tensor.module.empty() && tensor.name.starts_with(tensor.module + ".");
  return below ? tensor.name.substr(tensor.module.size() + 1) : tensor.name;
}

void check_recorded(const HistoryView& view) {
  for (const HistoryRun& run : view.runs) {
    if (run.history.steps.empty()) {
      const bool hashes = !run.history.hashes.empty();
      throw Error(ErrorKind::InvalidState,
                  "the history of \"" + run.name + "\" has no recorded step" + (hashes ? ", but hashes" : ""), "",
                  hashes ? "compare it with another's: plumb diff"
                         : "record with rules that fit some tensor, and call step() after each step");
    }
  }
}

History history_of(const ScalesGraph& graph, int64_t step) {
  History out;
  HistoryStep one{step, {}};
  for (const ScaleNode& node : graph.nodes) {
    if (!node.metrics) continue;
    HistoryTensor tensor{node.name, node.module, node.target, "", {}};
    if (node.kind == NodeKind::Placeholder) tensor.operation = "input";
    if (node.kind == NodeKind::GetAttr) {
      tensor.name = node.target;
      tensor.module = parent_of(tensor.name);
      tensor.operation = node.is_parameter ? "parameter" : "buffer";
    } else if (!node.module.empty()) {
      tensor.name = node.module + "." + node.name;
    }
    if (node.meta) tensor.dtype = torch_name(node.meta->dtype), tensor.sizes = node.meta->sizes;
    const auto index = static_cast<uint32_t>(out.tensors.size());
    out.tensors.push_back(std::move(tensor));
    auto add = [&](const Metrics::Data& data, bool backward) {
      const uint16_t all = data.histogram ? kAllStatistics : kAllStatistics >> 1;
      one.rows.push_back({index, backward, false, all, data});
    };
    add(node.metrics->fwd, false);
    if (node.metrics->bwd) add(*node.metrics->bwd, true);
  }
  out.steps.push_back(std::move(one));
  return out;
}

ScaleChart scale_chart(const HistoryView& view, int64_t step) {
  check_recorded(view);
  ScaleChart chart{view.title, {}};
  const FPFormat *fwd = view.role(false), *bwd = view.role(true);
  if (fwd) chart.fwd_band = band_of(*fwd), chart.bwd_band = band_of(*bwd);
  for (const HistoryRun& run : view.runs) {
    ScaleVariant variant{run.name, {}};
    const auto rows = rows_at(run.history, step);
    if (const int64_t begins = run.history.steps.front().step; step > 0 && step < begins) {
      throw Error(ErrorKind::InvalidArgument,
                  c10::str("the history of \"", run.name, "\" has nothing recorded up to step ", step), "",
                  "its first recorded step is " + std::to_string(begins));
    }
    for (size_t t = 0; t < run.history.tensors.size(); ++t) {
      const HistoryRow *value = rows[t * 2], *gradient = rows[t * 2 + 1];
      if (!value && !gradient) continue;
      const HistoryTensor& tensor = run.history.tensors[t];
      ScaleRow row{local_name(tensor), tensor.module, tensor.operation};
      if (value) row.fwd = stats_of(*value, fwd);
      if (gradient) row.bwd = stats_of(*gradient, bwd);
      variant.rows.push_back(std::move(row));
    }
    chart.variants.push_back(std::move(variant));
  }
  return chart;
}

std::vector<LineChart> scalar_charts(const HistoryView& view) {
  std::map<std::string, LineChart> charts;
  for (const HistoryRun& run : view.runs) {
    std::map<std::string, Curve> curves;
    for (const HistoryScalars& each : run.history.scalars) {
      for (const auto& [name, value] : each.values) {
        Curve& curve = curves.try_emplace(name, Curve{run.name}).first->second;
        // A run that went on after a crash may record a step twice: the last record counts.
        const auto step = static_cast<double>(each.step);
        while (!curve.steps.empty() && curve.steps.back() >= step) curve.steps.pop_back(), curve.values.pop_back();
        curve.steps.push_back(step), curve.values.push_back(value);
      }
    }
    for (auto& [name, curve] : curves) {
      const LineChart empty{.title = name, .peak = name == "lr" || name == "learning_rate", .height = 260};
      charts.try_emplace(name, empty).first->second.curves.push_back(std::move(curve));
    }
  }
  std::vector<LineChart> out;
  for (auto& [name, chart] : charts) out.push_back(std::move(chart));
  return out;
}

Table event_table(const HistoryView& view) {
  Table table{{"run", "step", "condition", "tensors", "the first"}, {}, "Where conditions of rules held"};
  for (const HistoryRun& run : view.runs) {
    for (const HistoryEvent& event : run.history.events) {
      std::string first;
      if (!event.first.empty()) {
        const auto& c = event.first.front();
        const HistoryTensor& tensor = run.history.tensors[c.tensor];
        const std::string part = tensor.part();
        first = tensor.name + (part.empty() ? "" : " of " + part) + (c.backward ? " (gradient): " : ": ") +
                short_number(c.value);
      }
      table.rows.push_back({run.name, std::to_string(event.step), event.condition, std::to_string(event.count), first});
    }
  }
  return table;
}

Table format_table(const HistoryView& view, int64_t step, size_t most) {
  auto rows = loss_rows(view, step);
  if (most > 0 && rows.size() > most) rows.resize(most);
  Table table{header_of(view, "tensor"), {}};
  for (const LossRow& row : rows) table.rows.push_back(cells_of(view, row, row.tensor->name));
  return table;
}

Table statistics_table(const HistoryView& view, int64_t step) {
  Table table{naming_header(view, "tensor"), {}};
  std::vector<const HistoryRow*> rows;
  for (const HistoryRun& run : view.runs) {
    for (const HistoryRow* row : rows_at(run.history, step)) {
      if (!row) continue;
      const HistoryTensor& tensor = run.history.tensors[row->tensor];
      rows.push_back(row);
      table.rows.push_back(naming_cells(view, tensor, row->backward, run.name, tensor.name));
    }
  }
  for (auto kind = StatisticKind::MeanAbs; kind < StatisticKind::Histogram;
       kind = static_cast<StatisticKind>(static_cast<int>(kind) + 1)) {
    const Statistic statistic{kind};
    if (std::ranges::none_of(rows, [&](const HistoryRow* row) { return row->has(statistic); })) continue;
    table.header.push_back(statistic.to_string());
    for (size_t i = 0; i < rows.size(); ++i)
      table.rows[i].push_back(rows[i]->has(statistic) ? short_number(rows[i]->value(statistic)) : "");
  }
  return table;
}

Table layer_table(const HistoryView& view, int64_t step, size_t most) {
  // Worst first, so that a layer's first row is its worst.
  std::vector<std::pair<std::string, std::vector<LossRow>>> layers;
  std::unordered_map<std::string, size_t> places;
  for (LossRow& row : loss_rows(view, step)) {
    const std::string layer = layer_of(row.tensor->module);
    const auto [place, is_new] = places.try_emplace(layer, layers.size());
    if (is_new) layers.push_back({layer, {}});
    layers[place->second].second.push_back(std::move(row));
  }
  Table table{header_of(view, "layer"), {}};
  table.header.insert(table.header.begin() + 1, "lose 1 % or more");
  for (const auto& [layer, rows] : layers) {
    const auto lossy = std::ranges::count_if(rows, [](const LossRow& r) { return r.loss.counts(); });
    auto add = [&](const LossRow& row, const std::string& name, const std::string& count, int level) {
      table.rows.push_back(cells_of(view, row, name));
      table.rows.back().insert(table.rows.back().begin() + 1, count);
      table.levels.push_back(level);
    };
    add(rows.front(), layer.empty() ? "(the model itself)" : layer, c10::str(lossy, " of ", rows.size()), 0);
    for (size_t i = 0; i < std::min(rows.size(), most) && (i == 0 || rows[i].loss.lost() > 0); ++i) {
      add(rows[i], rows[i].tensor->name, "", 1);
    }
  }
  return table;
}

std::string layer_of(const std::string& module) {
  for (size_t at = 0; at < module.size();) {
    const size_t end = std::min(module.find('.', at), module.size());
    const bool is_number = module.substr(at, end - at).find_first_not_of("0123456789") == std::string::npos;
    if (end > at && is_number) return module.substr(0, end);
    at = end + 1;
  }
  return module;
}

std::string conclusion(const HistoryView& view, int64_t step) {
  check_recorded(view);
  const auto rows = loss_rows(view, step);
  if (rows.empty()) {
    return view.formats.empty() ? "No format was asked for, so nothing is said to be lost."
                                : "What formats lose was not recorded: that takes histograms.";
  }
  int64_t first = INT64_MAX, last = 0;
  for (const HistoryRun& run : view.runs) {
    first = std::min(first, run.history.steps.front().step);
    for (const HistoryStep& each : run.history.steps) {
      if (step <= 0 || each.step <= step) last = std::max(last, each.step);
    }
  }
  // "41 of 138 in A, 3 of 138 in B"
  auto counts = [&](int64_t at, const std::string& mark) {
    std::string out;
    for (const HistoryRun& run : view.runs) {
      const std::string count = run.history.steps.front().step > at ? "" : lossy_of(view, run, at);
      if (count.empty()) continue;
      out += (out.empty() ? "" : ", ") + mark + count + mark + (out.empty() ? " tensors" : "") +
             (view.runs.size() > 1 ? " in " + mark + run.name + mark : "");
    }
    return out;
  };
  const std::string fwd = view.role(false)->name(), bwd = view.role(true)->name();
  std::string out = "What loses 1 % or more of its elements in " +
                    (fwd == bwd ? fwd : fwd + " (values) or " + bwd + " (gradients)") + ": " + counts(last, "**");
  if (first < last) {
    out += c10::str(" at step ", last, ", and ", counts(first, ""), " at step ", first);
  }
  out += ".";
  const LossRow& worst = rows.front();
  if (worst.loss.lost() > 0) {
    out += " The worst is the " + std::string(worst.backward ? "gradient" : "value") + " of `" + worst.tensor->name +
           "`" + (view.runs.size() > 1 ? " in " + *worst.run : "") + ": ";
    out += worst.loss.bad
               ? "it has NaN or infinities."
               : percent(worst.loss.under) + " of it becomes 0 and " + percent(worst.loss.over) + " is too large.";
  }
  return out;
}

}  // namespace plumb
