#include "plumb/schedule/joint.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <set>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/schedule/event_simulation.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/list_schedule.h"
#include "plumb/schedule/pieces.h"

namespace plumb {
namespace {

using schedule_internal::kForever;
using schedule_internal::ListHabits;
using schedule_internal::peak_of_row;
using schedule_internal::PieceSums;
using schedule_internal::StageTimes;
using schedule_internal::TableRows;
using schedule_internal::TableTimer;
using schedule_internal::without_pairs;

constexpr double kEffort = 6e8;  // about how many actions are timed, at most

// Numbers by chance, the same on every machine.
class Chance {
 public:
  explicit Chance(std::uint64_t seed) : random_(seed) {}
  int below(int count) { return static_cast<int>(random_() % static_cast<std::uint64_t>(std::max(count, 1))); }
  double share() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  bool one_in(int count) { return below(count) == 0; }

 private:
  std::mt19937_64 random_;
};

struct PlanCandidate {
  PieceStages stages;
  std::vector<int> rank;  // by stage
  ListHabits habits;
  std::optional<TableRows> rows;  // none: those that the list scheduler makes

  int count() const { return static_cast<int>(rank.size()); }
};

// The shares of the best named schedule's times, and the largest of them.
struct PlanScore {
  std::vector<double> shares;
  double worst = kForever;
};

class Search {
 public:
  Search(int num_ranks, int num_microbatches, const PieceCosts& pieces, const JointOptions& options)
      : ranks_(num_ranks),
        microbatches_(num_microbatches),
        pieces_(pieces),
        options_(options),
        timer_(num_microbatches),
        chance_(1) {
    // The costs as they are; with links four times as slow; with costs off by up to a tenth.
    scenarios_.emplace_back(pieces, 1, [](int) { return 1.0; });
    scenarios_.emplace_back(pieces, 4, [](int) { return 1.0; });
    std::vector<double> off;
    Chance jitter(2);
    for (int i = 0; i < pieces.size(); ++i) off.push_back(1 + 0.1 * (2 * jitter.share() - 1));
    scenarios_.emplace_back(pieces, 1, [&](int piece) { return off[piece]; });
  }

  JointResult run();

 private:
  int num_pieces() const { return pieces_.size(); }
  double spent() const { return std::max(timer_.actions() / kEffort, static_cast<double>(tried_) / options_.tables); }

  void take_named(JointResult& result);
  std::vector<PlanCandidate> seeds(const std::vector<ScheduleChoice>& named) const;
  StageTimes times_of(const PlanCandidate& c, std::size_t scenario) const {
    StageTimes times = scenarios_[scenario].times(c.stages, c.rank, ranks_, pieces_.latency * (scenario == 1 ? 4 : 1));
    times.costs = schedule_internal::RankCosts(std::move(times.costs), c.rank);
    return times;
  }
  PlanScore score(const PlanCandidate& c, double give_up, TableRows* rows = nullptr);
  bool keeps_memory(const StageTimes& times, const TableRows& rows) const;
  void anneal(PlanCandidate& candidate, PlanScore& score, double until, double from);
  bool change(PlanCandidate& c);
  bool move_cut(PlanCandidate& c);
  bool move_stage(PlanCandidate& c);
  bool change_habits(PlanCandidate& c);
  bool change_count(PlanCandidate& c);
  bool change_way(PlanCandidate& c);
  void swap_neighbors(PlanCandidate& c, PlanScore& score, double until);
  bool move_action(std::vector<Action>& row);
  void note(const PlanCandidate& c, const PlanScore& score);

  int ranks_, microbatches_;
  const PieceCosts& pieces_;
  const JointOptions& options_;
  TableTimer timer_;
  Chance chance_;
  std::vector<PieceSums> scenarios_;
  std::vector<double> named_times_;  // by scenario, of the best named schedule
  std::vector<ScheduleChoice> choices_;
  double limit_ = kForever;
  PlanCandidate best_;
  PlanScore best_score_;
  int tried_ = 0;
};

// `give_up`: a candidate whose step is longer than this share as it stands is not timed any further.
PlanScore Search::score(const PlanCandidate& c, double give_up, TableRows* out) {
  ++tried_;
  PlanScore score;
  score.shares.assign(scenarios_.size(), kForever);
  const StageTimes times = times_of(c, 0);
  TableRows made;
  double length = kForever;
  if (c.rows) {
    length = keeps_memory(times, *c.rows) ? timer_.replay(times, *c.rows, give_up * named_times_[0]) : kForever;
  } else {
    length = timer_.make(times, c.habits, limit_, &made, give_up * named_times_[0]);
  }
  score.shares[0] = length / named_times_[0];
  if (score.shares[0] <= give_up && length < kForever) {
    score.worst = score.shares[0];
    const TableRows& rows = c.rows ? *c.rows : made;
    for (std::size_t i = 1; i < scenarios_.size(); ++i) {
      score.shares[i] = timer_.replay(times_of(c, i), rows, give_up * named_times_[i]) / named_times_[i];
      score.worst = std::max(score.worst, score.shares[i]);
      if (score.worst > give_up) break;
    }
  }
  if (out) *out = c.rows ? *c.rows : std::move(made);
  return score;
}

bool Search::keeps_memory(const StageTimes& times, const TableRows& rows) const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (peak_of_row(times, rank, rows[rank]) > limit_ * (1 + 1e-9)) return false;
  }
  return true;
}

