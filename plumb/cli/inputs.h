// A model and what it is run on, from the command line: shared by every command that runs one.
#pragma once

#include <string>
#include <vector>

#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/training/inputs.h"

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

}  // namespace plumb::cli
