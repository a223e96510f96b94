// The `plumb` command. Exit codes: 0 done, 1 the work failed, 2 wrong use.
#include <c10/util/Exception.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/exit_code.h"
#include "plumb/core/error.h"
#include "plumb/core/freed_memory.h"
#include "plumb/exported/temporary_file.h"
#include "plumb/graph/operator_facts.h"
#include "plumb/pipeline/environment.h"

namespace {

// Ctrl-C and the like: no half of a file stays, and the shell sees which signal it was. The processes of a pipeline end
// with the one that started them.
extern "C" void end_by_signal(int signal) {
  plumb::remove_temporary_files();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}
extern "C" void interrupted(int signal) {
  constexpr char kText[] = "\nplumb: interrupted, nothing was saved\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kText, sizeof kText - 1);
  end_by_signal(signal);
}

void handle_signals() {
  // Of several processes only the one that the user started speaks.
  const bool speaks = !plumb::process_variable("PLUMB_STORE_SOCKET");
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const bool ignored = ::signal(signal, signal == SIGINT && speaks ? &interrupted : &end_by_signal) == SIG_IGN;
    if (ignored) ::signal(signal, SIG_IGN);  // as nohup and a shell's background jobs have it
  }
}

int run(int argc, char** argv) {
  CLI::App app{"plumb: takes a PyTorch model as a graph, and rewrites, scales, cuts and trains it.", "plumb"};
  app.set_version_flag("--version", "plumb " PLUMB_VERSION " (torch " TORCH_VERSION_TEXT ")");
  app.require_subcommand(1);
  app.footer(
      "Example:\n  plumb show model.pt2 --as table\n\n`plumb COMMAND --help` shows each command's options and an "
      "example.");
  app.add_option_function<std::string>(
         "--allow-operators", [](const std::string& name) { plumb::allow_operators(name); },
         "Let files name an operator (ns::op) that plumb does not know as tensor arithmetic; as often as wanted")
      ->type_name("NAME")
      ->trigger_on_parse();
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
  handle_signals();
  plumb::keep_freed_memory();
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
