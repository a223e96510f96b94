#include "plumb/training/options.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <set>
#include <sstream>

#include "plumb/core/cores.h"
#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/join.h"
#include "plumb/core/number_text.h"
#include "plumb/core/toml_text.h"
#include "plumb/schedule/generators.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

using O = TrainOptions;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr bool kSameRun = true;
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
using Choices = std::vector<std::string>;
const NumberCheck kAnything;
const std::set<std::string> kRanksOwn = {"device",      "threads", "inject",       "log-every",
                                         "quiet",       "json",    "options",      "csv",
                                         "tensorboard", "page",    "verdict-page", "verdict-recipe"};

TrainField field(std::string name, TrainField::Member member, std::string help, NumberCheck check,
                 bool same_run = false) {
  return {std::move(name), member, std::move(help), {}, std::move(check), false, same_run};
}
TrainField field(std::string name, TrainField::Member member, std::string help, Choices choices,
                 bool same_run = false) {
  return {std::move(name), member, std::move(help), std::move(choices), {}, false, same_run};
}
TrainField list(std::string name, TrainField::Member member, std::string help, bool same_run = false) {
  return {std::move(name), member, std::move(help), {}, {}, true, same_run};
}

// Each part of the table keeps the order of the help.
std::vector<TrainField> data_fields() {
  return {
      {"weights", &O::weights,
       "The folder with the safetensors of a program that plumb import made; each rank reads what its stages hold "
       "(default: the folder that was imported)"},
      {"data", &O::data,
       "Tokens: a .npy or .safetensors of one whole-number tensor, raw ones (a file of any other name), or a folder of "
       "such files. Or inputs, one row a sample: a .pt, .npy or .safetensors (several: by name, or a list or tuple). "
       "Training draws rows, or windows of tokens, without repetition until all have been; an evaluation takes each "
       "once, in order"},
      {"data-pattern", &O::data_pattern, "Files of a folder to read, by their path in it: '*.py'"},
      field("token-type", &O::token_type, "Type of raw tokens: u8, u16 or i32", Choices{"u8", "u16", "i32"}, kSameRun),
      {"targets", &O::targets,
       "A .pt, .npy or .safetensors, one row a sample (default: the tensor 'targets' of a .safetensors given as "
       "--data); tokens are their own targets"},
      {"mask", &O::mask, "As --targets, of true and false, of the targets' shape: which of them count in the loss"},
      field("loss", &O::loss, "cross_entropy, mse, or output: the model returns its loss",
            Choices{"cross_entropy", "mse", "output"}, kSameRun),
      field("ignore-index", &O::ignore_index, "With --loss cross_entropy: the target that does not count",
            whole_number(kLeast, kMost), kSameRun),
      field("shuffle", &O::shuffle,
            "Rows in an order by the seed, another one each epoch; with --no-shuffle as the data stands", kAnything,
            kSameRun),
  };
}

