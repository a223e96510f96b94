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
#include "plumb/training/plan/plan_model.h"
#include "plumb/training/plan/plan_page.h"
#include "plumb/training/step/loss.h"

namespace plumb::cli {
namespace {

struct PlanArguments {
  std::string file, memory, take, csv, svg, out, html, loss;
  std::vector<double> costs;
  std::vector<std::string> names, transmit;
  std::vector<int> stages_per_rank = {1, 2, 3};
  std::vector<double> machine, link;
  StageCostOptions messages;  // costs of messages by --link
  int ranks = 0, microbatches = 0, replicas = 1, threads = 1;
  int64_t batch = 1, length = 0;  // rows of a microbatch and tokens of a row, for a folder's model
  double held = 1;
  bool estimate = false, json = false;

  bool measured() const { return costs.empty(); }  // in seconds and bytes, of a file
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

CostsOf given_costs(const PlanArguments& o) {
  Costs costs;
  costs.forward = {o.costs[0]};
  costs.input = {o.costs[1]};
  costs.weight = {o.costs[2]};
  costs.communication = {o.costs.size() > 3 ? o.costs[3] : 0};
  costs.activation = {1};
  costs.held_for_weight = {o.held};
  return even_costs(costs, o.ranks);
}

StageCostOptions cost_options(const PlanArguments& o, const GraphModule& module) {
  StageCostOptions options = o.messages;
  if (!o.machine.empty()) {
    options.machine.flops_per_second = o.machine[0];
    options.machine.bytes_per_second = o.machine[1];
    if (o.link.empty()) options.bytes_per_second = o.machine[2];
  }
  options.loss = used_by("--loss", [&] { return example_loss(o.loss, module); });
  return options;
}

std::string memory_text(double value, bool bytes) { return bytes ? bytes_text(value) : short_number(value); }

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
  check_writable({{"--svg", o.svg}, {"--csv", o.csv}, {"-o", o.out}, {"--html", o.html}}, {o.file});
  if (o.file.empty() == o.costs.empty()) {
    throw UsageError("a .pt2 file, a folder or --costs is needed, and not two of them",
                     "--costs 1,1,1, or the name of a file");
  }
  if (!o.measured() && (o.costs.size() < 3 || o.costs.size() > 4))
    throw UsageError("--costs: three or four numbers are needed", "--costs FORWARD,INPUT,WEIGHT,MESSAGE");
  if (!o.machine.empty() && o.machine.size() != 3)
    throw UsageError("--machine: three numbers are needed", "--machine FLOPS,BYTES,NETWORK");
  if (std::ranges::any_of(o.machine, [](double x) { return !(x >= 1 && x <= 1e30); }))
    throw UsageError("--machine: its numbers are from 1 to 1e30", "--machine 4e14,2e12,5e10");
  if (o.link.size() > 2) throw UsageError("--link: a rate and a latency are needed", "--link GB/S,MICROSECONDS");
  if (!o.link.empty())
    used_by(
        "--link", [&] { set_link(o.messages, o.link[0], o.link.size() > 1 ? o.link[1] : 0); },
        "--link GB/S,MICROSECONDS");
  if (!o.measured() && (!(o.out + o.html + o.loss).empty() || !o.transmit.empty()))
    throw UsageError("-o, --html, --loss and --transmit are for a file: given costs have no cut", "the name of a file");
  if (o.microbatches == 0) o.microbatches = 2 * o.ranks;
  const std::vector<std::string> usual = usual_schedules();
  for (const std::string& name : o.names) {
    const bool known = std::ranges::find(usual, name) != usual.end() || (name == kJoint && o.measured());
    if (!known) used_by("--schedules", [&] { schedule_traits(name); });
  }
}

// Reads the file, or makes one of a folder; says how costs are had.
Loaded read_model(PlanArguments& o, Progress& progress) {
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
  Loaded loaded = load_with_tensors(file);
  o.estimate = o.estimate || !o.machine.empty() || !has_values(loaded.module().state());
  return loaded;
}

// Which rank holds what, and how costs were had.
void print_ranks(const PlanArguments& o, const PlannedModel& planned, const ScheduleChoice& c) {
  std::cout << "\n" << columns(ranks_table(planned, c));
  if (o.estimate) {
    const StageCostOptions known;
    const double flops = o.machine.empty() ? known.machine.flops_per_second : o.machine[0];
    std::cout << "estimated from shapes, for " << short_number(flops)
              << " operations a second of each rank; peak memory has weights, gradients, AdamW's state and what waits "
                 "for its backward\n";
  } else {
    std::cout << "costs are processor time, the mean of " << StageCostOptions().repeats << " runs with " << o.ranks
              << " cores at work, which is " << percent(planned.spread) << " above the least\n";
  }
}

// Returns "17 that keep 1GiB a rank", "17" without a limit.
std::string fitting(const PlanArguments& o, const std::vector<ScheduleChoice>& choices) {
  return c10::str(std::ranges::count(choices, true, &ScheduleChoice::fits),
                  o.memory.empty() ? "" : " that keep " + o.memory + " a rank");
}

// Reports that no choice keeps the limit, and what would. The fewest ranks are searched among doubled ones.
[[noreturn]] void refuse(const PlanArguments& o, const PlannedModel& planned, const CostsOf& costs) {
  if (!o.take.empty()) used_by("--take", [&] { planned.choose(o.take); });
  const ScheduleChoice& least = planned.least_memory();
  const std::string needed = memory_text(least.peak(), o.measured());
  // Rounded up, so that it is enough.
  const std::string enough = o.measured() ? c10::str(static_cast<int64_t>(std::ceil(least.peak() / 1024)), "KiB")
                                          : short_number(least.peak(), 9);
  std::string remedy = "a --memory-limit of " + enough + " (" + least.name + ")";
  CompareOptions quick{.memory_limit = memory_of(o.memory), .names = {"1F1B"}};
  for (int ranks = 2 * o.ranks; ranks <= 16 * o.ranks && ranks <= 1024; ranks *= 2) {
    const auto found = compare_schedules(ranks, std::max(ranks, o.microbatches), costs, quick);
    if (found.empty() || !found[0].problem.empty()) break;
    if (!found[0].fits) continue;
    remedy += c10::str(", --ranks ", ranks, " (1F1B: ", memory_text(found[0].peak(), o.measured()), ")");
    break;
  }
  throw Error(ErrorKind::InvalidArgument,
              "no schedule keeps the memory limit of " + o.memory + ": the least that a rank needs is " + needed, "",
              remedy + ", or smaller microbatches");
}

void print_json(const PlanArguments& o, const PlannedModel& planned, const ScheduleChoice* taken) {
  nlohmann::json all = {{"unit", o.measured() ? "seconds" : ""}, {"schedules", nlohmann::json::array()}};
  for (const auto& c : planned.choices) all["schedules"].push_back(to_json(c));
  all["taken"] = taken == nullptr ? nlohmann::json() : nlohmann::json(taken->name);
  if (o.measured()) all["spread"] = planned.spread;
  if (taken != nullptr) all["conclusion"] = conclusion(planned, *taken, o.measured());
  std::cout << all.dump(1) << "\n";
}

void print_text(const PlanArguments& o, const PlannedModel& planned, const ScheduleChoice& taken) {
  const int frame = static_cast<int>(std::string("rank  || 100%").size() + std::to_string(o.ranks - 1).size());
  const int wide = terminal_width() ? std::clamp(*terminal_width() - frame, 10, 100) : 100;
  std::cout << "\n"
            << conclusion(planned, taken, o.measured()) << "; one of " << fitting(o, planned.choices) << "\n"
            << render_text(taken.schedule, taken.simulation.spans, wide) << render_letters(taken.schedule);
  if (o.measured()) print_ranks(o, planned, taken);
}

void plan(PlanArguments o) {
  check_arguments(o);
  Progress progress(6, o.json);
  std::optional<Loaded> loaded;
  PlannedModel planned;
  CostsOf costs;
  if (o.measured()) {
    loaded = read_model(o, progress);
    const GraphModule& module = loaded->module();
    PlanRequest request{.ranks = o.ranks,
                        .microbatches = o.microbatches,
                        .replicas = o.replicas,
                        .memory_limit = memory_of(o.memory),
                        .stages_per_rank = o.stages_per_rank,
                        .names = o.names,
                        .transmit = o.transmit,
                        .costs = cost_options(o, module),
                        .estimate = o.estimate};
    const auto inputs = o.estimate ? std::vector<c10::IValue>() : example_inputs(module);
    planned = plan_model(module, inputs, request, [&](const std::string& what) { progress.next(what); });
    costs = [&module, &o, options = request.costs](int stages) {
      return estimate_stages(*cut(module, stages, {.transmit = o.transmit}, "plan"), options);
    };
  } else {
    costs = given_costs(o);
    CompareOptions options{.memory_limit = memory_of(o.memory), .stages_per_rank = o.stages_per_rank, .names = o.names};
    if (o.names.empty()) options.names = usual_schedules();
    planned.choices = compare_schedules(o.ranks, o.microbatches, costs, options);
  }
  progress.finish();
  const ScheduleChoice* taken = planned.find(o.take);
  if (o.json) {
    print_json(o, planned, taken);
  } else {
    std::cout << columns(choices_table(planned.choices, taken, o.measured())) << kChoiceColumns;
  }
  if (taken == nullptr) refuse(o, planned, costs);
  if (!o.json) print_text(o, planned, *taken);
  if (!o.svg.empty()) {
    write_text(to_svg(TimelineChart{taken->name, {timeline_of(taken->schedule, taken->simulation)}}), o.svg);
  }
  if (!o.csv.empty()) write_schedule(o, *taken);
  if (!o.out.empty()) write_text(to_json(planned.plan_of(loaded->module(), *taken, o.replicas)), o.out);
  if (!o.html.empty()) plan_page(planned, *taken, o.file).write(o.html);
  for (const std::string& path : {o.svg, o.csv, o.out, o.html}) say_wrote(progress, path);
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
      ->check(number_within(0, 1e100));
  sub->add_option("--ranks", o->ranks, "Processes of the pipeline")->required()->check(whole_number(1, 1024));
  sub->add_option("--microbatches", o->microbatches, "Parts of a batch (default: twice the ranks)")
      ->check(whole_number(1, 65536));
  sub->add_option("--memory-limit,--memory", o->memory,
                  "Memory of a rank, AdamW's state included: 800MiB; with --costs: microbatches of a whole rank");
  sub->add_option("--held-for-weight", o->held,
                  "With --costs: what waits for the weight half, gradients too, over a microbatch's memory")
      ->check(number_within(0, 100));
  sub->add_option("--data-parallel", o->replicas, "So many such pipelines beside each other, for -o")
      ->check(whole_number(1, 65536));
  sub->add_option("--stages-per-rank", o->stages_per_rank, "Tried: 2,4 (default: 1,2,3)")
      ->delimiter(',')
      ->check(whole_number(1, 1024));
  sub->add_option(
         "--schedules", o->names,
         "Only these: 1F1B,ZBVZeroBubble (default: all but DualPipe, Searched (an order for one stage a rank) and, for "
         "a file, Joint: cut, placement, order and recomputation searched together)")
      ->delimiter(',');
  sub->add_option("--take", o->take, "Take this one, not the quickest");
  sub->add_option("--loss", o->loss,
                  "Planned with the model, as plumb train has it: cross_entropy, mse, output or none (default: the "
                  "model's own loss, else cross_entropy)")
      ->check(CLI::IsMember({"cross_entropy", "mse", "output", "none"}));
  sub->add_option("--transmit", o->transmit,
                  "Parameters of several stages, or all of them, that the first stage which uses them sends to the "
                  "others, as plumb train --transmit has it: the plan says so")
      ->delimiter(',');
  sub->add_option("--link", o->link,
                  "Between ranks: GB a second, and microseconds that a message takes whatever its size: --link 12.5,20 "
                  "(default: 2,50). Plan for the slowest link there is: it costs little on a faster one")
      ->delimiter(',');
  sub->add_flag("--estimate", o->estimate, "Do not run the stages: costs from shapes");
  sub->add_option("--machine", o->machine,
                  "For estimates: operations a second, bytes a second of a rank's memory, and between ranks: --machine "
                  "4e14,2e12,5e10")
      ->delimiter(',');
  sub->add_option("--batch", o->batch, "Rows of a microbatch, for a folder's model")->check(whole_number(1, 1 << 20));
  sub->add_option("--length", o->length,
                  "Tokens of a row, for a folder's model (default: the config's longest, at most 2048)")
      ->check(whole_number(1, 1 << 24));
  sub->add_option("--threads", o->threads, "Threads to measure with")->check(whole_number(1, 1024));
  sub->add_option("--svg", o->svg, "Draw the time line of the one taken");
  sub->add_option("-o,--out", o->out, "Write the plan for plumb train --plan: cut, ranks, table and recomputation");
  sub->add_option("--html", o->html, "A page: its time line beside the best named one, memory by rank");
  sub->add_option("--csv", o->csv, "Write its table alone, for plumb train --schedule and the balanced cut");
  sub->add_flag("--json", o->json, "The table as JSON");
  sub->footer(
      "Example:\n  plumb plan Llama-3.1-8B --ranks 8 --memory 80GiB\n  plumb plan gpt.pt2 --ranks 4 --microbatches 8 "
      "--memory-limit 400MiB -o best.json\n  plumb train "
      "gpt.pt2 --data text.bin --plan best.json");
  sub->callback([o] { plan(*o); });
}

}  // namespace plumb::cli
