// The subcommands: each adds itself to the application.
#pragma once

namespace CLI {
class App;
}

namespace plumb::cli {

void add_import(CLI::App& app);
void add_show(CLI::App& app);
void add_opt(CLI::App& app);
void add_run(CLI::App& app);
void add_plan(CLI::App& app);
void add_train(CLI::App& app);
void add_scale(CLI::App& app);
void add_track(CLI::App& app);
void add_split(CLI::App& app);
void add_eval(CLI::App& app);
void add_sample(CLI::App& app);

}  // namespace plumb::cli
