#include "plumb/training/plan/plan_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "plumb/core/cores.h"
#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/table.h"
#include "plumb/partition/balance.h"
#include "plumb/partition/size_policy.h"
#include "plumb/schedule/generators.h"
#include "plumb/training/cut.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

double sum(const std::vector<double>& list) { return std::accumulate(list.begin(), list.end(), 0.0); }

class Planner {
 public:
  Planner(const GraphModule& module, const std::vector<c10::IValue>& inputs, const PlanRequest& request,
          const std::function<void(const std::string&)>& phase)
      : module_(module), inputs_(inputs), request_(request), phase_(phase) {}

  PlannedModel plan() {
    constexpr int kMostStages = 1024;  // a rank
    const std::vector<int>& counts = request_.stages_per_rank;
    if (counts.empty() || std::ranges::any_of(counts, [](int n) { return n < 1 || n > kMostStages; })) {
      throw Error(ErrorKind::InvalidArgument, "stages_per_rank are no numbers from 1 to 1024", "",
                  "1, 2, 3: all are compared");
    }
    const auto within = [](int count, int most) { return count >= 1 && count <= most; };
    if (!within(request_.ranks, kMostPlanRanks) || !within(request_.microbatches, kMostPlanParts) ||
        !within(request_.replicas, kMostPlanParts)) {
      throw Error(ErrorKind::InvalidArgument,
                  c10::str("a plan for ", request_.ranks, " ranks, ", request_.microbatches, " microbatches and ",
                           request_.replicas, " replicas cannot be"),
                  "", c10::str("from 1 to ", kMostPlanRanks, " ranks, and to ", kMostPlanParts, " of the others"));
    }
    SplitOptions any_cut;
    choose_multi_use(module_, request_.transmit, any_cut);  // an unknown name is no fault of a cut
    CompareOptions compare;
    compare.memory_limit = request_.memory_limit;
    compare.stages_per_rank = request_.stages_per_rank;
    planned_.transmit = request_.transmit;
    const bool here = std::ranges::all_of(module_.state(), [](const Attr& a) { return a.tensor.is_cpu(); });
    if (here && !request_.estimate) planned_.cores = num_cores();
    bool joint = request_.names.empty();
    for (const std::string& name : request_.names) {
      if (name == kJoint)
        joint = true;
      else
        compare.names.push_back(name);
    }
    if (compare.names.empty()) compare.names = usual_schedules();
    say("measuring the stages");
    planned_.choices = compare_schedules(
        request_.ranks, request_.microbatches, [this](int stages) { return costs_of_named(stages); }, compare);
    // A model that fails in every cut is wrong itself.
    const bool any = std::ranges::any_of(planned_.choices, [](const ScheduleChoice& c) { return c.problem.empty(); });
    if (failed_ && !any) throw *failed_;
    if (joint) {
      try {
        add_joint(compare.names);
      } catch (const Error& e) {
        ScheduleChoice none{.name = kJoint, .problem = e.message(), .fits = false};
        planned_.choices.push_back(std::move(none));
      }
    }
    return std::move(planned_);
  }

 private:
  void say(const std::string& what) const {
    if (phase_) phase_(what);
  }

  StageCosts costs_of(const Pipe& pipe, std::vector<Recompute> recompute = {}) {
    StageCostOptions options = request_.costs;
    options.busy_ranks = request_.ranks;
    options.recompute = std::move(recompute);
    try {
      StageCosts costs = request_.estimate ? estimate_stages(pipe, options) : measure_stages(pipe, inputs_, options);
      planned_.spread = std::max(planned_.spread, costs.spread);
      return costs;
    } catch (const Error& e) {
      failed_ = e;
      throw;
    }
  }

  // Cut as `plumb train` cuts.
  StageCosts costs_of_named(int stages) {
    std::shared_ptr<Pipe>& pipe = planned_.pipes[stages];
    try {
      pipe = cut(module_, stages, {.transmit = request_.transmit}, std::to_string(stages) + " stages");
    } catch (const UsageError& e) {
      throw Error(ErrorKind::InvalidArgument, e.message());
    }
    const StageCosts costs = costs_of(*pipe);
    if (stages == request_.ranks) whole_ranks_ = costs;
    return costs;
  }