void Search::note(const PlanCandidate& c, const PlanScore& score) {
  if (score.worst >= best_score_.worst * (1 - 1e-12)) return;
  best_ = c;
  best_score_ = score;
}

// --- changes; each returns false if it cannot be made ---

bool Search::move_cut(PlanCandidate& c) {
  if (c.count() < 2) return false;
  const auto once = [&](int step) {
    auto& begins = c.stages.begins;
    const int s = 1 + chance_.below(c.count() - 1), to = begins[s] + step;
    const int next = s + 1 < c.count() ? begins[s + 1] : num_pieces();
    if (to <= begins[s - 1] || to >= next) return false;
    begins[s] = to;
    return true;
  };
  const int step = (chance_.one_in(2) ? 1 : -1) * (chance_.one_in(4) ? 2 + chance_.below(3) : 1);
  if (!once(step)) return false;
  if (chance_.one_in(3)) once(chance_.one_in(2) ? 1 : -1);
  return true;
}

bool Search::move_stage(PlanCandidate& c) {
  if (c.rows || c.count() < 2) return false;
  const int a = chance_.below(c.count()), b = chance_.below(c.count());
  if (chance_.below(3) > 0) {
    if (c.rank[a] == c.rank[b]) return false;
    std::swap(c.rank[a], c.rank[b]);
    return true;
  }
  if (std::ranges::count(c.rank, c.rank[a]) == 1) return false;  // its rank would have nothing to do
  c.rank[a] = chance_.below(ranks_);
  return true;
}

bool Search::change_habits(PlanCandidate& c) {
  if (c.rows) return false;
  ListHabits& h = c.habits;
  switch (chance_.below(pieces_.gradient.empty() ? 6 : 7)) {
    case 0: h.group = 1 + chance_.below(2 * ranks_); break;
    case 1: h.gap = std::vector{-1.0, 0.0, 0.25, 0.5, 1.0}[chance_.below(5)]; break;
    case 2: h.share = chance_.one_in(3) ? 1 : chance_.share(); break;
    case 3: h.deep_first = !h.deep_first; break;
    case 4: std::ranges::fill(h.halves, static_cast<char>(chance_.below(2))); break;
    case 6: h.ahead = !h.ahead; break;
    default: h.halves[chance_.below(c.count())] ^= 1; break;
  }
  return true;
}

// Divides a stage, or joins it with the one before.
bool Search::change_count(PlanCandidate& c) {
  if (c.rows) return false;
  auto& begins = c.stages.begins;
  const int s = chance_.below(c.count());
  if (chance_.one_in(2)) {
    if (s == 0 || std::ranges::count(c.rank, c.rank[s]) == 1) return false;
    begins.erase(begins.begin() + s);
    c.stages.ways.erase(c.stages.ways.begin() + s);
    c.rank.erase(c.rank.begin() + s);
    c.habits.halves.erase(c.habits.halves.begin() + s);
    return true;
  }
  const int next = s + 1 < c.count() ? begins[s + 1] : num_pieces();
  const int most = ranks_ * *std::ranges::max_element(options_.stages_per_rank);
  if (next - begins[s] < 2 || c.count() >= most) return false;
  begins.insert(begins.begin() + s + 1, begins[s] + 1 + chance_.below(next - begins[s] - 1));
  c.stages.ways.insert(c.stages.ways.begin() + s + 1, c.stages.ways[s]);
  c.rank.insert(c.rank.begin() + s + 1, chance_.below(ranks_));
  c.habits.halves.insert(c.habits.halves.begin() + s + 1, c.habits.halves[s]);
  return true;
}

bool Search::change_way(PlanCandidate& c) {
  const int ways = static_cast<int>(pieces_.ways.size());
  if (ways < 2) return false;
  const int way = chance_.below(ways);
  if (chance_.one_in(4)) {
    std::ranges::fill(c.stages.ways, way);
  } else {
    c.stages.ways[chance_.below(c.count())] = way;
  }
  return true;
}

