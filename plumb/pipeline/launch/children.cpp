#include "plumb/pipeline/launch/children.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "plumb/core/error.h"
#include "plumb/core/system_remedy.h"

extern char** environ;

namespace plumb {
namespace {

using std::chrono::milliseconds;

[[noreturn]] void raise_system(const std::string& what) {
  const int reason = errno;
  throw Error(ErrorKind::ExecutionFailed, what + ": " + std::strerror(reason), "", system_remedy(reason, ""));
}

struct SystemPipe {
  Descriptor read, write;
};

SystemPipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) raise_system("cannot make a pipe");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

std::string own_program() {
  char path[4096];
  const auto length = ::readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0 || length == sizeof path) raise_system("cannot find this program's file");
  return std::string(path, length);
}

std::vector<std::string> child_environment(const std::vector<std::pair<std::string, std::string>>& variables) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) values[text.substr(0, equals)] = text.substr(equals + 1);
  }
  // Left over from a launcher around this one, these would mean something else.
  for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
                           "PLUMB_PROCESS", "PLUMB_STORE_SOCKET", "PLUMB_RUN"}) {
    values.erase(name);
  }
  for (const auto& [name, value] : variables) values[name] = value;
  std::vector<std::string> list;
  for (const auto& [name, value] : values) list.push_back(name + "=" + value);
  return list;
}

std::vector<char*> pointers(std::vector<std::string>& list) {
  std::vector<char*> out;
  for (auto& s : list) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

Children::~Children() {
  for (auto& child : children_) {
    if (child.ended) continue;
    ::kill(child.pid, SIGKILL);
    ::waitpid(child.pid, nullptr, 0);
  }
}

int Children::start(const std::string& given, const std::vector<std::string>& arguments_,
                    const std::vector<std::pair<std::string, std::string>>& variables, int inherits) {
  const std::string program = given.empty() ? own_program() : given;
  std::vector<std::string> arguments{program};
  arguments.insert(arguments.end(), arguments_.begin(), arguments_.end());
  auto environment = child_environment(variables);
  auto argv = pointers(arguments), envp = pointers(environment);
  SystemPipe out = make_pipe(), err = make_pipe(), failure = make_pipe();
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) raise_system("cannot start a process");
  if (pid == 0) {
    // Only calls that are safe after fork() in a program with threads.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(out.write.get(), STDOUT_FILENO);
    ::dup2(err.write.get(), STDERR_FILENO);
    if (inherits >= 0) ::fcntl(inherits, F_SETFD, 0);
    sigset_t none;
    ::sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::execvpe(argv[0], argv.data(), envp.data());
    const int code = errno;
    [[maybe_unused]] auto written = ::write(failure.write.get(), &code, sizeof code);
    ::_exit(127);
  }
  Child child;
  child.pid = pid;
  child.started = Clock::now();
  child.out.fd = std::move(out.read);
  child.err.fd = std::move(err.read);
  children_.push_back(std::move(child));
  failure.write.close();
  int code = 0;
  if (::read(failure.read.get(), &code, sizeof code) == sizeof code) {
    errno = code;
    raise_system("cannot start '" + program + "'");
  }
  return count() - 1;
}

bool Children::all_ended() const { return std::ranges::all_of(children_, &Child::ended); }

void Children::signal(int number, int signal, bool stops) {
  auto& child = children_.at(number);
  if (child.ended) return;
  child.told_to_stop = child.told_to_stop || stops;
  ::kill(child.pid, signal);
}

void Children::kill_silent(int number) {
  children_.at(number).end.was_silent = true;
  signal(number, SIGKILL, false);
}

void Children::watch(milliseconds wait) {
  read_lines(wait, /*to_the_end=*/false);
  for (int c = 0; c < count(); c++) reap(c);
}

// False at the end of the stream.
bool Children::drain(int child, Child::Output& output, bool is_stderr) {
  char buffer[8192];
  const auto n = ::read(output.fd.get(), buffer, sizeof buffer);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
  if (n > 0) output.rest.append(buffer, n);
  size_t at = 0;
  for (size_t end; (end = output.rest.find('\n', at)) != std::string::npos; at = end + 1) {
    on_line_(child, is_stderr, output.rest.substr(at, end - at));
  }
  output.rest.erase(0, at);
  if (n > 0) return true;
  if (!output.rest.empty()) on_line_(child, is_stderr, std::exchange(output.rest, {}));
  output.fd.close();
  return false;
}

void Children::read_lines(milliseconds wait, bool to_the_end) {
  const auto until = Clock::now() + milliseconds(1000);
  for (bool more = true; more;) {
    std::vector<pollfd> polls;
    std::vector<std::pair<int, bool>> who;
    for (int c = 0; c < count(); c++) {
      for (bool is_stderr : {false, true}) {
        const auto& child = children_[c];
        const int fd = (is_stderr ? child.err : child.out).fd.get();
        if (fd < 0) continue;
        polls.push_back({fd, POLLIN, 0});
        who.emplace_back(c, is_stderr);
      }
    }
    // A grandchild may hold the pipe open for ever: the end is waited for a second at most.
    const int ready = ::poll(polls.data(), polls.size(), static_cast<int>(wait.count()));
    for (size_t i = 0; i < polls.size(); i++) {
      if (polls[i].revents == 0) continue;
      auto& child = children_[who[i].first];
      drain(who[i].first, who[i].second ? child.err : child.out, who[i].second);
    }
    more = to_the_end && !polls.empty() && ready >= 0 && Clock::now() < until;
  }
}

void Children::reap(int number) {
  auto& child = children_[number];
  if (child.ended) return;
  int status = 0;
  if (::waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == child.pid) {
    if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
      child.stopped = WIFSTOPPED(status) ? Clock::now() : Clock::time_point();
      on_line_(number, true, WIFSTOPPED(status) ? "stopped by a signal, the others wait" : "goes on");
      return;
    }
    child.ended = true;
    auto& end = child.end;
    end.seconds = std::chrono::duration<double>(Clock::now() - child.started).count();
    end.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    end.exit_code = WIFSIGNALED(status) ? 128 + end.signal : WEXITSTATUS(status);
    end.stopped_by_launcher = child.told_to_stop;
  } else if (child.stopped != Clock::time_point() && Clock::now() - child.stopped >= patience_) {
    child.stopped = {};
    child.end.was_stopped = true;
    ::kill(child.pid, SIGKILL);
  }
}

}  // namespace plumb
