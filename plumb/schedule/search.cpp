#include "plumb/schedule/search.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <random>
#include <utility>

#include "plumb/core/error.h"
#include "plumb/schedule/generators_internal.h"
#include "plumb/schedule/list_schedule.h"

namespace plumb {
namespace {

using schedule_internal::memory_change;
using schedule_internal::RankCosts;
using schedule_internal::StageTimes;
using schedule_internal::TableRows;
using schedule_internal::TableTimer;

constexpr double kNever = schedule_internal::kForever;

// How one rank chooses.
struct Habit {
  int warm = 0;         // forwards go before input backwards while fewer microbatches than this are in flight
  int most = 1;         // never more microbatches in flight (forward done, input backward not)
  double patience = 0;  // a forward waits if the next input backward comes within this share of its own length
  double gap = 1;       // a weight backward goes into a gap of at least this share of its own length
};

struct Score {
  double longest = kNever, makespan = kNever;
  bool operator<(const Score& other) const {
    // Differences of rounding are none.
    if (std::abs(longest - other.longest) > 1e-9 * longest) return longest < other.longest;
    return makespan < other.makespan * (1 - 1e-12);
  }
};

// Plays a step of the pipeline through in time, every rank choosing by its habit.
class Player {
 public:
  Player(int num_ranks, int num_microbatches, const RankCosts& costs, double limit)
      : ranks_(num_ranks), microbatches_(num_microbatches), costs_(costs), limit_(limit * (1 + 1e-9)) {}

  Score play(const std::vector<Habit>& habits, TableRows* rows = nullptr) {
    habits_ = &habits;
    rows_ = rows;
    state_.assign(ranks_, {});
    forward_at_.assign(static_cast<std::size_t>(ranks_) * microbatches_, kNever);
    gradient_at_.assign(static_cast<std::size_t>(ranks_) * microbatches_, kNever);
    std::fill_n(forward_at_.begin(), microbatches_, 0.0);
    queue_ = {};
    wake(0, 0);
    while (!queue_.empty()) {
      auto [time, rank, turn] = queue_.top();
      queue_.pop();
      if (turn == state_[rank].turn) choose(rank, time);
    }
    Score score{0, 0};
    for (const State& state : state_) {
      score.longest = std::max(score.longest, state.free - state.begun);
      score.makespan = std::max(score.makespan, state.free);
    }
    return score;
  }

 private:
  struct State {
    int forwards = 0, inputs = 0, weights = 0;
    double free = 0, begun = kNever, memory = 0;
    int turn = 0;  // the entry of the queue that counts
  };
  struct Wake {
    double time;
    int rank, turn;
    bool operator<(const Wake& other) const { return std::pair(time, rank) > std::pair(other.time, other.rank); }
  };

  void wake(int rank, double time) { queue_.push({time, rank, ++state_[rank].turn}); }

  double& forward_at(int rank, int m) { return forward_at_[static_cast<std::size_t>(rank) * microbatches_ + m]; }
  double& gradient_at(int rank, int m) { return gradient_at_[static_cast<std::size_t>(rank) * microbatches_ + m]; }

  // Chooses the action of rank r at `now`, from the values that begun actions will deliver.
  void choose(int rank, double now) {
    State& state = state_[rank];
    const Habit& habit = (*habits_)[rank];
    int in_flight = state.forwards - state.inputs;
    double size = costs_.activation[rank];
    double input = state.inputs < state.forwards ? gradient_at(rank, state.inputs) : kNever;
    double forward =
        state.forwards < microbatches_ && in_flight < habit.most ? forward_at(rank, state.forwards) : kNever;
    bool fits = state.memory + size <= limit_;
    bool weight = state.weights < state.inputs;
    bool prefers_forward = fits && in_flight < habit.warm && forward <= now;
    if (input <= now && !prefers_forward) return run_input(rank, now);
    bool patient = input > now && input - now < habit.patience * costs_.forward[rank];
    if (forward <= now && !patient) {
      if (fits) return run_forward(rank, now);
      if (weight) return run_weight(rank, now);
    }
    double next = std::min(input, fits && !patient ? forward : kNever);
    if (weight && next - now >= habit.gap * costs_.weight[rank]) return run_weight(rank, now);
    if (next < kNever) wake(rank, next);
  }

  void begin(int rank, double now, double length, Action action) {
    State& state = state_[rank];
    state.begun = std::min(state.begun, now);
    state.free = now + length;
    state.memory += memory_change(costs_, action.kind, rank);
    if (rows_) (*rows_)[rank].push_back(action);
    wake(rank, state.free);
  }

  void run_forward(int rank, double now) {
    int m = state_[rank].forwards++;
    begin(rank, now, costs_.forward[rank], Action::forward(rank, m));
    if (rank + 1 < ranks_) {
      forward_at(rank + 1, m) = state_[rank].free + costs_.communication[rank];
      if (m == state_[rank + 1].forwards) notify(rank + 1, now);
    } else {
      gradient_at(rank, m) = state_[rank].free;
    }
  }
  void run_input(int rank, double now) {
    int m = state_[rank].inputs++;
    begin(rank, now, costs_.input[rank], Action::input(rank, m));
    if (rank > 0) {
      gradient_at(rank - 1, m) = state_[rank].free + costs_.communication[rank - 1];
      if (m == state_[rank - 1].inputs) notify(rank - 1, now);
    }
  }
  void run_weight(int rank, double now) {
    int m = state_[rank].weights++;
    begin(rank, now, costs_.weight[rank], Action::weight(rank, m));
  }

