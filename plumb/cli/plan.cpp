// plumb plan: which schedule to take for a program, or for given costs, before anything is launched.
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "plumb/analysis/adapters.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/cut.h"
#include "plumb/cli/progress.h"
#include "plumb/core/error.h"
#include "plumb/core/table.h"
#include "plumb/pipeline/graph_stage.h"
#include "plumb/pipeline/stage_costs.h"
#include "plumb/schedule/compare.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/render.h"

namespace plumb::cli {
namespace {

struct PlanArguments {
  std::string file, memory, take, csv, svg, message;
  std::vector<double> costs;
  std::vector<std::string> names;
  std::vector<int> stages_per_rank = {2};
  int ranks = 0, microbatches = 0, threads = 1;
  double held = 1;
  bool estimate = false, json = false;
};

// "1.5GiB", "800MB", or a plain number.
double memory_of(const std::string& text) {
  if (text.empty()) return std::numeric_limits<double>::infinity();
  static const std::pair<const char*, double> kUnits[] = {{"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0},
                                                          {"kB", 1e3},     {"MB", 1e6},        {"GB", 1e9},
                                                          {"B", 1.0},      {"", 1.0}};
  size_t end = 0;
  double value = NAN;
  try {
    value = std::stod(text, &end);
  } catch (const std::exception&) {
  }
  for (const auto& [unit, size] : kUnits) {
    if (text.substr(end) == unit && value > 0) return value * size;
  }
  throw UsageError("--memory-limit " + text + ": is no amount of memory", "--memory-limit 800MiB");
}

StageCosts given_costs(const PlanArguments& o, int num_stages) {
  Costs costs;
  costs.forward = {o.costs[0]};
  costs.input = {o.costs[1]};
  costs.weight = {o.costs[2]};
  costs.communication = {o.costs.size() > 3 ? o.costs[3] : 0};
  costs.activation = {1};
  costs.held_for_weight = o.held;
  return even_costs(costs, o.ranks)(num_stages);
}

// Cut as `plumb train` cuts, so that the file written fits.
StageCosts costs_of_file(const PlanArguments& o, const GraphModule& module, int num_stages) {
  std::shared_ptr<Pipe> pipe;
  try {
    pipe = cut(module, num_stages, {}, std::to_string(num_stages) + " stages");
  } catch (const UsageError& e) {
    throw Error(ErrorKind::InvalidArgument, e.message());
  }
  return o.estimate ? estimate_stages(*pipe) : measure_stages(*pipe, example_inputs(module));
}

std::string seconds_text(double value, bool seconds) {
  if (!seconds) return short_number(value);
  return value >= 1      ? short_number(value) + " s"
         : value >= 1e-3 ? short_number(value * 1e3) + " ms"
                         : short_number(value * 1e6) + " us";
}

std::string memory_text(double value, bool bytes) {
  if (!bytes) return short_number(value);
  return value >= 1e9 ? short_number(value / 1073741824.0) + " GiB" : short_number(value / 1048576.0) + " MiB";
}

// What the table's columns say, in its order.
constexpr const char* kColumns =
    "step: from its first action to its last, as drawn. bubble: the ranks' idle share of it, as plumb train "
    "--timeline\n"
    "measures it. apart: how far steps are apart, as no rank waits for others between them; least first. paper's "
    "bubble:\n"
    "the idle share of that (Zero Bubble, arXiv 2401.10241).\n";

nlohmann::json to_json(const ScheduleChoice& c) {
  nlohmann::json row = {{"schedule", c.name}, {"stages_per_rank", c.stages_per_rank}, {"fits", c.fits}};
  if (!c.problem.empty()) {
    row["problem"] = c.problem;
    return row;
  }
  row["step"] = c.simulation.makespan;
  row["apart"] = c.distance();
  row["bubble"] = c.simulation.bubble_rate();
  row["zero_bubble_rate"] = c.simulation.zero_bubble_rate();
  row["memory"] = c.memory;
  return row;
}

// The file for `plumb train --schedule`.
void write_schedule(const PlanArguments& o, const ScheduleChoice& c) {
  std::string text = "# " + c.name + " for " + std::to_string(o.ranks) + " ranks, " + std::to_string(o.microbatches) +
                     " microbatches, " + std::to_string(c.schedule.num_stages()) + " stages\n" +
                     "# plumb train ... --stages " + std::to_string(o.ranks) + " --microbatches " +
                     std::to_string(o.microbatches) + " --schedule THIS.csv\n";
  write_text(text + to_csv(c.schedule), o.csv);
}

void plan(const PlanArguments& o) {
  if (o.file.empty() == o.costs.empty()) {
    throw UsageError("a .pt2 file or --costs is needed, and not both", "--costs 1,1,1, or the name of a file");
  }
  const bool measured = !o.file.empty();
  Loaded loaded;
  CompareOptions options;
  options.memory_limit = memory_of(o.memory);
  options.stages_per_rank = o.stages_per_rank;
  options.names = o.names;
  if (o.names.empty()) {
    // Bidirectional tables take every parameter twice and have another order of summation: only if they are asked for.
    for (const std::string& name : schedule_names()) {
      if (!schedule_traits(name).bidirectional) options.names.push_back(name);
    }
    options.names.push_back("Searched");
  }
  CostsOf costs = [&](int stages) { return given_costs(o, stages); };
  if (measured) {
    at::set_num_threads(o.threads);
    loaded = load_with_tensors(o.file);
    costs = [&](int stages) { return costs_of_file(o, loaded.module(), stages); };
  } else if (o.costs.size() < 3 || o.costs.size() > 4) {
    throw UsageError("--costs: three or four numbers are needed", "--costs FORWARD,INPUT,WEIGHT,MESSAGE");
  }
  std::vector<ScheduleChoice> choices;
  try {
    choices = compare_schedules(o.ranks, o.microbatches, costs, options);
  } catch (const Error& e) {
    throw UsageError("--schedules: " + e.message(), e.remedy().empty() ? "plumb plan --help" : e.remedy());
  }
  const auto taken = std::find_if(choices.begin(), choices.end(), [&](const ScheduleChoice& c) {
    return o.take.empty() ? c.fits : c.name == o.take && c.problem.empty();
  });
  if (o.json) {
    nlohmann::json all = {{"unit", measured ? "seconds" : ""}, {"schedules", nlohmann::json::array()}};
    for (const auto& c : choices) all["schedules"].push_back(to_json(c));
    all["taken"] = taken == choices.end() ? nlohmann::json() : nlohmann::json(taken->name);
    std::cout << all.dump(1) << "\n";
  } else {
    std::vector<std::vector<std::string>> rows = {
        {"", "schedule", "stages a rank", "step", "bubble", "apart", "paper's bubble", "memory", "remark"}};
    for (const auto& c : choices) {
      const bool it = taken != choices.end() && &c == &*taken;
      if (!c.problem.empty()) {
        rows.push_back({"", c.name, std::to_string(c.stages_per_rank), "", "", "", "", "", c.problem});
        continue;
      }
      rows.push_back({it ? "*" : "", c.name, std::to_string(c.stages_per_rank),
                      seconds_text(c.simulation.makespan, measured), percent(c.simulation.bubble_rate()),
                      seconds_text(c.distance(), measured), percent(c.simulation.zero_bubble_rate()),
                      memory_text(c.peak(), measured), c.fits ? "" : "more memory than the limit"});
    }
    std::cout << columns(rows) << kColumns;
  }
  if (taken == choices.end()) {
    const auto possible = [](const ScheduleChoice& c) { return c.problem.empty(); };
    if (!o.take.empty()) throw UsageError("--take " + o.take + ": cannot be had", "--take 1F1B");
    if (std::none_of(choices.begin(), choices.end(), possible)) {
      throw Error(ErrorKind::Partition, "no schedule can be had: " + choices.front().problem, "",
                  "fewer --ranks, or fewer --stages-per-rank");
    }
    throw Error(ErrorKind::InvalidArgument, "no schedule keeps the memory limit of " + o.memory, "",
                "a higher --memory-limit, more ranks, or smaller microbatches");
  }
  if (!o.json) {
    const int frame = static_cast<int>(std::string("rank  || 100%").size() + std::to_string(o.ranks - 1).size());
    const int wide = terminal_width() ? std::clamp(*terminal_width() - frame, 10, 100) : 100;
    std::cout << "\n"
              << taken->name << ":\n"
              << render_text(taken->schedule, taken->simulation.spans, wide) << render_letters(taken->schedule);
  }
  Progress progress(0, o.json);
  if (!o.svg.empty()) {
    write_text(to_svg(TimelineChart{taken->name, {timeline_of(taken->schedule, taken->simulation)}}), o.svg);
  }
  if (!o.csv.empty()) write_schedule(o, *taken);
  say_wrote(progress, o.svg);
  say_wrote(progress, o.csv);
}

}  // namespace

void add_plan(CLI::App& app) {
  auto o = std::make_shared<PlanArguments>();
  CLI::App* sub = app.add_subcommand("plan", "Compares pipeline schedules for a .pt2 file, or for given costs");
  sub->add_option("FILE", o->file, "A .pt2 file: cut in balanced stages, and every stage measured");
  sub->add_option("--costs", o->costs,
                  "Instead of a file: a rank's forward, input half, weight half and a message, in any unit: --costs "
                  "10,10,8,0.4")
      ->delimiter(',')
      ->check(number_within(0, std::numeric_limits<double>::infinity()));
  sub->add_option("--ranks", o->ranks, "Processes of the pipeline")->required()->check(whole_number(1));
  sub->add_option("--microbatches", o->microbatches, "Parts of a batch")->required()->check(whole_number(1));
  sub->add_option("--memory-limit", o->memory,
                  "Of a rank, with AdamW: 800MiB; with --costs: microbatches of a whole rank");
  sub->add_option("--held-for-weight", o->held,
                  "With --costs: the share of a microbatch's memory that waits for the weight half")
      ->check(number_within(0, 1));
  sub->add_option("--stages-per-rank", o->stages_per_rank, "Tried for interleaved schedules: 2,4")
      ->delimiter(',')
      ->check(whole_number(1));
  sub->add_option("--schedules", o->names,
                  "Only these: 1F1B,ZBVZeroBubble (default: all but DualPipe, and a searched one)")
      ->delimiter(',');
  sub->add_option("--take", o->take, "Take this one, not the quickest");
  sub->add_flag("--estimate", o->estimate, "Do not run the stages: costs from shapes");
  sub->add_option("--threads", o->threads, "Threads to measure with")->check(whole_number(1));
  sub->add_option("--svg", o->svg, "Draw the time line of the one taken");
  sub->add_option("--csv", o->csv, "Write it for plumb train --schedule");
  sub->add_flag("--json", o->json, "The table as JSON");
  sub->footer(
      "Example:\n  plumb plan gpt.pt2 --ranks 4 --microbatches 8 --memory-limit 400MiB --csv best.csv\n  plumb train "
      "gpt.pt2 --data text.bin --stages 4 --microbatches 8 --schedule best.csv");
  sub->callback([o] { plan(*o); });
}

}  // namespace plumb::cli
