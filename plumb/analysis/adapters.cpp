#include "plumb/analysis/adapters.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "plumb/core/error.h"

namespace plumb {
namespace {

void add_action(TimelineRun& run, const Action& action, int rank, double waiting, double start, double end,
                int64_t sent = 0) {
  if (!action.is_compute()) return;
  const Action second = action.second_part();
  auto add = [&](const Action& a, int half) {
    run.actions.push_back(
        {rank, std::string(to_string(a.kind)), a.stage, a.microbatch, start, end, waiting, half, half == 2 ? 0 : sent});
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
    if (std::ranges::all_of(rows, [&](const auto& row) { return row[c].empty(); })) continue;
    table.header.push_back(header[c]);
    for (size_t r = 0; r < rows.size(); ++r) table.rows[r].push_back(std::move(rows[r][c]));
  }
  return table;
}

std::string conclusion(const Report& report) {
  auto several = [](size_t n, const std::string& what) { return c10::str(n, " ", what, n == 1 ? "" : "s"); };
  std::map<double, size_t> taus;
  std::map<std::string, size_t> reasons;
  for (const ReportEntry& e : report.entries()) {
    if (e.kind == ReportKind::Residual && e.tau) ++taus[*e.tau];
    if (e.kind == ReportKind::LeftAlone) ++reasons[e.reason];
  }
  std::string out = "**" + several(report.count(ReportKind::Replaced), "operator") +
                    "** replaced by unit-scaled ones, " + "**" + several(report.count(ReportKind::Weight), "weight") +
                    "** divided by their standard deviation, **" +
                    several(report.count(ReportKind::Residual), "residual add") + "**";
  for (const auto& [tau, n] : taus) {
    out += c10::str(tau == taus.begin()->first ? " (" : ", ", n, " with tau ", short_number(tau));
  }
  out += std::string(taus.empty() ? "" : ")") + ", **" + several(report.count(ReportKind::LeftAlone), "node") +
         "** left alone";
  const auto most = std::ranges::max_element(reasons, [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != reasons.end()) out += ", most often because: " + most->first;
  return out + ".";
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
  run.note = "bubble " + percent(simulation.bubble_rate());
  return run;
}

TimelineRun timeline_of(std::vector<TimelineEvent> events, std::string name) {
  TimelineRun run{std::move(name), "s"};
  start_at_zero(events);
  std::erase_if(events, [](const TimelineEvent& e) { return !e.action.is_compute(); });
  for (const TimelineEvent& e : events) {
    add_action(run, e.action, e.rank, e.waiting, e.start, e.end, e.sent);
    run.num_ranks = std::max(run.num_ranks, e.rank + 1);
  }
  if (!run.actions.empty()) run.note = "bubble " + percent(measured_bubble(events));
  return run;
}

MeasuredStep measured_step(const Schedule& schedule, const std::vector<TimelineEvent>& events) {
  const int stages = schedule.num_stages();
  const Costs measured = measured_costs(events, stages);
  Costs no_messages = measured, equal = measured;
  no_messages.communication.assign(static_cast<size_t>(stages), 0);
  equal.communication = no_messages.communication;
  double slowest = 0, mean = 0;
  int slow = 0;
  for (int s = 0; s < stages; ++s) {
    const auto i = static_cast<size_t>(s);
    const double all = measured.forward[i] + measured.input[i] + measured.weight[i] + measured.full[i];
    if (all > slowest) slowest = all, slow = s;
    mean += all / stages;
  }
  for (auto* kind : {&equal.forward, &equal.input, &equal.weight, &equal.full}) {
    double sum = 0;
    for (double each : *kind) sum += each;
    kind->assign(kind->size(), sum / stages);
  }
  MeasuredStep out;
  out.bubble = measured_bubble(events);
  const Simulation by_stage = simulate_schedule(schedule, no_messages), ideal = simulate_schedule(schedule, equal);
  out.chart.title = schedule.name + ", one step";
  out.chart.runs = {timeline_of(events),
                    timeline_of(schedule, by_stage, "simulated, every stage as long as measured", "s"),
                    timeline_of(schedule, ideal, "simulated, all stages equal", "s")};
  const double of_stages = by_stage.bubble_rate() - ideal.bubble_rate();
  auto points = [](double share) { return short_number(std::round(std::fabs(share) * 1000) / 10) + " points"; };
  out.conclusion = "Ranks compute nothing for " + percent(out.bubble) +
                   " of the step from its first to its last action: that is the bubble. The table alone, with equal "
                   "stages and messages that take no time, has " +
                   percent(ideal.bubble_rate()) + ".";
  out.conclusion += std::fabs(of_stages) < 0.005
                        ? " The stages take about as long as each other, so that they add nothing."
                        : c10::str(" That stages differ (stage ", slow, " takes ",
                                   short_number(std::round(100 * slowest / mean) / 100), " times the mean) ",
                                   of_stages > 0 ? "adds " : "takes away ", points(of_stages), ".");
  const double rest = out.bubble - by_stage.bubble_rate();
  out.conclusion += std::fabs(rest) < 0.005 ? " Messages and uneven actions add nothing that can be seen."
                    : rest > 0              ? " The other " + points(rest) +
                                     " are waiting for messages and actions that take longer than their mean."
                               : " Actions that took less than their mean give " + points(rest) + " back.";
  return out;
}

}  // namespace plumb