  // Something is on its way: a waiting rank thinks again, now that it knows.
  void notify(int rank, double now) { wake(rank, std::max(now, state_[rank].free)); }

  int ranks_, microbatches_;
  const RankCosts& costs_;
  double limit_;
  const std::vector<Habit>* habits_ = nullptr;
  TableRows* rows_ = nullptr;
  std::vector<State> state_;
  std::vector<double> forward_at_, gradient_at_;
  std::priority_queue<Wake> queue_;
};

// A table of one stage a rank. Timed, then changed along its critical path.
class Orders {
 public:
  Orders(TableRows rows, int num_microbatches, const StageTimes& times, double limit)
      : times_(times), limit_(limit * (1 + 1e-9)), rows_(std::move(rows)), timer_(num_microbatches) {}

  const TableRows& rows() const { return rows_; }

  // Unbearable if ranks wait for each other.
  Score time() {
    if (timer_.replay(times_, rows_, kNever, &ends_) == kNever) return {};
    Score score{0, 0};
    for (int rank = 0; rank < static_cast<int>(rows_.size()); ++rank) {
      double length = ends_[rank].back() - (ends_[rank].front() - length_of(rank, rows_[rank].front()));
      if (length > score.longest) longest_rank_ = rank;
      score.longest = std::max(score.longest, length);
      score.makespan = std::max(score.makespan, ends_[rank].back());
    }
    return score;
  }

  struct Place {
    int rank;
    std::size_t index;  // position of the later of two neighbors in a row
  };

  // Neighbors that follow each other without a pause on the way to the end of the longest rank: to change anything,
  // one such pair has to change places. Only pairs that may.
  std::vector<Place> critical_pairs() {
    std::vector<Place> pairs;
    int rank = longest_rank_;
    std::size_t i = rows_[rank].size() - 1;
    while (true) {
      const Action& action = rows_[rank][i];
      double start = ends_[rank][i] - length_of(rank, action);
      if (i > 0 && ends_[rank][i - 1] >= start - 1e-9) {
        if (may_swap(rank, i)) pairs.push_back({rank, i});
        --i;
        continue;
      }
      int from = action.kind == ActionKind::Forward ? rank - 1 : rank + 1;
      if (action.kind == ActionKind::BackwardWeight || from < 0 || from >= static_cast<int>(rows_.size())) break;
      rank = from;
      auto it = std::ranges::find_if(rows_[rank], [&](const Action& other) {
        return other.kind == action.kind && other.microbatch == action.microbatch;
      });
      i = static_cast<std::size_t>(it - rows_[rank].begin());
    }
    return pairs;
  }

  bool may_swap(int rank, std::size_t i) const {
    if (i == 0) return false;
    const Action &first = rows_[rank][i - 1], &second = rows_[rank][i];
    if (first.kind == second.kind) return false;
    if (first.microbatch != second.microbatch) return true;
    return !((first.kind == ActionKind::Forward && second.kind == ActionKind::BackwardInput) ||
             (first.kind == ActionKind::BackwardInput && second.kind == ActionKind::BackwardWeight));
  }

  // False (and nothing done) if the rank would then hold too much.
  bool swap(int rank, std::size_t i) {
    auto& row = rows_[rank];
    std::swap(row[i - 1], row[i]);
    double held = 0;
    for (std::size_t k = 0; k <= i; ++k) {
      held += memory_change(times_.costs, row[k].kind, rank);
      if (held > limit_) {
        std::swap(row[i - 1], row[i]);
        return false;
      }
    }
    return true;
  }
  void undo(int rank, std::size_t i) { std::swap(rows_[rank][i - 1], rows_[rank][i]); }

 private:
  double length_of(int rank, const Action& action) const {
    return schedule_internal::length_of(times_.costs, action.kind, rank);
  }

