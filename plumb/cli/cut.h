// Options that say where a program is cut into stages.
#pragma once

#include "plumb/training/cut.h"

namespace CLI {
class App;
}

namespace plumb::cli {

// --at and --transmit.
void add_cut_options(CLI::App* sub, CutOptions& options);

}  // namespace plumb::cli
