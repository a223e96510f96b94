// The `plumb` command. Exit codes: 0 done, 1 the work failed, 2 wrong use.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/import.h"
#include "plumb/cli/signals.h"
#include "plumb/core/error.h"
#include "plumb/core/freed_memory.h"
#include "plumb/core/output_file.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/transport/process_group.h"

namespace {

// Ctrl-C and the like: no half of a file stays, and the shell sees which signal it was. Training goes on until its step
// is over, and its processes end; a second signal ends at once.
bool speaks = false;
extern "C" void on_signal(int signal, siginfo_t* info, void*) {
  const bool from_a_process = info->si_code != SI_KERNEL;
  const bool from_launcher = !speaks && from_a_process && info->si_pid == ::getppid();
  if (plumb::cli::take_signal(signal, from_a_process, from_launcher)) return;
  if (signal == SIGINT && speaks) {
    for (const char* part : {"\nplumb: interrupted", plumb::cli::what_was_saved(), "\n"}) {
      [[maybe_unused]] const auto written = ::write(STDERR_FILENO, part, std::strlen(part));
    }
  }
  plumb::remove_temporary_files();
  plumb::cli::TemporaryFile::remove();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void handle_signals() {
  // Only the process that the user started prints; the processes that it started do not.
  speaks = !plumb::started_by_plumb();
  struct sigaction action {};
  action.sa_sigaction = &on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1}) {
    struct sigaction before {};
    ::sigaction(signal, &action, &before);
    if (before.sa_handler == SIG_IGN) ::signal(signal, SIG_IGN);  // as nohup and a shell's background jobs have it
  }
  ::signal(SIGPIPE, SIG_DFL);  // ends the command without a word under `| head`; Python's programs inherit it ignored
  ::signal(SIGXFSZ, SIG_IGN);  // a file beyond its limit is an error of the write
}

// Standard streams that were closed: else a file that is opened gets their number, and what is printed goes into it.
void hold_standard_streams() {
  for (int stream = 0; stream <= STDERR_FILENO; ++stream) {
    if (::fcntl(stream, F_GETFD) < 0 && errno == EBADF) (void)::open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY);
  }
}

int run(int argc, char** argv) {
  CLI::App app{"plumb: takes a PyTorch model as a graph, and rewrites, scales, cuts and trains it.", "plumb"};
  app.set_version_flag("--version", "plumb " PLUMB_VERSION " (torch " TORCH_VERSION_TEXT ")");
  app.require_subcommand(1);
  app.footer(
      "Example:\n  plumb show model.pt2 --as table\n\n`plumb help COMMAND` shows each command's options and an "
      "example; `plumb completion SHELL` makes a shell complete them.");
  app.add_option_function<std::string>(
         "--allow-operators", [](const std::string& name) { plumb::allow_operators(name); },
         "Let files name an operator (ns::op) that plumb does not know as tensor arithmetic; as often as wanted")
      ->type_name("NAME")
      ->trigger_on_parse();
  using namespace plumb::cli;
  for (AddCommand* add : {add_import, add_show, add_opt, add_run, add_plan, add_train, add_scale, add_track, add_split,
                          add_eval, add_sample, add_verdict, add_diff, add_doctor, add_completion, add_help})
    add(app);
  if (argc > 1 && argv[1][0] != '-') command_named(app, argv[1]);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    const auto chosen = app.get_subcommands();
    const std::string unknown = chosen.empty() ? "" : unknown_option(*chosen.front());
    const std::string help = "plumb " + (chosen.empty() ? "" : chosen.front()->get_name() + " ") + "--help";
    std::cerr << "plumb: " << (unknown.empty() ? e.what() + ("\n  try: " + help) : unknown) << "\n";
    // Ranks whose options are right wait for this one.
    const auto place =
        !chosen.empty() && chosen.front()->get_name() == "train" ? plumb::discover_ranks() : std::nullopt;
    if (place) plumb::tell_cannot_start(*place, e.what());
    return 2;
  }
  return 0;
}

// Printed text may still be in buffers that cannot be written.
void flush_stdout() {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return;
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  if (poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0) return;  // a pipe whose reader, `head` say, has had enough
  throw plumb::Error(plumb::ErrorKind::CannotWrite, "standard output cannot be written", "",
                     "look where it goes: a disk without room?");
}

// Returns the command's exit code.
int run_to_the_end(int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    flush_stdout();
    return code;
  } catch (const plumb::cli::ExitCode& e) {
    return e.code;
  } catch (const plumb::UsageError& e) {
    std::cerr << "plumb: " << e.what() << "\n";
    return 2;
  } catch (const plumb::Error& e) {
    std::cerr << "plumb: " << e.what() << "\n";
  } catch (const c10::Error& e) {
    std::cerr << "plumb: " << e.what_without_backtrace() << "\n";
  } catch (const std::filesystem::filesystem_error& e) {
    std::cerr << "plumb: " << e.path1().string() << ": " << e.code().message()
              << "\n  try: check the path and its permissions\n";
  } catch (const std::bad_alloc&) {
    std::cerr << "plumb: out of memory\n";
  } catch (const std::exception& e) {
    std::cerr << "plumb: " << e.what() << "\n";
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  hold_standard_streams();
  std::ios::sync_with_stdio(false);  // else a signal that comes while a slow reader is waited for ends the output
  handle_signals();
  plumb::keep_freed_memory();
  plumb::cli::own_arguments().assign(argv + std::min(argc, 1), argv + argc);
  const int code = run_to_the_end(argc, argv);
#ifdef PLUMB_SANITIZED  // by any compiler
  return code;          // sanitizers report at the end of the process
#else
  // Torch takes its tables of operators apart for 0.1 s when a process ends, a quarter of a short command.
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(code);
#endif
}
