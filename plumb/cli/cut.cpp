#include "plumb/cli/cut.h"

#include <CLI/CLI.hpp>

namespace plumb::cli {

void add_cut_options(CLI::App* sub, CutOptions& options) {
  sub->add_option(
         "--at", options.at,
         "Cut before these modules, or after NAME:end: --at layers.2,layers.4:end (default: marks, else balanced)")
      ->delimiter(',')
      ->allow_extra_args(false);
  sub->add_option(
         "--transmit", options.transmit,
         "Parameters of several stages, or all of them, that the first stage which uses them sends to the others "
         "(default: each stage has a copy)")
      ->delimiter(',')
      ->allow_extra_args(false);
}

}  // namespace plumb::cli
