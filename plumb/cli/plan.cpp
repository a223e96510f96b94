// plumb plan: which schedule to take for a program, or for given costs, before anything is launched.
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "plumb/analysis/adapters.h"
#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/import.h"
#include "plumb/cli/progress.h"
#include "plumb/core/error.h"
#include "plumb/core/table.h"
#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/stage_costs.h"
#include "plumb/schedule/compare.h"
#include "plumb/schedule/generators.h"
#include "plumb/schedule/render.h"
#include "plumb/training/cut.h"
#include "plumb/training/folder_weights.h"

namespace plumb::cli {
namespace {

struct PlanArguments {
  std::string file, memory, take, csv, svg, message;
  std::vector<double> costs;
  std::vector<std::string> names;
  std::vector<int> stages_per_rank = {2};
  std::vector<double> machine;
  int ranks = 0, microbatches = 0, threads = 1;
  int64_t batch = 1, length = 0;  // of a folder's inputs
  double held = 1;
  bool estimate = false, json = false;

  bool measured() const { return costs.empty(); }  // in seconds and bytes, of a file
};

// The model and its pipes by number of stages.
struct Planned {
  Loaded loaded;
  std::map<int, std::shared_ptr<Pipe>> pipes;  // by number of stages
  CostsOf costs;
  CompareOptions options;
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
StageCosts costs_of_file(const PlanArguments& o, Planned& planned, int num_stages) {
  const GraphModule& module = planned.loaded.module();
  std::shared_ptr<Pipe>& pipe = planned.pipes[num_stages];
  try {
    pipe = cut(module, num_stages, {}, std::to_string(num_stages) + " stages");
  } catch (const UsageError& e) {
    throw Error(ErrorKind::InvalidArgument, e.message());
  }
  StageCostOptions options;
  if (!o.machine.empty()) {
    options.machine.flops_per_second = o.machine[0];
    options.machine.bytes_per_second = o.machine[1];
    options.bytes_per_second = o.machine[2];
  }
  return o.estimate ? estimate_stages(*pipe, options) : measure_stages(*pipe, example_inputs(module), options);
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

// Explains the table's columns, in its order.
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
  row["apart"] = c.simulation.cost();
  row["bubble"] = c.simulation.bubble_rate();
  row["zero_bubble_rate"] = c.simulation.zero_bubble_rate();
  row["memory"] = c.memory;
  return row;
}

// The file for `plumb train --schedule`.
void write_schedule(const PlanArguments& o, const ScheduleChoice& c) {
  std::string text = c10::str("# ", c.name, " for ", o.ranks, " ranks, ", o.microbatches, " microbatches, ",
                              c.schedule.num_stages(), " stages\n", "# plumb train ... --stages ", o.ranks,
                              " --microbatches ", o.microbatches, " --schedule THIS.csv\n");
  write_text(text + to_csv(c.schedule), o.csv);
}

void check_arguments(PlanArguments& o) {
  check_writable("--svg", o.svg, {o.file});
  check_writable("--csv", o.csv, {o.file});
  if (o.file.empty() == o.costs.empty()) {
    throw UsageError("a .pt2 file, a folder or --costs is needed, and not two of them",
                     "--costs 1,1,1, or the name of a file");
  }
  if (!o.measured() && (o.costs.size() < 3 || o.costs.size() > 4))
    throw UsageError("--costs: three or four numbers are needed", "--costs FORWARD,INPUT,WEIGHT,MESSAGE");
  if (!o.machine.empty() && o.machine.size() != 3)
    throw UsageError("--machine: three numbers are needed", "--machine FLOPS,BYTES,NETWORK");
  if (o.machine.size() == 3 && std::ranges::any_of(o.machine, [](double x) { return !(x > 0); }))
    throw UsageError("--machine: its numbers are above zero", "--machine 4e14,2e12,5e10");
  if (o.microbatches == 0) o.microbatches = 2 * o.ranks;
}

// Reads the file, or makes one of a folder; says how costs are had.
void read_planned(PlanArguments& o, Planned& planned, Progress& progress) {
  at::set_num_threads(o.threads);
  std::string file = o.file;
  std::optional<TemporaryFile> temporary;
  if (std::filesystem::is_directory(file)) {
    progress.next("capturing the model of " + file);
    ImportOptions import;
    import.folder = o.file;
    import.output = file = temporary.emplace("model.pt2").path();
    import.batch = o.batch;
    import.length = o.length;
    import_folder(import);
  }
  progress.next("reading " + file);
  planned.loaded = load_with_tensors(file);
  o.estimate = o.estimate || !o.machine.empty() || !has_values(planned.loaded.module().state());
  progress.next("comparing schedules");
}

void print_table(const PlanArguments& o, const std::vector<ScheduleChoice>& choices, const ScheduleChoice* taken) {
  const bool measured = o.measured();
  std::vector<std::vector<std::string>> rows = {
      {"", "schedule", "stages a rank", "step", "bubble", "apart", "paper's bubble", "memory", "remark"}};
  for (const auto& c : choices) {
    if (!c.problem.empty()) {
      rows.push_back({"", c.name, std::to_string(c.stages_per_rank), "", "", "", "", "", c.problem});
      continue;
    }
    rows.push_back({&c == taken ? "*" : "", c.name, std::to_string(c.stages_per_rank),
                    seconds_text(c.simulation.makespan, measured), percent(c.simulation.bubble_rate()),
                    seconds_text(c.simulation.cost(), measured), percent(c.simulation.zero_bubble_rate()),
                    memory_text(c.peak(), measured), c.fits ? "" : "more memory than the limit"});
  }
  std::cout << columns(rows) << kColumns;
}

// "model.layers.0 ... model.layers.3.mlp": the modules of a stage's first and last operators.
std::string modules_of(const GraphModule& stage) {
  std::string first, last;
  for (const Node* node : stage.graph().nodes()) {
    if (!node->is_call() || node->meta().module_path().empty()) continue;
    last = node->meta().module_path();
    if (first.empty()) first = last;
  }
  return first == last ? first : first + " ... " + last;
}

// A row a stage of each rank: what it holds, how long it works, and what it needs at most.
void print_ranks(const PlanArguments& o, const Planned& planned, const ScheduleChoice& c) {
  const auto pipe = planned.pipes.find(c.schedule.num_stages());
  if (pipe == planned.pipes.end()) return;
  std::vector<std::vector<std::string>> rows = {{"rank", "stage", "modules", "parameters", "works", "peak memory"}};
  for (int rank = 0; rank < c.schedule.num_ranks(); ++rank) {
    const auto at = static_cast<size_t>(rank);
    bool first = true;
    for (const int s : c.schedule.placement.stages_of(rank)) {
      const GraphModule& stage = *pipe->second->stage(s);
      double bytes = 0;
      for (const Attr& attr : stage.state()) {
        if (attr.kind == AttrKind::Parameter) bytes += static_cast<double>(attr.tensor.nbytes());
      }
      rows.push_back({first ? std::to_string(rank) : "", std::to_string(s), modules_of(stage), memory_text(bytes, true),
                      first ? seconds_text(c.simulation.busy[at], true) : "",
                      first ? memory_text(c.memory[at], true) : ""});
      first = false;
    }
  }
  std::cout << "\n" << columns(rows);
  const StageCostOptions known;
  if (o.estimate) {
    const double flops = o.machine.empty() ? known.machine.flops_per_second : o.machine[0];
    std::cout << "estimated from shapes, for " << short_number(flops)
              << " operations a second of each rank; peak memory has weights, gradients, AdamW's state and what waits "
                 "for its backward\n";
  }
}

// Why this one: against the others that keep the limit.
std::string why(const PlanArguments& o, const std::vector<ScheduleChoice>& choices, const ScheduleChoice& taken) {
  const auto fitting = std::ranges::count(choices, true, &ScheduleChoice::fits);
  std::string text = taken.name + ": ";
  if (!o.take.empty()) {
    text += "as asked for";
  } else {
    text += c10::str("the quickest of ", fitting, o.memory.empty() ? "" : " that keep " + o.memory + " a rank");
  }
  const auto other =
      std::ranges::find_if(choices, [&](const ScheduleChoice& c) { return c.name == "1F1B" && c.problem.empty(); });
  if (other == choices.end() || &*other == &taken) return text;
  return text + "; its steps are " + seconds_text(taken.simulation.cost(), o.measured()) + " apart, those of 1F1B " +
         seconds_text(other->simulation.cost(), o.measured()) + (other->fits ? "" : " and more memory than there is");
}

// Reports that no choice keeps the limit, and what would. The fewest ranks are searched among doubled ones.
[[noreturn]] void refuse(const PlanArguments& o, const Planned& planned, const std::vector<ScheduleChoice>& choices) {
  const auto possible = [](const ScheduleChoice& c) { return c.problem.empty(); };
  if (!o.take.empty()) throw UsageError("--take " + o.take + ": cannot be had", "--take 1F1B");
  if (std::ranges::none_of(choices, possible)) {
    throw Error(ErrorKind::Partition, "no schedule can be had: " + choices.front().problem, "",
                "fewer --ranks, or fewer --stages-per-rank");
  }
  const ScheduleChoice* least = nullptr;
  for (const ScheduleChoice& c : choices) {
    if (possible(c) && (least == nullptr || c.peak() < least->peak())) least = &c;
  }
  std::string remedy = "a --memory-limit of " + memory_text(least->peak(), o.measured()) + " (" + least->name + ")";
  CompareOptions quick = planned.options;
  quick.names = {"1F1B"};
  for (int ranks = 2 * o.ranks; ranks <= 16 * o.ranks && ranks <= 1024; ranks *= 2) {
    const auto found = compare_schedules(ranks, std::max(ranks, o.microbatches), planned.costs, quick);
    if (found.empty() || !possible(found[0])) break;
    if (!found[0].fits) continue;
    remedy += c10::str(", --ranks ", ranks, " (1F1B: ", memory_text(found[0].peak(), o.measured()), ")");
    break;
  }
  throw Error(ErrorKind::InvalidArgument,
              "no schedule keeps the memory limit of " + o.memory + ": the least that a rank needs is " +
                  memory_text(least->peak(), o.measured()),
              "", remedy + ", or smaller microbatches");
}

void plan(PlanArguments o) {
  check_arguments(o);
  Planned planned;
  planned.options.memory_limit = memory_of(o.memory);
  planned.options.stages_per_rank = o.stages_per_rank;
  planned.options.names = o.names;
  if (o.names.empty()) {
    // Bidirectional tables take every parameter twice and have another order of summation: only if they are asked for.
    for (const std::string& name : schedule_names()) {
      if (!schedule_traits(name).bidirectional) planned.options.names.push_back(name);
    }
    planned.options.names.push_back("Searched");
  }
  Progress progress(3, o.json);
  planned.costs = [&](int stages) { return o.measured() ? costs_of_file(o, planned, stages) : given_costs(o, stages); };
  if (o.measured()) read_planned(o, planned, progress);
  const std::vector<ScheduleChoice> choices = used_by(
      "--schedules", [&] { return compare_schedules(o.ranks, o.microbatches, planned.costs, planned.options); },
      "plumb plan --help");
  progress.finish();
  const auto found = std::ranges::find_if(choices, [&](const ScheduleChoice& c) {
    return o.take.empty() ? c.fits : c.name == o.take && c.problem.empty();
  });
  const ScheduleChoice* taken = found == choices.end() ? nullptr : &*found;
  if (o.json) {
    nlohmann::json all = {{"unit", o.measured() ? "seconds" : ""}, {"schedules", nlohmann::json::array()}};
    for (const auto& c : choices) all["schedules"].push_back(to_json(c));
    all["taken"] = taken == nullptr ? nlohmann::json() : nlohmann::json(taken->name);
    std::cout << all.dump(1) << "\n";
  } else {
    print_table(o, choices, taken);
  }
  if (taken == nullptr) refuse(o, planned, choices);
  if (!o.json) {
    const int frame = static_cast<int>(std::string("rank  || 100%").size() + std::to_string(o.ranks - 1).size());
    const int wide = terminal_width() ? std::clamp(*terminal_width() - frame, 10, 100) : 100;
    std::cout << "\n"
              << why(o, choices, *taken) << "\n"
              << render_text(taken->schedule, taken->simulation.spans, wide) << render_letters(taken->schedule);
    print_ranks(o, planned, *taken);
  }
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
  CLI::App* sub = app.add_subcommand(
      "plan", "Compares pipeline schedules for a .pt2 file, a folder of transformers, or for given costs");
  sub->add_option(
      "FILE", o->file,
      "A .pt2 file: cut in balanced stages, and every stage measured. Or a folder with config.json: costs are "
      "estimated, and no weights are read");
  sub->add_option("--costs", o->costs,
                  "Instead of a file: a rank's forward, input half, weight half and a message, in any unit: --costs "
                  "10,10,8,0.4")
      ->delimiter(',')
      ->check(number_within(0, std::numeric_limits<double>::infinity()));
  sub->add_option("--ranks", o->ranks, "Processes of the pipeline")->required()->check(whole_number(1));
  sub->add_option("--microbatches", o->microbatches, "Parts of a batch (default: twice the ranks)")
      ->check(whole_number(1));
  sub->add_option("--memory-limit,--memory", o->memory,
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
  sub->add_option("--machine", o->machine,
                  "For estimates: operations a second, bytes a second of a rank's memory, and between ranks: --machine "
                  "4e14,2e12,5e10")
      ->delimiter(',');
  sub->add_option("--batch", o->batch, "Of a folder's model: rows of a microbatch")->check(whole_number(1, 1 << 20));
  sub->add_option("--length", o->length,
                  "Of a folder's model: tokens of a row (default: the config's longest, at most 2048)")
      ->check(whole_number(1, 1 << 24));
  sub->add_option("--threads", o->threads, "Threads to measure with")->check(whole_number(1));
  sub->add_option("--svg", o->svg, "Draw the time line of the one taken");
  sub->add_option("--csv", o->csv, "Write it for plumb train --schedule");
  sub->add_flag("--json", o->json, "The table as JSON");
  sub->footer(
      "Example:\n  plumb plan Llama-3.1-8B --ranks 8 --memory 80GiB\n  plumb plan gpt.pt2 --ranks 4 --microbatches 8 "
      "--memory-limit 400MiB --csv best.csv\n  plumb train "
      "gpt.pt2 --data text.bin --stages 4 --microbatches 8 --schedule best.csv");
  sub->callback([o] { plan(*o); });
}

}  // namespace plumb::cli
