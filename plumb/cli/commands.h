// The subcommands: each adds itself to the application.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace plumb::cli {

using AddCommand = void(CLI::App& app);
AddCommand add_import, add_show, add_opt, add_run, add_plan, add_train, add_scale, add_track, add_split, add_eval,
    add_sample, add_doctor, add_completion, add_help;

// Throws UsageError with the command that was meant, as far as can be told.
CLI::App& command_named(CLI::App& app, const std::string& name);
// What is wrong with the first option that the command did not know, and the one that was meant; empty if there is
// none.
std::string unknown_option(const CLI::App& command);

// Ends the command with this code; what failed has been said.
struct ExitCode {
  int code;
};

}  // namespace plumb::cli