  // Measures as many pieces as are cheap to, and scales them so that they add up to the stages of whole ranks: a piece
  // costs a little by being run alone.
  PieceCosts costs_of_pieces(const Pipe& pieces) {
    PieceCosts result;
    const StageCosts cheap = costs_of(pieces);
    result.ways.push_back(way_of(cheap, "cheap"));
    result.resident = cheap.resident;
    result.gradient = cheap.costs.gradient;
    if (!request_.estimate)
      result.ways.push_back(
          way_of(costs_of(pieces, std::vector<Recompute>(pieces.num_stages(), Recompute::None)), "none"));
    if (whole_ranks_) scale(result, cheap.costs, whole_ranks_->costs);
    result.latency = request_.costs.seconds_per_message;
    const double bytes_of_all = sum(cheap.costs.values);
    if (bytes_of_all > 0) result.seconds_per_copied = sum(cheap.costs.copies) / bytes_of_all;
    for (int s = 0; s + 1 < pieces.num_stages(); ++s) {
      for (const StageOutputPort& port : pieces.stage_outputs(s)) {
        int last = s;
        for (const PortUse& use : port.consumers) last = std::max(last, use.stage);
        const auto bytes = static_cast<double>(bytes_of(port.meta));
        if (last > s) result.values.push_back({s, last, bytes / request_.costs.bytes_per_second, bytes});
      }
    }
    return result;
  }

  static std::vector<double> held_of(const Costs& by_stage) {
    std::vector<double> held = by_stage.activation;
    for (size_t s = 0; s < held.size(); ++s) held[s] *= by_stage.held_for_weight[s];
    return held;
  }

  static PieceCosts::Way way_of(const StageCosts& of, const std::string& name) {
    const Costs costs = of.costs.for_stages(static_cast<int>(of.costs.forward.size()), 1);
    return {name,       costs.forward,    costs.input,    costs.weight,
            costs.full, costs.activation, held_of(costs), costs.working};
  }

  static void scale(PieceCosts& pieces, const Costs& measured, const Costs& wanted) {
    const auto apply = [&](std::vector<double> PieceCosts::Way::*list, double have, double want) {
      const double factor = have > 0 && want > 0 ? want / have : 1;
      for (PieceCosts::Way& way : pieces.ways) {
        for (double& value : way.*list) value *= factor;
      }
    };
    const int from = static_cast<int>(measured.forward.size()), to = static_cast<int>(wanted.forward.size());
    const Costs have = measured.for_stages(from, 1), want = wanted.for_stages(to, 1);
    apply(&PieceCosts::Way::forward, sum(have.forward), sum(want.forward));
    apply(&PieceCosts::Way::input, sum(have.input), sum(want.input));
    apply(&PieceCosts::Way::weight, sum(have.weight), sum(want.weight));
    apply(&PieceCosts::Way::full, sum(have.full), sum(want.full));
    apply(&PieceCosts::Way::activation, sum(have.activation), sum(want.activation));
    apply(&PieceCosts::Way::held, sum(held_of(have)), sum(held_of(want)));
  }

