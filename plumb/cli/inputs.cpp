#include "plumb/cli/inputs.h"

#include <CLI/CLI.hpp>

namespace plumb::cli {

void add_model_options(CLI::App* sub, ModelOptions& options) {
  sub->add_option("FILE", options.file, "A .pt2 file")->required();
  sub->add_option("--input", options.inputs,
                  "[NAME=]FILE.pt or FILE.npy, or a number; one an input, in order if not named")
      ->allow_extra_args(false);
}

Model open_model(const ModelOptions& options, Progress& progress) {
  progress.next("reading " + options.file);
  Model model{load_with_tensors(options.file), {}};
  model.inputs = read_inputs(model.module(), options.inputs, "--input", true);
  return model;
}

}  // namespace plumb::cli
