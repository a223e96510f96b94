// A model and what it is run on, from the command line: shared by every command that runs one.
#pragma once

#include <string>
#include <vector>

#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"

namespace CLI {
class App;
}

namespace plumb::cli {

struct ModelOptions {
  std::string file;
  std::vector<std::string> inputs;
};
// FILE and --input.
void add_model_options(CLI::App* sub, ModelOptions& options);

struct Model {
  Loaded loaded;
  std::vector<c10::IValue> inputs;  // flat, of the dtypes and shapes the model takes
  GraphModule& module() const { return loaded.module(); }
};
// Throws UsageError for a graph's text, and naming the --input that is missing, too many, or does not fit.
Model open_model(const ModelOptions& options, Progress& progress);

// "--input [NAME=]x.pt" texts as the module's flat inputs. Files without a name fill the inputs in order (a dict by its
// keys, a tuple as several); a number, true, false or none may stand instead of a file. `option` is for messages.
// Shapes and dtypes are checked only if `fit`.
std::vector<c10::IValue> read_inputs(const GraphModule& module, const std::vector<std::string>& texts,
                                     const std::string& option, bool fit);

}  // namespace plumb::cli