  // Searches with the pieces' costs, and times what was found with its own stages.
  void add_joint(const std::vector<std::string>& names) {
    const int most = *std::ranges::max_element(request_.stages_per_rank) * request_.ranks;
    SplitOptions split;
    split.cut_before = cut_places(module_, estimate_cost(module_), static_cast<size_t>(most) - 1,
                                  static_cast<size_t>(std::clamp(12 * request_.ranks, 48, 256)));
    choose_multi_use(module_, request_.transmit, split);
    if (split.cut_before.empty()) throw Error(ErrorKind::Partition, "the graph has no place for a cut");
    const auto pieces = pipeline(module_, split);
    say("measuring " + std::to_string(pieces->num_stages()) + " pieces");
    const PieceCosts costs = costs_of_pieces(*pieces);
    say("searching");
    JointOptions options{.stages_per_rank = request_.stages_per_rank, .names = names, .tables = request_.tables};
    const std::vector<std::string> values = cut_values(module_, *pieces);
    const ScheduleChoice* named = planned_.best_named();
    const bool given = std::isfinite(request_.memory_limit) || named == nullptr;
    const double limit = given ? request_.memory_limit : named->peak();
    options.memory_limit = limit;
    std::optional<ScheduleChoice> choice;
    // By their pieces plans take a little less or more than by their stages, and messages that wait are not among it.
    for (int tries = 0; tries < 3; ++tries) {
      try {
        choice = choice_of(joint_search(request_.ranks, request_.microbatches, costs, options), costs, values);
        const double excess = choice->peak() - limit;
        if (!(excess > (given ? 0 : 0.01 * limit))) break;
        options.memory_limit -= excess;
      } catch (const Error&) {
        if (choice) break;
        if (given || tries > 0) throw;
        options.memory_limit = request_.memory_limit;
      }
    }
    planned_.choices.push_back(std::move(*choice));
    sort_choices(planned_.choices);
  }

  // Times what was found with stages of its own. `values`: where the pieces are cut.
  ScheduleChoice choice_of(const JointResult& found, const PieceCosts& costs, const std::vector<std::string>& values) {
    CutOptions cuts{.transmit = request_.transmit};
    for (size_t s = 1; s < found.stages.begins.size(); ++s)
      cuts.before.push_back(values[static_cast<size_t>(found.stages.begins[s]) - 1]);
    const int stages = found.schedule.num_stages();
    planned_.joint_pipe = cut(module_, stages, cuts, "the plan");
    planned_.joint_recompute.clear();
    std::vector<Recompute> recompute;
    for (const int way : found.stages.ways) {
      planned_.joint_recompute.push_back(costs.ways[static_cast<size_t>(way)].recompute);
      recompute.push_back(parse_recompute(planned_.joint_recompute.back()));
    }
    say("measuring the plan's stages");
    const StageCosts own = costs_of(*planned_.joint_pipe, recompute);
    ScheduleChoice choice{
        .name = kJoint, .stages_per_rank = (stages + request_.ranks - 1) / request_.ranks, .schedule = found.schedule};
    fill_choice(choice, own, request_.memory_limit);
    const Costs full = own.costs.for_stages(stages, request_.ranks);
    planned_.bound = 0;
    for (size_t s = 0; s < full.forward.size(); ++s)
      planned_.bound += full.forward[s] + std::min(full.full[s], full.input[s] + full.weight[s]);
    planned_.bound *= static_cast<double>(request_.microbatches) / request_.ranks;
    return choice;
  }

  const GraphModule& module_;
  const std::vector<c10::IValue>& inputs_;
  const PlanRequest& request_;
  const std::function<void(const std::string&)>& phase_;
  PlannedModel planned_;
  std::optional<StageCosts> whole_ranks_;  // costs with one stage a rank
  std::optional<Error> failed_;            // the last error of a stage
};

}  // namespace

std::shared_ptr<Pipe> PlannedModel::pipe_of(const ScheduleChoice& choice) const {
  if (choice.name == kJoint) return joint_pipe;
  const auto found = pipes.find(choice.schedule.num_stages());
  return found == pipes.end() ? nullptr : found->second;
}

const ScheduleChoice* PlannedModel::best_named() const {
  for (const ScheduleChoice& c : choices) {
    if (c.fits && c.problem.empty() && c.name != kJoint) return &c;
  }
  return nullptr;
}

const ScheduleChoice* PlannedModel::find(const std::string& name) const {
  for (const ScheduleChoice& c : choices) {
    if (c.problem.empty() && (name.empty() ? c.fits : c.name == name)) return &c;
  }
  return nullptr;
}

