#include "plumb/analysis/adapters.h"

#include <algorithm>

#include "plumb/core/error.h"

namespace plumb {
namespace {

void add_action(TimelineRun& run, const Action& action, int rank, double waiting, double start, double end) {
  if (!action.is_compute()) return;
  const Action second = action.second_part();
  auto add = [&](const Action& a, int half) {
    run.actions.push_back({rank, std::string(to_string(a.kind)), a.stage, a.microbatch, start, end, waiting, half});
  };
  add(action.first_part(), second.is_idle() ? 0 : 1);
  if (!second.is_idle()) add(second, 2);
}

}  // namespace

std::optional<FormatBand> band_of(const FPFormat& format) {
  if (format.has_blocks()) return std::nullopt;
  return FormatBand{format.name(), format.min_absolute_subnormal(), format.min_absolute_normal(),
                    format.max_absolute_value()};
}

ScaleStats scale_stats(const TensorMetrics& m, const FPFormat* format) {
  ScaleStats s{m.mean_abs, m.std, m.abs_max, m.abs_min, m.numel, m.nan_count, m.inf_count, m.zero_count};
  if (!m.histogram) return s;
  for (size_t bin = 0; bin < m.histogram->counts.size(); ++bin) {
    if (const int64_t n = m.histogram->counts[bin]) s.exponents.push_back({static_cast<int>(bin) - 127, n});
  }
  if (format) {
    s.underflow = m.underflow_share(*format);
    s.subnormal = m.subnormal_share(*format);
    s.overflow = m.overflow_share(*format);
  }
  return s;
}

ScaleVariant scale_variant(std::string name, const ScalesGraph& graph, const FPFormat* fwd, const FPFormat* bwd) {
  ScaleVariant variant{std::move(name), {}};
  for (const ScaleNode& node : graph.nodes) {
    if (!node.metrics) continue;
    ScaleRow row{node.name, node.module, node.target};
    if (node.kind == NodeKind::Placeholder) row.op = "input";
    if (node.kind == NodeKind::GetAttr) {
      const size_t dot = node.target.rfind('.');
      row.module_path = dot == std::string::npos ? "" : node.target.substr(0, dot);
      row.name = node.target.substr(dot + 1);  // npos + 1 is 0
      row.op = node.requires_grad ? "parameter" : "buffer";
    }
    row.fwd = scale_stats(node.metrics->fwd.full(), fwd);
    if (node.metrics->bwd) row.bwd = scale_stats(node.metrics->bwd->full(), bwd);
    variant.rows.push_back(std::move(row));
  }
  return variant;
}

ScaleChart scale_chart(std::string title, const std::vector<std::pair<std::string, const ScalesGraph*>>& graphs,
                       const FPFormat& fwd, const FPFormat& bwd) {
  ScaleChart chart{std::move(title), {}, band_of(fwd), band_of(bwd)};
  for (const auto& [name, graph] : graphs) chart.variants.push_back(scale_variant(name, *graph, &fwd, &bwd));
  return chart;
}

Table table_of(const Report& report) {
  const std::vector<std::string> header = {"what", "node", "from", "to", "tau", "why", "module", "source"};
  std::vector<std::vector<std::string>> rows;
  for (const ReportEntry& e : report.entries()) {
    rows.push_back({std::string(to_string(e.kind)), e.node, e.from, e.to, e.tau ? short_number(*e.tau) : "", e.reason,
                    e.module, e.source});
  }
  // Without the columns that say nothing.
  Table table{{}, std::vector<std::vector<std::string>>(rows.size()), report.pass()};
  for (size_t c = 0; c < header.size(); ++c) {
    if (std::all_of(rows.begin(), rows.end(), [&](const auto& row) { return row[c].empty(); })) continue;
    table.header.push_back(header[c]);
    for (size_t r = 0; r < rows.size(); ++r) table.rows[r].push_back(std::move(rows[r][c]));
  }
  return table;
}

TimelineRun timeline_of(const Schedule& schedule, const Simulation& simulation, std::string name, std::string unit) {
  TimelineRun run{std::move(name), std::move(unit), {}, schedule.num_ranks()};
  bool fits = simulation.spans.size() == schedule.rows.size();
  for (size_t rank = 0; fits && rank < schedule.rows.size(); ++rank) {
    fits = simulation.spans[rank].size() == schedule.rows[rank].size();
    for (size_t i = 0; fits && i < schedule.rows[rank].size(); ++i) {
      const Span& span = simulation.spans[rank][i];
      add_action(run, schedule.rows[rank][i], static_cast<int>(rank), NAN, span.start, span.end);
    }
  }
  if (!fits) {
    throw Error(ErrorKind::InvalidArgument, "the simulation is not of schedule \"" + schedule.name + "\"", "",
                "simulate the schedule that is drawn");
  }
  run.note = "idle " + percent(simulation.bubble_rate());
  return run;
}

TimelineRun timeline_of(std::vector<TimelineEvent> events, std::string name) {
  TimelineRun run{std::move(name), "s"};
  start_at_zero(events);
  std::erase_if(events, [](const TimelineEvent& e) { return !e.action.is_compute(); });
  for (const TimelineEvent& e : events) {
    add_action(run, e.action, e.rank, e.waiting, e.start, e.end);
    run.num_ranks = std::max(run.num_ranks, e.rank + 1);
  }
  if (!run.actions.empty()) run.note = "idle " + percent(measured_bubble(events));
  return run;
}

}  // namespace plumb
