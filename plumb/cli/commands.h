// The subcommands: each adds itself to the application.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace plumb::cli {

using AddCommand = void(CLI::App& app);
AddCommand add_import, add_show, add_opt, add_run, add_plan, add_train, add_scale, add_track, add_split, add_eval,
    add_sample, add_verdict, add_diff, add_doctor, add_completion, add_help;

// Returns the command of this name. Throws UsageError with a suggestion if there is none.
CLI::App& command_named(CLI::App& app, const std::string& name);
// Returns a sentence about the first option that the command did not know, with a suggestion; empty if there is none.
std::string unknown_option(const CLI::App& command);

// Thrown to end the command with this code, after its error was printed.
struct ExitCode {
  int code;
};

}  // namespace plumb::cli
