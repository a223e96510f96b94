// Makes and times tables fast enough for a search. Inside of joint_search().
#pragma once

#include <limits>
#include <vector>

#include "plumb/schedule/rank_memory.h"
#include "plumb/schedule/schedule.h"

namespace plumb::schedule_internal {

inline constexpr double kForever = std::numeric_limits<double>::infinity();

// Costs of a table's stages, one entry a stage.
struct StageTimes {
  RankCosts costs;
  std::vector<int> rank;         // by stage
  std::vector<double> resident;  // by rank
};

// How every rank chooses.
struct ListHabits {
  int group = 1;            // forwards go in rounds of so many microbatches through a rank's stages
  double share = 1;         // share of the memory beside the resident one that forwards may fill
  double gap = 0.5;         // a weight half goes into a wait of at least this share of its length; below 0: at once
  bool deep_first = false;  // precedence of later stages among a round's forwards
  bool ahead = false;       // forwards may fill the memory of gradients that have not come yet
  std::vector<char> halves = {};  // by stage: whether its backward is divided
};

using TableRows = std::vector<std::vector<Action>>;

// Times tables of one number of microbatches; keeps its working memory from call to call.
class TableTimer {
 public:
  explicit TableTimer(int num_microbatches) : microbatches_(num_microbatches) {}

  // Plays a step through in time; every rank takes what can begin first. Returns its length, or infinity if ranks wait
  // for memory for ever, or as soon as the step cannot end by `give_up`.
  double make(const StageTimes& times, const ListHabits& habits, double memory_limit, TableRows* rows,
              double give_up = kForever);
  // Returns the length of a table of F, B, I and W, or infinity if ranks wait for each other, or as soon as the step
  // cannot end by `give_up`. `ends`, where given, gets the end of each action.
  double replay(const StageTimes& times, const TableRows& rows, double give_up = kForever,
                std::vector<std::vector<double>>* ends = nullptr);

  double actions() const { return actions_; }  // timed so far

 private:
  struct Choice {
    double start, priority;
    int stage;
    ActionKind kind;
  };
  struct StageState {
    int forwards = 0, backs = 0, weights = 0;
  };

  void begin(const StageTimes& times, double give_up);
  bool too_late(int rank, int stage, ActionKind kind, double end);
  Choice choose(int rank) const;
  double reserved(int rank) const;
  void consider_weights(int rank, Choice& best) const;
  double run(int rank, const Choice& choice);
  double ready_forward(int stage, int m) const;
  double ready_backward(int stage, int m) const;
  double& at(std::vector<double>& list, int stage, int m) const {
    return list[static_cast<std::size_t>(stage) * microbatches_ + m];
  }
  double at(const std::vector<double>& list, int stage, int m) const {
    return list[static_cast<std::size_t>(stage) * microbatches_ + m];
  }

  int microbatches_;
  double actions_ = 0;
  const StageTimes* times_ = nullptr;
  const ListHabits* habits_ = nullptr;
  double limit_ = 0, give_up_ = kForever;
  std::vector<StageState> stages_;
  std::vector<double> forward_end_, back_end_;      // by stage and microbatch; infinity: not begun
  std::vector<double> after_forward_, after_back_;  // by stage: the least time from an action's end to the step's
  std::vector<double> free_, working_, left_;       // by rank; left_: time of the actions that have not run
  std::vector<RankMemory> memory_;                  // by rank
  std::vector<std::vector<int>> held_;              // stages by rank
  std::vector<std::size_t> next_;
};

// Returns the most memory that a rank's row takes, resident one included.
double peak_of_row(const StageTimes& times, int rank, const std::vector<Action>& row);

}  // namespace plumb::schedule_internal
