// A model's plan: costs measured, named schedules compared, and cut, placement and order searched together.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plumb/partition/pipe.h"
#include "plumb/pipeline/runtime/stage_costs.h"
#include "plumb/schedule/joint.h"
#include "plumb/schedule/pipeline_plan.h"

namespace plumb {

struct PlanRequest {
  int ranks = 2, microbatches = 4, replicas = 1;
  // Bytes of a rank. Infinite: the searched plan takes no more than the quickest named schedule.
  double memory_limit = std::numeric_limits<double>::infinity();
  std::vector<int> stages_per_rank = {1, 2, 3};
  // Names of schedules, "Searched" and "Joint"; empty: all that are not bidirectional.
  std::vector<std::string> names;
  std::vector<std::string> transmit;  // as of a PipelinePlan
  StageCostOptions costs;
  bool estimate = false;  // costs from shapes: the model is not run
  int tables = JointOptions().tables;
};

// Every schedule tried, with the stages that it was timed with.
struct PlannedModel {
  std::vector<ScheduleChoice> choices;         // as compare_schedules() orders them; "Joint" among them
  std::map<int, std::shared_ptr<Pipe>> pipes;  // pipes of the named schedules, by number of stages
  std::shared_ptr<Pipe> joint_pipe;            // null without "Joint"
  std::vector<std::string> joint_recompute;    // by stage
  double bound = 0;                            // no step is shorter
  double spread = 0;                           // StageCosts::spread, the largest
  std::vector<std::string> transmit;           // as asked for
  int cores = 0;                               // the machine's, if the costs were measured on them; else 0

  std::shared_ptr<Pipe> pipe_of(const ScheduleChoice& choice) const;
  // Returns null if no named schedule fits.
  const ScheduleChoice* best_named() const;
  // Returns null if there is none of that name. "": the first that fits.
  const ScheduleChoice* find(const std::string& name) const;
  // Returns what find() does. Throws Error(UnknownName) if none of that name was compared, and Error(InvalidArgument)
  // if it cannot be had, or if none fits.
  const ScheduleChoice& choose(const std::string& name) const;
  // Returns the one that needs the least memory, within the limit or not. Throws Error(Partition) if none can be had.
  const ScheduleChoice& least_memory() const;
  PipelinePlan plan_of(const GraphModule& module, const ScheduleChoice& choice, int replicas) const;
};

constexpr const char* kJoint = "Joint";

// Sets what messages between ranks take: GB a second, and microseconds of each. Throws Error(InvalidArgument) for what
// no link has.
void set_link(StageCostOptions& costs, double gigabytes, double microseconds);

// `inputs`: a microbatch, flat; not used for estimates. `phase` is told what begins. Throws Error(UnknownName) for
// schedules, Error(InvalidArgument) for counts that no plan has, and what a stage throws. A schedule that cannot be had
// is a choice with a problem.
PlannedModel plan_model(const GraphModule& module, const std::vector<c10::IValue>& inputs, const PlanRequest& request,
                        const std::function<void(const std::string& what)>& phase = {});

// Returns one sentence: the choice beside 1F1B and the best named schedule, and how near it is to what is possible.
// `seconds`: false for costs in another unit.
std::string conclusion(const PlannedModel& planned, const ScheduleChoice& taken, bool seconds = true);

}  // namespace plumb