std::vector<TrainField> optimizer_fields() {
  const auto share = number_within(0, 1), not_negative = number_within(0, kInfinity);
  return {
      field("optimizer", &O::optimizer,
            "adamw, adam or sgd; with u-muP's learning rates for a file whose parameters are tagged",
            Choices{"adamw", "adam", "sgd"}, kSameRun),
      field("lr", &O::lr, "Learning rate", positive_number, kSameRun),
      field("beta1", &O::beta1, "adamw and adam: decay of the mean of gradients", number_within(0, 0.9999999),
            kSameRun),
      field("beta2", &O::beta2, "adamw and adam: decay of the mean of squared gradients", number_within(0, 0.9999999),
            kSameRun),
      field("eps", &O::eps, "adamw and adam: added to the root", not_negative, kSameRun),
      field("weight-decay", &O::weight_decay,
            "Not given: 0.01 for adamw, else 0; 0 for tagged files, where it does not depend on the learning rate",
            not_negative, kSameRun),
      field("momentum", &O::momentum, "sgd: its momentum", share, kSameRun),
      field("nesterov", &O::nesterov, "sgd: Nesterov's momentum", kAnything, kSameRun),
      field("group", &O::groups,
            "'PATTERN: weight_decay=0, lr=0.1x': other values for the parameters whose names fit (* and ?); x is times "
            "--lr. As often as wanted, the first that fits counts",
            kAnything, kSameRun),
      field("clip", &O::clip, "Scale gradients down to this global norm; 0: never", not_negative, kSameRun),
      field("rate", &O::rate,
            "The learning rate over the steps: constant, linear or cosine (down to --final-rate), wsd (constant, then "
            "linear in the last --decay-steps)",
            Choices{"constant", "linear", "cosine", "wsd"}, kSameRun),
      field("warmup", &O::warmup, "Steps in which the rate grows from 0", whole_number(0), kSameRun),
      field("decay-steps", &O::decay_steps,
            "--rate wsd: steps at the end in which the rate falls; 0: a fifth of the steps", whole_number(0), kSameRun),
      field("final-rate", &O::final_rate, "The share of --lr that the rate falls to", share, kSameRun),
  };
}

std::vector<TrainField> step_fields() {
  return {
      field("steps", &O::steps, "Optimizer steps", whole_number(1)),
      field("batch", &O::batch,
            "Rows of a step (0: the file's batch times the microbatches, pipelines and --accumulate)",
            whole_number(0, kMost)),
      field("microbatches", &O::microbatches, "Parts of a batch, each as long as the file's own batch",
            whole_number(1, 65536)),
      field("accumulate", &O::accumulate, "Run the schedule this many times for a step of the optimizer",
            whole_number(1, 65536), kSameRun),
      field("autocast", &O::autocast,
            "bf16: products and convolutions in bfloat16, forward and backward, their results cast back to float32",
            Choices{"none", "bf16"}, kSameRun),
      field(
          "formats", &O::formats,
          "Products simulated in number formats: a recipe file of plumb verdict (NAME.toml), fp8, mxfp8, bf16, mxfp4, "
          "FORWARD/BACKWARD, ...",
          kAnything, kSameRun),
      list(
          "verdict", &O::verdict,
          "fp8,mxfp4: says in which of these number formats the model will train, and what stands in the way, from the "
          "gradients of a few steps; all: the usual ones. The training stays as it is, bit for bit"),
      field("verdict-steps", &O::verdict_steps,
            "The verdict is measured in so many steps, half of them behind --warmup", whole_number(1, 1000)),
      {"verdict-page", &O::verdict_page, "An HTML page of the verdict"},
      {"verdict-recipe", &O::verdict_recipe, "A file of the recipe that the verdict ends with, for --formats"},
      field("seed", &O::seed, "Seed of the order of samples and of dropout", whole_number(kLeast, kMost), kSameRun),
      {"eval-data", &O::eval_data, "Held-out data, of the kind of --data: its loss at the end, and every --eval-every"},
      {"eval-targets", &O::eval_targets, "The targets of --eval-data"},
      field("eval-every", &O::eval_every, "Evaluate each time so many steps are done; 0: at the end only",
            whole_number(0)),
      field("eval-batches", &O::eval_batches,
            "So many batches of --eval-data each time, each of the microbatches of all pipelines; 0: all of it",
            whole_number(0)),
  };
}