  const StageTimes& times_;
  double limit_;
  TableRows rows_;
  TableTimer timer_;
  std::vector<std::vector<double>> ends_;
  int longest_rank_ = 0;
};

struct Candidate {
  Score score;
  std::vector<Habit> habits;
};

// The same habit for all ranks, by their distance from the last.
std::vector<std::vector<Habit>> grid(int num_ranks) {
  std::vector<std::vector<Habit>> all;
  for (double gap : {1.0, 0.5, 0.0}) {
    for (int extra : {0, 1, 2}) {
      for (double warm : {1.0, 2.0, 0.0, 0.5, 1.5, 3.0}) {
        for (double most : {1.0, 2.0, 1e6, 1.5, 3.0}) {
          std::vector<Habit> habits;
          for (int rank = 0; rank < num_ranks; ++rank) {
            int below = num_ranks - 1 - rank;
            int ahead = static_cast<int>(std::min(most * below, 1e6));
            habits.push_back({static_cast<int>(warm * below) + (warm > 0), ahead + 1 + extra, 0, gap});
          }
          all.push_back(std::move(habits));
        }
      }
    }
  }
  return all;
}

int pick(std::mt19937_64& random, int count) { return static_cast<int>(random() % static_cast<std::uint64_t>(count)); }

// Returns one habit of a rank, or of some that follow each other, a little different.
std::vector<Habit> change_some(std::vector<Habit> habits, int num_microbatches, std::mt19937_64& random) {
  static constexpr double kShares[] = {0, 0.25, 0.5, 0.75, 1, 1.5};
  int ranks = static_cast<int>(habits.size());
  int first = pick(random, ranks), reach = pick(random, 3);
  int last = reach == 0 ? first : reach == 1 ? pick(random, ranks) : pick(random, 2) * (ranks - 1);
  static constexpr int kWhat[] = {0, 0, 0, 1, 1, 1, 2, 2, 3};  // patience seldom helps
  int what = kWhat[pick(random, 9)], step = pick(random, 2) ? 1 : -1;
  double share = kShares[pick(random, 6)];
  for (int rank = std::min(first, last); rank <= std::max(first, last); ++rank) {
    Habit& habit = habits[rank];
    if (what == 0) habit.warm = std::max(0, habit.warm + step);
    if (what == 1) habit.most = std::max(1, std::min(habit.most, num_microbatches) + step);
    if (what == 2) habit.gap = share;
    if (what == 3) habit.patience = share;
  }
  return habits;
}

// Swaps neighbors along the critical path as long as that does not make it longer; how many tables were timed.
int improve(Orders& orders, int most_tables, std::mt19937_64& random) {
  Score now = orders.time();
  int tried = 1;
  auto pairs = orders.critical_pairs();
  // A swap that memory forbids costs nothing and counts little, but cannot go on for ever.
  for (int i = 0; i < 4 * most_tables && tried < most_tables && !pairs.empty(); ++i) {
    auto [rank, index] = pairs[pick(random, static_cast<int>(pairs.size()))];
    if (!orders.swap(rank, index)) continue;
    ++tried;
    Score score = orders.time();
    if (now < score) {
      orders.undo(rank, index);
      continue;
    }
    now = score;
    pairs = orders.critical_pairs();
  }
  return tried;
}

}  // namespace

SearchResult search_schedule(int num_ranks, int num_microbatches, const Costs& given, const SearchOptions& options) {
  SearchResult result;
  result.schedule = schedule_internal::new_table("Searched", num_ranks, num_microbatches, 1, false);
  StageTimes times{{}, loop_placement(num_ranks, 1).ranks, std::vector<double>(num_ranks, 0)};
  times.costs = RankCosts(given.for_stages(num_ranks, num_ranks), times.rank);
  const RankCosts& costs = times.costs;
  double largest = *std::ranges::max_element(costs.activation);
  if (!(options.memory_limit >= largest * (1 - 1e-9))) {
    throw Error(ErrorKind::InvalidArgument, "not even one microbatch fits in the memory limit", "",
                "a higher limit, more ranks, or smaller microbatches");
  }
  Player player(num_ranks, num_microbatches, costs, options.memory_limit);
  const double per_table = 3.0 * num_ranks * num_microbatches;
  const int most_tables = std::max(1, static_cast<int>(std::min(options.effort / per_table, 4e4)));

  std::vector<Candidate> candidates;
  for (const std::vector<Habit>& habits : grid(num_ranks)) {
    if (result.tried >= most_tables) break;
    ++result.tried;
    candidates.push_back({player.play(habits), habits});
  }
  std::ranges::stable_sort(candidates, [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
  auto same = [](const Candidate& a, const Candidate& b) { return !(a.score < b.score) && !(b.score < a.score); };
  candidates.erase(std::unique(candidates.begin(), candidates.end(), same), candidates.end());
  candidates.resize(std::min<std::size_t>(candidates.size(), 4));

  std::mt19937_64 random(options.seed);
  auto refine = [&](Candidate& candidate, int tables) {
    for (int i = 0; i < tables; ++i) {
      Candidate changed{{}, change_some(candidate.habits, num_microbatches, random)};
      changed.score = player.play(changed.habits);
      ++result.tried;
      if (!(candidate.score < changed.score)) candidate = std::move(changed);  // also sideways
    }
  };
  int left = most_tables - result.tried;
  for (Candidate& candidate : candidates) refine(candidate, left / 16);
  Candidate& best =
      *std::ranges::min_element(candidates, [](const auto& a, const auto& b) { return a.score < b.score; });
  refine(best, left / 2);
  player.play(best.habits, &result.schedule.rows);
  Orders orders(result.schedule.rows, num_microbatches, times, options.memory_limit);
  result.tried += improve(orders, most_tables - result.tried, random);
  result.schedule.rows = orders.rows();
  result.simulation = simulate_schedule(result.schedule, given);
  return result;
}

}  // namespace plumb
