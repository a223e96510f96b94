// Proves that a time table can run: complete, rightly placed, in order, with matched messages, without deadlock.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "plumb/schedule/schedule.h"
#include "plumb/schedule/simulate.h"

namespace plumb {

enum class ProblemKind {
  Shape,      // rows, placement and counts do not fit together, or an action names what is not there
  Placement,  // an action stands on a rank that does not hold its stage
  Missing,    // an action that has to be there is not
  Duplicate,  // an action is there twice, or a full backward beside its halves
  Order,      // within a rank: a backward before its forward, a message before its value, ...
  Message,    // a send or receive that nothing matches or needs
  Deadlock,   // ranks wait for each other in a ring
  Memory,     // more memory is held than allowed
};

struct ScheduleProblem {
  ProblemKind kind;
  int rank = -1;      // -1: of no single rank
  int position = -1;  // in the rank's row, from 0; -1: of no single entry
  Action action;
  std::string message;  // whole sentence; names rank, position and action itself
};

struct CheckOptions {
  bool forward_only = false;  // an evaluation: no backward actions at all
  // How the run treats messages of a lowered table. Receives that block are the harder case; a table that passes also
  // runs where receives are posted ahead. Sends that block (until the receiver is there) are harder still.
  bool blocking_receives = true;
  bool blocking_sends = false;
  // Messages of two ranks have no tags: of each direction the k-th send is the k-th receive, as with NCCL. Together
  // with blocking receives this proves a table for sends that complete only when their receive is posted, where every
  // pair of ranks has a stream for each direction; with blocking sends also where a rank has one stream for all.
  bool in_order = false;
  // Most memory a rank may hold, in the unit of memory.activation (default: microbatches of a whole rank).
  double memory_limit = std::numeric_limits<double>::infinity();
  Costs memory;                   // only the lists of memory are used
  std::size_t max_problems = 20;  // further ones are counted only
};

struct CheckReport {
  std::vector<ScheduleProblem> problems;
  std::size_t num_problems = 0;
  std::vector<double> peak_memory;  // by rank; empty if problems were found
  // Every stage adds its weight gradients up in the order of microbatches (W and B in ascending order on every rank),
  // so sums are bit for bit those of one process without further care.
  bool weights_in_microbatch_order = true;

  bool ok() const { return num_problems == 0; }
  std::string text() const;  // a line a problem; "ok" if there is none
};

CheckReport check_schedule(const Schedule& schedule, const StageEdges& edges = {}, const CheckOptions& options = {});

// Throws Error(Schedule) with the problems found, if any.
void require_runnable(const Schedule& schedule, const StageEdges& edges = {}, const CheckOptions& options = {});

}  // namespace plumb