std::vector<TrainField> layout_fields() {
  return {
      field("stages", &O::stages, "Pipeline processes; plumb starts them itself, or runs under torchrun",
            whole_number(1, 1024)),
      list("at", &O::at,
           "Cut before these modules, or after NAME:end: --at layers.2,layers.4:end (default: marks, else balanced)"),
      list("transmit", &O::transmit,
           "Parameters of several stages, or all of them, that the first stage which uses them sends to the others "
           "(default: each stage has a copy)"),
      list("wire", &O::wire,
           "e4m3fn,e5m2: formats of values between stages and of their gradients, none for either as it is. Both are "
           "rounded as a part of the model and travel as codes, a byte each",
           kSameRun),
      list("wire-exclude", &O::wire_exclude, "Values between stages that travel as they are, by name (* and ?)",
           kSameRun),
      {"plan", &O::plan,
       "A file of plumb plan -o: where to cut, which rank runs which stage when, and what is computed again, in the "
       "place of --stages, --microbatches, --data-parallel, --at, --schedule and --recompute"},
      {"schedule", &O::schedule, join(schedule_names()) + ", or a .csv table (plumb plan writes them)"},
      field("data-parallel", &O::replicas,
            "So many pipelines beside each other, on parts of the batch of their own; gradients are summed",
            whole_number(1, 65536)),
      field("gradient-groups", &O::gradient_groups,
            "The microbatches of all pipelines are so many groups, each summed in order, and the groups' sums in a "
            "binary tree: with the same groups losses and weights are the same bits at every --data-parallel (0: those "
            "of the run that goes on, else as many as --data-parallel)",
            whole_number(0, 65536)),
      field("recompute", &O::recompute,
            "cheap: the backward computes results of gelu, norms and the like again instead of keeping them, bit for "
            "bit the same; none: it keeps everything",
            Choices{"cheap", "none"}),
      {"device", &O::device,
       "cpu, cuda, ...: where stages compute; each process of a host has the device of its own number there"},
      field("threads", &O::threads,
            "Threads of each process (0: the cores shared out). With the same number losses are equal bit for bit "
            "whatever the stages, but for weights tied across stages without --transmit (gradients are summed in "
            "another order)",
            whole_number(0, 1024)),
  };
}

std::vector<TrainField> checkpoint_fields() {
  return {
      {"checkpoints", &O::checkpoints,
       "A folder for checkpoints. A training that finds one of its run there goes on from it, at any --stages and "
       "--schedule, with the losses and weights of one that was not stopped. SIGTERM: a checkpoint, then exit code 75"},
      field("checkpoint-every", &O::checkpoint_every, "Steps between checkpoints; 0: at the end and when stopped only",
            whole_number(0)),
      field("keep-last", &O::keep_last, "So many of the newest checkpoints are kept; 0: all", whole_number(0)),
      field("keep-every", &O::keep_every, "Those of steps that this divides are kept, too; 0: none", whole_number(0)),
      {"resume", &O::resume,
       "Go on from the newest checkpoint; with --no-resume begin a new run at the first step, which later starts go on "
       "with"},
      field(
          "max-restarts", &O::max_restarts,
          "Where plumb starts the processes: make up for so many that are killed, hang or fail. The others keep "
          "theirs; the state comes from memory that they hold, too, or from the last checkpoint. Under torchrun, which "
          "has its own number of them: go on from memory on the hosts that are left",
          whole_number(0, 1000000)),
      field("spares", &O::spares,
            "With --max-restarts: so many processes more, that have read the model and wait to take a lost one's place",
            whole_number(0, 1000)),
      {"recut", &O::recut,
       "With --max-restarts: when no spare is left, go on with fewer processes at another cut and schedule, instead of "
       "starting a new one"},
      field("copies-to-neighbor", &O::copies_to_neighbor,
            "Under torchrun with --max-restarts, where there is one pipeline: send the state of every so many steps to "
            "another host, beside the steps, so that a lost host loses so many at most; 0: none",
            whole_number(0, 1000000)),
      field("patience", &O::patience, "Seconds to wait for a rank that does not respond", whole_number(1, 86400)),
      {"audit", &O::audit,
       "Find ranks whose memory or arithmetic is wrong, and make up for them as for lost ones (--max-restarts): the "
       "state's hash after an update is that before the next, and a stage's microbatch runs again on another rank "
       "(--audit-every)"},
      field("audit-every", &O::audit_every,
            "With --audit: run a microbatch again every so many steps; 0: so seldom that it is 0.5 % of the work",
            whole_number(0, 1000000)),
      {"inject", &O::inject,
       "A fault for drills, once: 'kill rank 2 at 1F3 of step 7'; kill, stop (SIGSTOP), raise, flip (a bit of what "
       "this "
       "action computes with), rot, rot_state or rot_gradient (a bit of a parameter, of the optimizer's state or of a "
       "gradient, before this action)"},
  };
}

