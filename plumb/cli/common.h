// The subcommands share this: reading programs and inputs, wrong use, printing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plumb/core/number_text.h"
#include "plumb/core/table.h"
#include "plumb/exported/exported.h"
#include "plumb/training/options.h"
#include "plumb/training/usage.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace plumb::cli {

class Progress;

// The command's own arguments, as main() was given them: those of the processes that it starts.
std::vector<std::string>& own_arguments();

// A `.pt2` file, or a graph as text (every other name). A text has no tensors: its module can be shown, cut and
// rewritten, not run.
struct Loaded {
  ExportedProgram program;
  bool is_text = false;
  GraphModule& module() const { return *program.module; }
};
bool is_pt2(const std::string& path);
Loaded load(const std::string& path);
// Saves as `.pt2` or text, like the file that was loaded. Throws UsageError if the ending of `path` contradicts that.
void save(const Loaded& loaded, const std::string& path);
void check_same_kind(const Loaded& loaded, const std::string& path);
// load() for commands that need tensors: throws UsageError for a text.
Loaded load_with_tensors(const std::string& path);
// load() for commands that need values: an imported program gets them from --weights, or the folder of the import.
Loaded load_with_values(const std::string& path, const std::string& weights);
void add_weights_option(CLI::App* sub, std::string& weights);

// A model and what it is run on, for every command that runs one: FILE and --input.
struct ModelOptions {
  std::string file, weights;
  std::vector<std::string> inputs;
};
void add_model_options(CLI::App* sub, ModelOptions& options);
// Returns the files that these options name.
std::vector<std::string> files_of(const ModelOptions& options);

struct Model {
  Loaded loaded;
  std::vector<c10::IValue> inputs;  // flat, of the dtypes and shapes the model takes
  GraphModule& module() const { return loaded.module(); }
};
// Throws UsageError for a graph's text, and naming the --input that is missing, too many, or does not fit.
Model open_model(const ModelOptions& options, Progress& progress);

// Adds the option of a training's field, or FILE: its argument goes to `given` under the field's name.
CLI::Option* add_field(CLI::App* sub, const TrainField& field, FieldTexts& given);

// Writes a text beside `path` and renames the file; "" and "-" are stdout.
void write_text(const std::string& text, const std::string& path);

// Returns the outputs' flat names: the keys of a dict, else the names of the values.
std::vector<std::string> output_names(const GraphModule& module);
// Returns the scalar that a backward starts from: the output named "loss", else sum_of_outputs(). Undefined if no
// output has a gradient.
at::Tensor loss_or_sum(const GraphModule& module, const std::vector<c10::IValue>& outputs);
// Returns loss_or_sum(). Throws Error(InvalidArgument) if it is undefined.
at::Tensor backward_start(const GraphModule& module, const std::vector<c10::IValue>& outputs);

// Prints on stderr where a result went; nothing for "" and "-".
void say_wrote(Progress& progress, const std::string& path);

// Returns the columns of a line of the terminal that is stdout; nullopt if it is no terminal.
std::optional<int> terminal_width();

// Returns the text of a table; cells longer than 60 are cut.
std::string columns(Table table);

// "40 s", "1 min 20 s", "3 h 5 min".
std::string duration_text(double seconds);

}  // namespace plumb::cli
