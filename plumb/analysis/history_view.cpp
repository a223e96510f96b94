#include "plumb/analysis/history_view.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>

#include "plumb/analysis/adapters.h"
#include "plumb/core/error.h"
#include "plumb/graph/names.h"

namespace plumb {
namespace {

// The last row at or before `step` of each tensor and direction, in the tensors' order.
std::vector<const HistoryRow*> rows_at(const History& history, int64_t step) {
  std::vector<const HistoryRow*> found(history.tensors.size() * 2);
  for (const HistoryStep& each : history.steps) {
    if (step > 0 && each.step > step) break;
    for (const HistoryRow& row : each.rows) found[row.tensor * 2 + row.backward] = &row;
  }
  return found;
}

// Whether tensors are known to be of ranks or stages.
bool of_parts(const HistoryView& view) {
  return std::any_of(view.runs.begin(), view.runs.end(), [](const HistoryRun& run) {
    const auto& tensors = run.history.tensors;
    return std::any_of(tensors.begin(), tensors.end(), [](const HistoryTensor& t) { return !t.part().empty(); });
  });
}

}  // namespace

void check_recorded(const HistoryView& view) {
  for (const HistoryRun& run : view.runs) {
    if (run.history.steps.empty()) {
      throw Error(ErrorKind::InvalidState, "the history of \"" + run.name + "\" has no recorded step", "",
                  "record with rules that fit some tensor, and call step() after each step");
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
      const size_t dot = tensor.name.rfind('.');
      tensor.module = dot == std::string::npos ? "" : tensor.name.substr(0, dot);
      tensor.operation = node.requires_grad ? "parameter" : "buffer";
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
  const FPFormat* fwd = view.formats.empty() ? nullptr : &view.formats.front();
  const FPFormat* bwd = view.formats.size() > 1 ? &view.formats[1] : fwd;
  if (fwd) chart.fwd_band = band_of(*fwd), chart.bwd_band = band_of(*bwd);
  for (const HistoryRun& run : view.runs) {
    ScaleVariant variant{run.name, {}};
    const auto rows = rows_at(run.history, step);
    if (std::all_of(rows.begin(), rows.end(), [](const HistoryRow* row) { return row == nullptr; })) {
      throw Error(ErrorKind::InvalidArgument,
                  "the history of \"" + run.name + "\" has nothing recorded up to step " + std::to_string(step), "",
                  "its first recorded step is " + std::to_string(run.history.steps.front().step));
    }
    for (size_t t = 0; t < run.history.tensors.size(); ++t) {
      const HistoryRow *value = rows[t * 2], *gradient = rows[t * 2 + 1];
      if (!value && !gradient) continue;
      const HistoryTensor& tensor = run.history.tensors[t];
      const bool below = !tensor.module.empty() && tensor.name.starts_with(tensor.module + ".");
      ScaleRow row{below ? tensor.name.substr(tensor.module.size() + 1) : tensor.name, tensor.module, tensor.operation};
      if (value) row.fwd = scale_stats(value->data.full(), fwd);
      if (gradient) row.bwd = scale_stats(gradient->data.full(), bwd);
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
        // A run that went on after a crash may tell a step twice: what came last holds.
        const auto step = static_cast<double>(each.step);
        while (!curve.steps.empty() && curve.steps.back() >= step) curve.steps.pop_back(), curve.values.pop_back();
        curve.steps.push_back(step), curve.values.push_back(value);
      }
    }
    for (auto& [name, curve] : curves) {
      charts.try_emplace(name, LineChart{.title = name, .height = 260})
          .first->second.curves.push_back(std::move(curve));
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
  Table table{{"tensor", "operator"}, {}};
  const bool parts = of_parts(view);
  if (parts) table.header.push_back("part");
  table.header.push_back("of");
  if (view.runs.size() > 1) table.header.insert(table.header.begin(), "run");
  for (const FPFormat& f : view.formats) {
    for (const char* what : {" to 0", " loses digits", " too large"}) table.header.push_back(f.name() + what);
  }
  std::vector<std::pair<double, std::vector<std::string>>> rows;
  for (const HistoryRun& run : view.runs) {
    const auto found = rows_at(run.history, step);
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i] || !found[i]->data.histogram) continue;
      const TensorMetrics m = found[i]->data.full();
      const HistoryTensor& tensor = run.history.tensors[i / 2];
      std::vector<std::string> row = {tensor.name, tensor.operation};
      if (parts) row.push_back(tensor.part());
      row.push_back(i % 2 ? "gradient" : "value");
      if (view.runs.size() > 1) row.insert(row.begin(), run.name);
      double lost = 0;
      for (const FPFormat& f : view.formats) {
        const double under = m.underflow_share(f), over = m.overflow_share(f);
        lost = std::max(lost, under + over);
        for (double share : {under, m.subnormal_share(f), over}) row.push_back(percent(share));
      }
      rows.emplace_back(lost, std::move(row));
    }
  }
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  if (most > 0 && rows.size() > most) rows.resize(most);
  for (auto& [lost, row] : rows) table.rows.push_back(std::move(row));
  return table;
}

}  // namespace plumb