std::vector<TrainField> output_fields() {
  return {
      {"save", &O::save,
       "The .pt2 file for the trained weights, under the same names. Ctrl-C ends training with its step and saves; a "
       "second one ends at once"},
      {"save-hf", &O::save_hf,
       "A new folder for the trained weights of a program that plumb import made: as transformers wrote the one it was "
       "imported from, for from_pretrained. Each rank writes its part"},
      {"dump", &O::dump,
       "A folder for the step whose loss or gradients are no numbers: the model before it and its batch, for plumb run "
       "and plumb track"},
      {"record", &O::record, "A TOML file of rules: what to measure while training, and when (docs/history.md)"},
      {"history", &O::history,
       "Where to record it; plumb track --history shows it. With several stages a file each rank, FILE.rank0, "
       "FILE.rank1, ..."},
      {"hashes", &O::hashes,
       "A history of hashes of parameters, buffers and the optimizer's state after each step, for plumb diff. With "
       "several processes a file each, FILE.rank0, FILE.rank1, ..."},
      field("replay", &O::replay,
            "Do this step again, from the newest checkpoint before it or from the beginning, and write it to --hashes "
            "whole: every value and gradient. Nothing else is written. 0: train",
            whole_number(0)),
      {"timeline", &O::timeline,
       "Draw the last step beside its simulations (.svg), or write it for Perfetto and chrome://tracing (.json)"},
      field("timeline-steps", &O::timeline_steps, "So many of the last steps, in a .json time line", whole_number(1)),
      {"csv", &O::csv,
       "A table of the steps: loss, rate, norm of the gradients, rows and tokens a second, memory of the largest rank, "
       "seconds, evaluations. A file that is there already is refused, but for the run's own when it goes on"},
      {"tensorboard", &O::tensorboard, "A folder for TensorBoard's event files of the same numbers, of this run alone"},
      {"page", &O::page,
       "An HTML page of the same, as curves, and of the scales that --record measured, written again every few seconds "
       "while it runs"},
      {"options", &O::options, "A TOML file to write all options to, for --config; - prints them"},
      field("log-every", &O::log_every, "Print the line of every so many steps, and the last one's", whole_number(1)),
      {"quiet", &O::quiet, "Print problems only"},
      {"dry-run", &O::dry_run,
       "Train nothing: say how long a step takes, by stages measured once and the schedule simulated, and what each "
       "rank would hold"},
      {"json", &O::json,
       "One JSON object a line, each step's too: {options} first, {group, parameters} for each --group, "
       "{learning_rates} if they are "
       "each parameter's own, {step, steps, loss, lr, norm, rows, tokens, memory, seconds} after each step (loss and "
       "norm are null if they are no numbers, tokens are there for models that take some, memory is bytes of the "
       "largest rank, seconds since the start), {eval, eval_loss, eval_targets} after each evaluation, {stage, "
       "recompute} after the first step, {resumed, folder}, {checkpoint, folder, copied, written}, "
       "{checkpoint_problem}, {problem}, {injected}, {audit, rank, tensor, why}, {restart, of, rank, why}, "
       "{copied_step, "
       "rank, to, bytes, seconds, in_bubbles}, {interrupted, steps, signal}, {dry_run, "
       "bubble, "
       "rows, ranks: [{stages, parameters, resident, peak}]} (seconds, bytes), {saved}, {dumped, not_finite}, "
       "{verdict, at_step, text}, {drew, "
       "bubble, conclusion}"},
  };
}

}  // namespace

int threads_of(const TrainOptions& o) {
  return o.threads > 0 ? static_cast<int>(o.threads) : std::max(1, num_cores() / o.processes());
}

