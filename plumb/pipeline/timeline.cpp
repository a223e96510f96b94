#include "plumb/pipeline/timeline.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <set>
#include <sstream>

#include "plumb/core/error.h"

namespace plumb {

std::string to_text(const std::vector<TimelineEvent>& events) {
  std::string out;
  char line[160];
  for (const auto& e : events) {
    std::snprintf(line, sizeof line, "%d %s %.3f %.3f %.3f\n", e.rank, to_string(e.action).c_str(), e.waiting * 1e6,
                  e.start * 1e6, e.end * 1e6);
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
      throw Error(ErrorKind::InvalidArgument, "line " + std::to_string(n) + " of the time line, '" + line +
                                                  "', is not 'rank action waiting start end'");
    }
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

double measured_bubble(const std::vector<TimelineEvent>& events) {
  if (events.empty()) return 0;
  std::set<int> ranks;
  double first = events[0].start, last = events[0].end, busy = 0;
  for (const auto& e : events) {
    ranks.insert(e.rank);
    first = std::min(first, e.start);
    last = std::max(last, e.end);
    busy += e.end - e.start;
  }
  const double area = static_cast<double>(ranks.size()) * (last - first);
  return area > 0 ? 1 - busy / area : 0;
}

}  // namespace plumb
