#include "plumb/pipeline/runtime/timeline.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {

std::string to_text(const std::vector<TimelineEvent>& events) {
  std::string out;
  char line[160];
  for (const auto& e : events) {
    std::snprintf(line, sizeof line, "%d %s %.3f %.3f %.3f %" PRId64 "\n", e.rank, to_string(e.action).c_str(),
                  e.waiting * 1e6, e.start * 1e6, e.end * 1e6, e.sent);
    out += line;
  }
  return out;
}

std::vector<TimelineEvent> parse_timeline(const std::string& text) {
  std::vector<TimelineEvent> events;
  std::istringstream lines(text);
  std::string line;
  for (int n = 1; std::getline(lines, line); n++) {
    if (line.empty()) continue;
    std::istringstream fields(line);
    TimelineEvent e;
    std::string action;
    if (!(fields >> e.rank >> action >> e.waiting >> e.start >> e.end)) {
      throw Error(ErrorKind::BadFile, str("line ", n, " of the time line, '", line,
                                          "', is not 'rank action waiting start end', perhaps with the bytes sent"));
    }
    if (!(fields >> e.sent)) e.sent = 0;
    e.action = parse_action(action);
    for (double* t : {&e.waiting, &e.start, &e.end}) *t /= 1e6;
    events.push_back(e);
  }
  return events;
}

void start_at_zero(std::vector<TimelineEvent>& events) {
  if (events.empty()) return;
  double first = events[0].waiting;
  for (const auto& e : events) first = std::min(first, e.waiting);
  for (auto& e : events) {
    e.waiting -= first;
    e.start -= first;
    e.end -= first;
  }
}

Costs measured_costs(const std::vector<TimelineEvent>& events, int num_stages) {
  const auto stages = static_cast<size_t>(num_stages);
  auto mean = [&](ActionKind kind) {
    std::vector<double> sums(stages), counts(stages);
    for (const auto& e : events) {
      if (e.action.kind != kind) continue;
      sums.at(e.action.stage) += e.end - e.start;
      counts[e.action.stage] += 1;
    }
    for (size_t s = 0; s < stages; s++) sums[s] = counts[s] > 0 ? sums[s] / counts[s] : 0;
    return sums;
  };
  Costs costs;
  costs.forward = mean(ActionKind::Forward);
  costs.input = mean(ActionKind::BackwardInput);
  costs.weight = mean(ActionKind::BackwardWeight);
  costs.full = mean(ActionKind::FullBackward);
  // By direction, stage and microbatch.
  std::map<std::tuple<bool, int, int>, const TimelineEvent*> done;
  for (const auto& e : events) {
    if (e.action.kind == ActionKind::BackwardWeight || !e.action.is_compute()) continue;
    done[{e.action.kind == ActionKind::Forward, e.action.stage, e.action.microbatch}] = &e;
  }
  std::vector<std::vector<double>> trips(stages);
  for (const auto& [key, e] : done) {
    const auto& [forward, stage, microbatch] = key;
    const auto from = done.find({forward, stage + (forward ? -1 : 1), microbatch});
    if (from == done.end() || from->second->rank == e->rank || e->waiting > from->second->end) continue;
    // A message and the gradient that comes back for it are of the stage that the message leaves.
    trips.at(forward ? stage - 1 : stage).push_back(std::max(0.0, e->start - from->second->end));
  }
  costs.communication.assign(stages, 0);
  for (size_t s = 0; s < stages; s++) {
    auto& list = trips[s];
    if (list.empty()) continue;
    std::nth_element(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(list.size() / 2), list.end());
    costs.communication[s] = list[list.size() / 2];
  }
  return costs;
}

double measured_bubble(const std::vector<TimelineEvent>& events) {
  std::set<int> ranks;
  double first = std::numeric_limits<double>::max(), last = 0, busy = 0;
  for (const auto& e : events) {
    if (!e.action.is_compute()) continue;
    ranks.insert(e.rank);
    first = std::min(first, e.start);
    last = std::max(last, e.end);
    busy += e.end - e.start;
  }
  const double area = static_cast<double>(ranks.size()) * (last - first);
  return area > 0 ? 1 - busy / area : 0;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace plumb
