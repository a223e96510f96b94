// A training's options: one struct, and one table from which the command's options, the keys of a TOML file and
// Python's keywords come.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "plumb/core/text.h"
#include "plumb/schedule/pipeline_plan.h"

namespace plumb {

// docs/howto/train.md says what each is for, train_fields() in a sentence.
struct TrainOptions {
  // The model and its data.
  std::string file, weights, data, data_pattern, token_type = "u8", targets, mask, loss = "cross_entropy";
  int64_t ignore_index = -100;
  bool shuffle = true;
  // The optimizer.
  std::string optimizer = "adamw";
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, momentum = 0, clip = 0;
  std::optional<double> weight_decay;
  bool nesterov = false;
  std::vector<std::string> groups;
  std::string rate = "constant";
  int64_t warmup = 0, decay_steps = 0;
  double final_rate = 0;
  // A step.
  int64_t steps = 100, batch = 0, microbatches = 1, accumulate = 1;
  std::string autocast = "none", formats;
  // The layout.
  int64_t stages = 1, replicas = 1, gradient_groups = 0, threads = 0;
  std::vector<std::string> at, transmit, wire, wire_exclude;
  std::string plan, schedule = "1F1B", recompute = "cheap", device = "cpu";
  int64_t seed = 0;
  // A verdict on number formats.
  std::vector<std::string> verdict;
  int64_t verdict_steps = 4;
  std::string verdict_page, verdict_recipe;
  // Held-out data.
  std::string eval_data, eval_targets;
  int64_t eval_every = 0, eval_batches = 0;
  // Going on.
  std::string checkpoints, hashes;
  int64_t replay = 0;
  bool audit = false;
  int64_t audit_every = 0;
  std::vector<std::string> inject;
  int64_t checkpoint_every = 0, keep_last = 2, keep_every = 0, max_restarts = 0, spares = 0, patience = 60;
  int64_t copies_to_neighbor = 0;
  bool resume = true, recut = false;
  // Files that are written.
  std::string save, save_hf, dump, record, history, timeline, csv, tensorboard, page;
  int64_t timeline_steps = 1;
  std::string options;
  int64_t log_every = 1;
  bool quiet = false, dry_run = false, json = false;

  // The file of `plan`, once checked() has read it: what follows takes it from here.
  struct PlanFile {
    std::string path;
    PipelinePlan plan;
  };
  std::shared_ptr<const PlanFile> plan_file = nullptr;

  int processes() const { return static_cast<int>(stages * replicas); }
  // Returns whether a file will have the trained weights.
  bool saves_weights() const { return !save.empty() || !save_hf.empty() || !checkpoints.empty(); }
  bool operator==(const TrainOptions&) const = default;
};

// Returns the threads of each process: options.threads, or the cores shared out.
int threads_of(const TrainOptions& options);

struct TrainField {
  using Member =
      std::variant<std::string TrainOptions::*, std::vector<std::string> TrainOptions::*, int64_t TrainOptions::*,
                   double TrainOptions::*, std::optional<double> TrainOptions::*, bool TrainOptions::*>;
  std::string name;  // "eval-every": --eval-every, eval-every = 100, eval_every=100
  Member member;
  std::string help;
  std::vector<std::string> choices = {};
  // "" or what is wrong with a value, in words.
  std::function<std::string(const std::string& text)> check = {};
  bool commas = false;         // a list's elements may be given as one text with commas between
  bool makes_numbers = false;  // another value is another run: a resumed run must have the same
  bool is_ranks_own = false;   // ranks may have other values: it is about this process, or about what it prints

  bool is_flag() const { return std::holds_alternative<bool TrainOptions::*>(member); }
  // Returns whether it is the name of a file or folder, which hosts may have elsewhere.
  bool is_path() const {
    return std::holds_alternative<std::string TrainOptions::*>(member) && choices.empty() && !makes_numbers;
  }
  bool is_list() const { return std::holds_alternative<std::vector<std::string> TrainOptions::*>(member); }
};

// Returns the fields in the order of the help.
const std::vector<TrainField>& train_fields();
// Finds a field by name, "_" and "-" alike. Throws Error(UnknownName) with near names.
const TrainField& train_field(const std::string& name);

// Sets a field from texts, as they stand on a command line: one, or any number for a list; "true" or "false" for a
// flag. Throws UsageError "--steps: 0 is no whole number of 1 or more".
void set_field(TrainOptions& options, const TrainField& field, const std::vector<std::string>& texts);
// Returns its value as such texts; none for an optional one that is not set.
std::vector<std::string> field_texts(const TrainOptions& options, const TrainField& field);

// Returns options that a program has filled in. A plan sets stages, microbatches and replicas. Throws UsageError for
// a value that set_field() refuses, and for a layout beside the plan's.
TrainOptions checked(TrainOptions options);
// Texts of fields by their names, on top of those of a TOML file ("": none). Throws what checked() throws.
using FieldTexts = std::map<std::string, std::vector<std::string>>;
TrainOptions read_options(const std::string& config, const FieldTexts& texts);

// Every option, a line each, as a TOML document that read_toml() takes: "# weight-decay: not set" for what is not.
std::string to_toml(const TrainOptions& options);
// Sets what the document names. Throws Error with file and line: BadFile for what is no TOML, UnknownName for a key,
// InvalidArgument for a value.
void read_toml(TrainOptions& options, const std::string& text, const std::string& file);

}  // namespace plumb