bool Search::change(PlanCandidate& c) {
  switch (chance_.below(10)) {
    case 0:
    case 1:
    case 2:
    case 3: return move_cut(c);
    case 4:
    case 5: return move_stage(c);
    case 6:
    case 7: return change_habits(c);
    case 8: return change_way(c);
    default: return change_count(c);
  }
}

// Until so much of the effort is spent. Accepts a change for the worse up to a threshold that falls to nothing.
void Search::anneal(PlanCandidate& current, PlanScore& score_now, double until, double from) {
  const double begin = spent();
  note(current, score_now);
  for (int idle = 0; spent() < until && idle < 1000;) {
    PlanCandidate next = current;
    if (!change(next)) {
      ++idle;
      continue;
    }
    idle = 0;
    const double left = 1 - (spent() - begin) / std::max(until - begin, 1e-12);
    const double most = score_now.worst * (1 + from * left * chance_.share());
    PlanScore found = score(next, most);
    if (!(found.worst <= most) && score_now.worst < kForever) continue;
    current = std::move(next);
    score_now = std::move(found);
    note(current, score_now);
  }
}

// Moves an action up to six places forward, or joins the halves of a backward that follow each other.
bool Search::move_action(std::vector<Action>& row) {
  const int size = static_cast<int>(row.size());
  if (size < 2) return false;
  const int i = 1 + chance_.below(size - 1);
  Action& before = row[i - 1];
  if (before.kind == ActionKind::BackwardInput && row[i] == Action::weight(before.stage, before.microbatch)) {
    before.kind = ActionKind::FullBackward;
    row.erase(row.begin() + i);
    return true;
  }
  const int most = 1 + chance_.below(6);
  int moved = 0;
  for (int k = i; k > 0 && moved < most; --k, ++moved) {
    const Action &a = row[k - 1], &b = row[k];
    if (a.stage == b.stage) {
      const bool weights = a.kind != ActionKind::Forward && b.kind != ActionKind::Forward &&
                           a.kind != ActionKind::BackwardInput && b.kind != ActionKind::BackwardInput;
      if (a.kind == b.kind || a.microbatch == b.microbatch || weights) break;
    }
    std::swap(row[k - 1], row[k]);
  }
  return moved > 0;
}

void Search::swap_neighbors(PlanCandidate& c, PlanScore& now, double until) {
  std::vector<StageTimes> times;
  for (std::size_t i = 0; i < scenarios_.size(); ++i) times.push_back(times_of(c, i));
  TableRows& rows = *c.rows;
  for (int idle = 0; spent() < until && idle < 1000;) {
    const int rank = chance_.below(ranks_);
    const std::vector<Action> before = rows[rank];
    PlanScore found{{}, 0};
    if (!move_action(rows[rank])) {
      ++idle;
      continue;
    }
    idle = 0;
    ++tried_;
    if (peak_of_row(times[0], rank, rows[rank]) > limit_ * (1 + 1e-9)) found.worst = kForever;
    for (std::size_t i = 0; i < times.size() && found.worst <= now.worst; ++i) {
      found.shares.push_back(timer_.replay(times[i], rows, now.worst * named_times_[i]) / named_times_[i]);
      found.worst = std::max(found.worst, found.shares.back());
    }
    if (found.worst <= now.worst) {
      now = found;
    } else {
      rows[rank] = before;
    }
  }
  note(c, now);
}

// Times the named schedules on balanced cuts; the quickest that fits is what all others are measured by.
void Search::take_named(JointResult& result) {
  CompareOptions compare;
  compare.memory_limit = options_.memory_limit;
  compare.stages_per_rank = options_.stages_per_rank;
  compare.names = options_.names;
  // A candidate has each stage on one rank.
  const std::vector<std::string> one_way = usual_schedules();
  std::erase_if(compare.names, [&](const std::string& name) {
    return std::ranges::find(one_way, name) == one_way.end() && schedule_traits(name).bidirectional;
  });
  if (compare.names.empty()) compare.names = one_way;
  choices_ = compare_schedules(
      ranks_, microbatches_, [&](int stages) { return costs_of_stages(pieces_, balanced_stages(pieces_, stages)); },
      compare);
  std::erase_if(choices_, [](const ScheduleChoice& c) { return !c.problem.empty(); });
  if (choices_.empty() || !choices_[0].fits) {
    const auto least = std::ranges::min_element(choices_, {}, &ScheduleChoice::peak);
    throw Error(ErrorKind::InvalidArgument,
                choices_.empty() ? str("a model of ", num_pieces(), " pieces has no schedule for ", ranks_, " ranks")
                                 : str("no schedule keeps the memory limit of ", options_.memory_limit,
                                       "; the least is ", least->peak(), " (", least->name, ")"),
                "", choices_.empty() ? "fewer ranks" : "a higher limit, more ranks, or smaller microbatches");
  }
  result.named = choices_[0];
  limit_ = std::isinf(options_.memory_limit) ? result.named.peak() : options_.memory_limit;
}

