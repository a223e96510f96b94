// A pipeline's time table: for every rank the actions it runs, in order, and which rank holds which stage.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plumb/schedule/action.h"

namespace plumb {

// A value that goes from one stage to a later one; its gradient comes back unless it has none (integers, masks).
struct StageEdge {
  int from = 0, to = 0;
  bool gradient = true;
  bool operator==(const StageEdge&) const = default;
};

// Which stages use which stages' outputs. An empty list means the chain 0 -> 1 -> 2 -> ...; otherwise the list is the
// whole truth (skip connections AND the chain's own edges), with from < to.
using StageEdges = std::vector<StageEdge>;

StageEdges chain_edges(int num_stages);

// Which rank runs a stage. In a bidirectional table (DualPipe) every stage lives on two ranks: microbatches from
// `reverse_from` on run on `reverse_ranks`.
struct Placement {
  std::vector<int> ranks;          // by stage
  std::vector<int> reverse_ranks;  // by stage; empty in one-way tables
  int reverse_from = 0;

  int num_stages() const { return static_cast<int>(ranks.size()); }
  int rank_of(int stage, int microbatch) const {
    return reverse_ranks.empty() || microbatch < reverse_from ? ranks[stage] : reverse_ranks[stage];
  }
  // Returns the stages a rank holds, ascending.
  std::vector<int> stages_of(int rank) const;
  bool operator==(const Placement&) const = default;
};

// Stage s on rank s mod num_ranks.
Placement loop_placement(int num_ranks, int stages_per_rank);
// Up the ranks, down again, up again: neighboring stages at a turn share a rank.
Placement v_placement(int num_ranks, int stages_per_rank = 2);

struct Schedule {
  std::string name;
  int num_microbatches = 0;
  Placement placement;
  // By rank. Compute actions only, or with SEND/RECV and the like once lowered (lower.h). Idle entries hold a place in
  // a table drawn tick by tick and mean nothing to a run.
  std::vector<std::vector<Action>> rows;

  int num_ranks() const { return static_cast<int>(rows.size()); }
  int num_stages() const { return placement.num_stages(); }
  std::size_t num_actions() const;  // idle ones not counted
  bool has_messages() const;        // any SEND or RECV
  bool operator==(const Schedule&) const = default;
};

// Returns, for every entry of a row without pairs, whether it is a forward whose whole backward comes next while other
// microbatches are in flight: to recompute it would save little memory, so it keeps everything.
std::vector<bool> backward_is_next(const std::vector<Action>& row);

// Returns the table without idle entries.
Schedule without_idle(Schedule schedule);
// Returns the table with idle entries so that a column is a tick: every action takes one, and waits for its inputs from
// a column before. Pairs have no length in ticks: a table with pairs is returned without idle entries. Compute-only
// tables; throws Error(Schedule) for one that deadlocks.
Schedule with_idle_ticks(const Schedule& schedule);

// torch's CSV: a line a rank, a cell an action, empty cells idle. Both compute-only and lowered tables.
std::string to_csv(const Schedule& schedule);
// Reads torch's CSV. Skips blank lines and text from a '#' on. Stages, microbatches and placement are inferred from the
// table. `where` is a file's name for messages. Throws Error(BadFile) that names line, rank and column; does not check
// whether the table can run (check.h).
Schedule parse_csv(std::string_view text, const std::string& where = "");
Schedule read_csv(const std::string& path);
void write_csv(const Schedule& schedule, const std::string& path);

// Returns the placement that the compute actions of a table show. Stages that no rank runs are on rank -1.
Placement infer_placement(const std::vector<std::vector<Action>>& rows);

}  // namespace plumb