const std::vector<TrainField>& train_fields() {
  static const std::vector<TrainField> fields = [] {
    std::vector<TrainField> all = {{"file", &O::file, "A .pt2 file"}};
    for (auto part : {data_fields, optimizer_fields, step_fields, layout_fields, checkpoint_fields, output_fields}) {
      for (TrainField& field : part()) {
        field.is_ranks_own = kRanksOwn.contains(field.name);
        all.push_back(std::move(field));
      }
    }
    return all;
  }();
  return fields;
}

const TrainField& train_field(const std::string& name) {
  std::string wanted = name;
  std::ranges::replace(wanted, '_', '-');
  for (const TrainField& field : train_fields()) {
    if (field.name == wanted) return field;
  }
  throw Error(ErrorKind::UnknownName, "no option of a training is named '" + name + "'", "",
              join(train_fields(), &TrainField::name));
}

namespace {

[[noreturn]] void refuse(const TrainField& field, const std::string& problem) {
  throw UsageError("--" + field.name + ": " + problem,
                   field.choices.empty() ? "plumb train --help" : join(field.choices));
}

template <class T>
std::string shortest(T value) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace

void set_field(TrainOptions& options, const TrainField& field, const std::vector<std::string>& texts) {
  if (field.is_list()) {
    options.*std::get<std::vector<std::string> O::*>(field.member) =
        field.commas ? split_commas(join(texts, {}, ",")) : texts;
    return;
  }
  if (texts.size() != 1) refuse(field, "takes one value, got " + std::to_string(texts.size()));
  const std::string& text = texts[0];
  if (!field.choices.empty() && std::ranges::find(field.choices, text) == field.choices.end()) {
    refuse(field, "'" + text + "' is not known");
  }
  if (field.check) {
    if (const std::string problem = field.check(text); !problem.empty()) refuse(field, problem);
  }
  if (const auto* m = std::get_if<std::string O::*>(&field.member)) options.*(*m) = text;
  if (const auto* m = std::get_if<int64_t O::*>(&field.member)) options.*(*m) = std::stoll(text);
  if (const auto* m = std::get_if<double O::*>(&field.member)) options.*(*m) = std::strtod(text.c_str(), nullptr);
  if (const auto* m = std::get_if<std::optional<double> O::*>(&field.member)) {
    options.*(*m) = std::strtod(text.c_str(), nullptr);
  }
  if (const auto* m = std::get_if<bool O::*>(&field.member)) {
    if (text != "true" && text != "false") refuse(field, "'" + text + "' is neither true nor false");
    options.*(*m) = text == "true";
  }
}

std::vector<std::string> field_texts(const TrainOptions& options, const TrainField& field) {
  if (const auto* m = std::get_if<std::vector<std::string> O::*>(&field.member)) return options.*(*m);
  if (const auto* m = std::get_if<std::string O::*>(&field.member)) return {options.*(*m)};
  if (const auto* m = std::get_if<int64_t O::*>(&field.member)) return {std::to_string(options.*(*m))};
  if (const auto* m = std::get_if<double O::*>(&field.member)) return {shortest(options.*(*m))};
  if (const auto* m = std::get_if<bool O::*>(&field.member)) return {options.*(*m) ? "true" : "false"};
  const auto& value = options.*std::get<std::optional<double> O::*>(field.member);
  return value ? std::vector<std::string>{shortest(*value)} : std::vector<std::string>();
}

namespace {

// An option beside --plan has its default, or says the same.
void take_plan(TrainOptions& options) {
  const TrainOptions defaults;
  if (!options.plan_file || options.plan_file->path != options.plan) {
    options.plan_file =
        std::make_shared<TrainOptions::PlanFile>(TrainOptions::PlanFile{options.plan, read_plan(options.plan)});
  }
  const PipelinePlan& plan = options.plan_file->plan;
  const auto take = [&](const char* name, int64_t TrainOptions::*field, int64_t value) {
    if (options.*field != defaults.*field && options.*field != value)
      throw UsageError(c10::str("--", name, " ", options.*field, ": --plan ", options.plan, " is for ", value),
                       c10::str("leave --", name, " out"));
    options.*field = value;
  };
  take("stages", &TrainOptions::stages, plan.schedule.num_ranks());
  take("microbatches", &TrainOptions::microbatches, plan.schedule.num_microbatches);
  take("data-parallel", &TrainOptions::replicas, plan.replicas);
  if (options.transmit.empty()) options.transmit = plan.transmit;
  if (!plan.transmit.empty() && options.transmit != plan.transmit)
    throw UsageError(c10::str("--transmit ", join(options.transmit), ": --plan ", options.plan, " was made for ",
                              join(plan.transmit)),
                     "leave --transmit out, or make the plan anew with it");
  if (!options.at.empty() || options.schedule != defaults.schedule || options.recompute != defaults.recompute)
    throw UsageError("--plan: says itself where to cut, in which order to run and what to compute again",
                     "leave --at, --schedule and --recompute out");
}

}  // namespace

TrainOptions checked(TrainOptions options) {
  for (const TrainField& field : train_fields()) {
    const auto texts = field_texts(options, field);
    if (!field.is_list() && !texts.empty()) set_field(options, field, texts);
  }
  if (!options.plan.empty()) take_plan(options);
  return options;
}

TrainOptions read_options(const std::string& config, const FieldTexts& texts) {
  TrainOptions options;
  if (!config.empty()) read_toml(options, read_file(config), config);
  for (const auto& [name, texts_of] : texts) set_field(options, train_field(name), texts_of);
  return checked(std::move(options));
}

std::string to_toml(const TrainOptions& options) {
  std::ostringstream out;
  for (const TrainField& field : train_fields()) {
    const auto texts = field_texts(options, field);
    if (!field.is_list() && texts.empty()) {
      out << "# " << field.name << ": not set\n";
      continue;
    }
    out << field.name << " = ";
    if (field.is_list()) {
      out << "[" << join(texts, toml_string) << "]\n";
    } else {
      const bool text = std::holds_alternative<std::string O::*>(field.member);
      out << (text ? toml_string(texts[0]) : texts[0]) << "\n";
    }
  }
  return out.str();
}

namespace {

// Returns a value of a document as on a command line; none for a table, a date and the like.
std::optional<std::string> text_of_value(const toml::node& node) {
  if (auto text = node.value_exact<std::string>()) return text;
  if (const auto flag = node.value_exact<bool>()) return *flag ? "true" : "false";
  if (const auto whole = node.value_exact<int64_t>()) return std::to_string(*whole);
  if (const auto number = node.value_exact<double>()) return shortest(*number);
  return std::nullopt;
}

}  // namespace

void read_toml(TrainOptions& options, const std::string& text, const std::string& file) {
  const auto place = [&](const toml::source_region& at) { return c10::str(file, ":", at.begin.line, ": "); };
  const toml::table document = parse_toml(text, file, "NAME = value lines; texts stand in quotes");
  std::set<const TrainField*> seen;
  for (const auto& [key, node] : document) {
    const std::string name(key.str());
    prefixed(place(key.source()), [&, &node = node] {
      const TrainField& field = train_field(name);
      if (!seen.insert(&field).second) refuse(field, "is there twice, with - and with _");
      std::vector<std::string> texts;
      if (const toml::array* list = node.as_array(); list != nullptr && field.is_list()) {
        for (const toml::node& each : *list) {
          const auto one_of_them = text_of_value(each);
          if (!one_of_them) refuse(field, "holds what is no text, number, true or false");
          texts.push_back(*one_of_them);
        }
      } else if (const auto one = text_of_value(node)) {
        texts = {*one};
      } else {
        refuse(field, "is no text, number, true or false");
      }
      set_field(options, field, texts);
    });
  }
}

}  // namespace plumb