std::vector<PlanCandidate> Search::seeds(const std::vector<ScheduleChoice>& named) const {
  std::vector<PlanCandidate> all;
  for (std::size_t i = 0; i < named.size() && i < 4; ++i) {
    const Schedule& schedule = named[i].schedule;
    if (!named[i].fits) break;
    PlanCandidate c{
        balanced_stages(pieces_, schedule.num_stages()), schedule.placement.ranks, {}, without_pairs(schedule.rows)};
    c.habits.halves.assign(c.rank.size(), 0);
    all.push_back(std::move(c));
  }
  std::set<int> per_rank(options_.stages_per_rank.begin(), options_.stages_per_rank.end());
  for (const int v : per_rank) {
    if (v < 1 || ranks_ * v > num_pieces()) continue;
    for (const bool v_shape : {false, true}) {
      if (v_shape && v == 1) continue;
      PlanCandidate c{balanced_stages(pieces_, ranks_ * v), {}, {}, {}};
      c.rank = (v_shape ? v_placement(ranks_, v) : loop_placement(ranks_, v)).ranks;
      for (const int group : {ranks_, 1}) {
        c.habits = {.group = group, .halves = std::vector<char>(c.rank.size(), 1)};
        all.push_back(c);
      }
    }
  }
  return all;
}

JointResult Search::run() {
  JointResult result;
  take_named(result);
  struct Run {
    PlanCandidate candidate;
    PlanScore score;
  };
  std::vector<Run> runs;
  for (PlanCandidate& c : seeds(choices_)) runs.push_back({std::move(c), {}});
  for (std::size_t i = 0; i < scenarios_.size(); ++i)
    named_times_.push_back(std::max(timer_.replay(times_of(runs[0].candidate, i), *runs[0].candidate.rows),
                                    std::numeric_limits<double>::min()));  // no work at all has shares, too
  for (Run& run : runs) run.score = score(run.candidate, kForever);
  // Half of the effort goes to all of them, more to the best three, the rest to the best one's rows.
  for (std::size_t i = 0; i < runs.size(); ++i)
    anneal(runs[i].candidate, runs[i].score, 0.45 * static_cast<double>(i + 1) / static_cast<double>(runs.size()),
           0.02);
  std::ranges::stable_sort(runs, {}, [](const Run& run) { return run.score.worst; });
  for (std::size_t i = 0; i < std::min<std::size_t>(3, runs.size()); ++i)
    anneal(runs[i].candidate, runs[i].score, 0.45 + 0.1 * static_cast<double>(i + 1), 0.004);
  PlanCandidate last = best_;
  TableRows rows;
  PlanScore now = score(last, kForever, &rows);
  last.rows = std::move(rows);
  swap_neighbors(last, now, 1);

  result.stages = best_.stages;
  result.costs = costs_of_stages(pieces_, best_.stages);
  result.schedule = {"Joint", microbatches_, Placement{best_.rank, {}, 0}, {}};
  if (best_.rows) {
    result.schedule.rows = *best_.rows;
  } else {
    timer_.make(times_of(best_, 0), best_.habits, limit_, &result.schedule.rows);
  }
  result.simulation = simulate_schedule(result.schedule, result.costs.costs);
  for (int rank = 0; rank < ranks_; ++rank)
    result.memory.push_back(peak_of_row(times_of(best_, 0), rank, result.schedule.rows[rank]));
  result.shares = best_score_.shares;
  return result;
}

}  // namespace

JointResult joint_search(int num_ranks, int num_microbatches, const PieceCosts& pieces, const JointOptions& options) {
  schedule_internal::check_pieces(pieces);
  if (num_ranks < 1 || num_microbatches < 1 || options.stages_per_rank.empty() || options.tables < 1) {
    throw Error(ErrorKind::InvalidArgument,
                str("a plan for ", num_ranks, " ranks and ", num_microbatches, " microbatches cannot be searched"), "",
                "at least one rank, one microbatch and one number of stages a rank");
  }
  return Search(num_ranks, num_microbatches, pieces, options).run();
}

}  // namespace plumb