const ScheduleChoice& PlannedModel::choose(const std::string& name) const {
  if (const ScheduleChoice* found = find(name)) return *found;
  if (name.empty()) {
    throw Error(
        ErrorKind::InvalidArgument,
        "no schedule keeps the memory limit: the least that a rank needs is " + bytes_text(least_memory().peak()), "",
        "a higher limit, more ranks, or smaller microbatches");
  }
  const auto named = std::ranges::find(choices, name, &ScheduleChoice::name);
  if (named != choices.end())
    throw Error(ErrorKind::InvalidArgument, name + " cannot be had: " + named->problem, "", "another schedule");
  throw Error(ErrorKind::UnknownName, "no schedule named '" + name + "' was compared", "",
              join(choices, &ScheduleChoice::name));
}

const ScheduleChoice& PlannedModel::least_memory() const {
  const ScheduleChoice* least = nullptr;
  for (const ScheduleChoice& c : choices) {
    if (c.problem.empty() && (least == nullptr || c.peak() < least->peak())) least = &c;
  }
  if (least != nullptr) return *least;
  throw Error(ErrorKind::Partition, "no schedule can be had: " + (choices.empty() ? "" : choices.front().problem), "",
              "fewer ranks, or fewer stages a rank");
}

PipelinePlan PlannedModel::plan_of(const GraphModule& module, const ScheduleChoice& choice, int replicas) const {
  const auto pipe = pipe_of(choice);
  PipelinePlan plan{.cut = cut_values(module, *pipe),
                    .schedule = choice.schedule,
                    .recompute = joint_recompute,
                    .transmit = transmit,
                    .replicas = replicas,
                    .seconds = choice.simulation.makespan,
                    .memory = choice.memory,
                    .operators = count_operators(module)};
  if (choice.name != kJoint) plan.recompute.assign(static_cast<size_t>(pipe->num_stages()), "cheap");
  return plan;
}

void set_link(StageCostOptions& costs, double gigabytes, double microseconds) {
  if (!(gigabytes >= 1e-9 && gigabytes <= 1e9 && microseconds >= 0 && microseconds <= 1e12))
    throw Error(ErrorKind::InvalidArgument, "the link has no rate from 1e-9 to 1e9 GB/s and latency from 0 to 1e12 us",
                "", "--link 2,50: GB a second, and microseconds a message");
  costs.bytes_per_second = gigabytes * 1e9;
  costs.seconds_per_message = microseconds * 1e-6;
}

PlannedModel plan_model(const GraphModule& module, const std::vector<c10::IValue>& inputs, const PlanRequest& request,
                        const std::function<void(const std::string& what)>& phase) {
  return Planner(module, inputs, request, phase).plan();
}

std::string conclusion(const PlannedModel& planned, const ScheduleChoice& taken, bool seconds) {
  const double step = taken.simulation.makespan;
  std::string text = taken.name + ": " + (seconds ? short_number(step * 1e3) + " ms" : short_number(step)) + " a step";
  if (taken.schedule.num_ranks() == 1) return text;  // any order takes the sum: others differ by noise
  const auto beside = [&](const ScheduleChoice* other) {
    if (other == nullptr || other == &taken || other->simulation.makespan <= 0) return;
    const std::string times = short_number(other->simulation.makespan / step);
    text += ", " + (times == "1" ? "" : times + " x ") + "as fast as " + other->name +
            (other->fits ? "" : " (which takes more memory than there is)");
  };
  const ScheduleChoice *named = planned.best_named(), *usual = planned.find("1F1B");
  beside(named);
  if (usual != named) beside(usual);
  if (planned.bound > 0 && planned.bound < step)
    text += "; all work, evenly on all ranks, would take " + percent(planned.bound / step) + " of that";
  const auto& busy = taken.simulation.busy;
  if (busy.empty()) return text;
  if (planned.cores > 0 && taken.schedule.num_ranks() > planned.cores)
    text += c10::str("; trained on this machine's ", planned.cores, " cores alone: at least ",
                     short_number(sum(busy) / planned.cores * 1e3), " ms");
  const auto most = std::ranges::max_element(busy);
  if (step > 0 && *most > 0.95 * step)
    text += "; rank " + std::to_string(most - busy.begin()) + " works " + percent(*most / step) + " of it";
  return text;
}

}  // namespace plumb
