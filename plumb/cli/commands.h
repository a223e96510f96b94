// The subcommands: each adds itself to the application.
#pragma once

namespace CLI {
class App;
}

namespace plumb::cli {

using AddCommand = void(CLI::App& app);
AddCommand add_import, add_show, add_opt, add_run, add_plan, add_train, add_scale, add_track, add_split, add_eval,
    add_sample;

// Ends the command with this code; what failed has been said.
struct ExitCode {
  int code;
};

}  // namespace plumb::cli
