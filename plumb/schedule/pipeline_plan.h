// A plan: everything that says how a model is trained over ranks, as one file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plumb/schedule/schedule.h"

namespace plumb {

// The most ranks, and the most microbatches and replicas, of a plan.
inline constexpr int kMostPlanRanks = 1024, kMostPlanParts = 65536;

struct PipelinePlan {
  std::vector<std::string> cut;        // by stage but the first: a value that its first operator makes
  Schedule schedule;                   // also says which rank runs which stage
  std::vector<std::string> recompute;  // by stage: "cheap" or "none"
  std::vector<std::string> transmit;   // parameters of several stages that their first stage sends; "all": every one
  int replicas = 1;                    // equal pipelines beside each other
  // Predictions, for people.
  double seconds = 0;          // predicted time of a step
  std::vector<double> memory;  // bytes, by rank
  int operators = 0;           // number of operators of the graph that the plan is for; 0: unknown

  int num_stages() const { return schedule.num_stages(); }
  bool operator==(const PipelinePlan&) const = default;
};

// Returns the plan as JSON. parse_plan() returns it again. Throws Error(InvalidArgument) for what JSON cannot hold.
std::string to_json(const PipelinePlan& plan);
// Takes any bytes: time and memory are bounded by their length. `where`: a file's name for messages. Throws
// Error(BadFile) for what is no plan and names the entry, and Error(Schedule) for a table that cannot run.
PipelinePlan parse_plan(std::string_view text, const std::string& where = "");
PipelinePlan read_plan(const std::string& path);

}  // namespace plumb
