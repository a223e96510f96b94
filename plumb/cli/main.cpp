// The `plumb` command. Exit codes: 0 done, 1 the work failed, 2 wrong use.
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/exit_code.h"
#include "plumb/core/error.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app{"plumb: takes a PyTorch model as a graph, and rewrites, scales, cuts and trains it.", "plumb"};
  app.set_version_flag("--version", "plumb " PLUMB_VERSION " (torch " TORCH_VERSION_TEXT ")");
  app.require_subcommand(1);
  app.footer(
      "Example:\n  plumb show model.pt2 --as table\n\n`plumb COMMAND --help` shows each command's options and an "
      "example.");
  plumb::cli::add_show(app);
  plumb::cli::add_opt(app);
  plumb::cli::add_run(app);
  plumb::cli::add_plan(app);
  plumb::cli::add_train(app);
  plumb::cli::add_scale(app);
  plumb::cli::add_track(app);
  plumb::cli::add_split(app);
  if (argc > 1 && argv[1][0] != '-' &&
      app.get_subcommands([&](const CLI::App* c) { return c->get_name() == argv[1]; }).empty()) {
    throw plumb::cli::UsageError("no command '" + std::string(argv[1]) + "'", "plumb --help");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    const auto chosen = app.get_subcommands();
    std::cerr << "plumb: " << e.what() << "\n  try: plumb " << (chosen.empty() ? "" : chosen.front()->get_name() + " ")
              << "--help\n";
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const plumb::cli::ExitCode& e) {
    return e.code;
  } catch (const plumb::cli::UsageError& e) {
    std::cerr << "plumb: " << e.what() << "\n";
    return 2;
  } catch (const plumb::Error& e) {
    std::cerr << "plumb: " << e.what() << "\n";
  } catch (const c10::Error& e) {
    std::cerr << "plumb: " << e.what_without_backtrace() << "\n";
  } catch (const std::bad_alloc&) {
    std::cerr << "plumb: out of memory\n";
  } catch (const std::exception& e) {
    std::cerr << "plumb: " << e.what() << "\n";
  }
  return 1;
}
