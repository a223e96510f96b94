#include "plumb/pipeline/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>

#include "plumb/core/error.h"
#include "plumb/core/system_remedy.h"
#include "plumb/pipeline/listen.h"

extern char** environ;

namespace plumb {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

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

struct Output {
  Descriptor fd;
  std::string rest;
};

struct Child {
  pid_t pid = -1;
  Output out, err;
  Clock::time_point started;
  bool ended = false;
  bool told_to_stop = false;
  Clock::time_point stopped{};  // since when, if it is
};

std::string own_program() {
  char path[4096];
  const auto length = ::readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0 || length == sizeof path) raise_system("cannot find this program's file");
  return std::string(path, length);
}

std::vector<std::string> child_environment(const LaunchOptions& options, int rank, int port, int socket) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) values[text.substr(0, equals)] = text.substr(equals + 1);
  }
  // Left over from a launcher around this one, these would mean something else.
  for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
    values.erase(name);
  }
  for (const auto& [name, value] : options.environment) values[name] = value;
  values["RANK"] = values["LOCAL_RANK"] = std::to_string(rank);
  values["WORLD_SIZE"] = values["LOCAL_WORLD_SIZE"] = std::to_string(options.num_processes);
  values["MASTER_ADDR"] = "127.0.0.1";
  values["MASTER_PORT"] = std::to_string(port);
  values["PLUMB_STORE_SOCKET"] = std::to_string(socket);
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

class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options), result_() {
    result_.processes.resize(options.num_processes);
  }

  ~Launch() {
    for (auto& child : children_) {
      if (child.pid > 0 && !child.ended) {
        ::kill(child.pid, SIGKILL);
        ::waitpid(child.pid, nullptr, 0);
      }
    }
  }

  LaunchResult run() {
    int port = 0;
    Descriptor socket(listen_at("127.0.0.1", port));  // so that no other program can take the port
    for (int r = 0; r < options_.num_processes; r++) start(r, port, socket.get());
    socket.close();
    while (!all_ended()) {
      read_lines(milliseconds(20));
      reap();
      pass_signal_on();
      stop_others();
    }
    read_lines(milliseconds(0), /*to_the_end=*/true);
    return result_;
  }

 private:
  void start(int rank, int port, int socket) {
    const std::string program = options_.program.empty() ? own_program() : options_.program;
    std::vector<std::string> arguments{program};
    arguments.insert(arguments.end(), options_.arguments.begin(), options_.arguments.end());
    auto environment = child_environment(options_, rank, port, socket);
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
      if (rank == 0) ::fcntl(socket, F_SETFD, 0);
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
  }

  bool all_ended() const {
    for (const auto& c : children_) {
      if (!c.ended) return false;
    }
    return true;
  }

  void emit(int rank, bool is_stderr, const std::string& line) {
    if (options_.on_line) {
      options_.on_line(rank, is_stderr, line);
    } else if (is_stderr) {
      std::fprintf(stderr, "[rank %d] %s\n", rank, line.c_str());
    } else {
      std::fprintf(stdout, "%s\n", line.c_str());
      std::fflush(stdout);
    }
  }

  // False at the end of the stream.
  bool drain(int rank, Output& output, bool is_stderr) {
    char buffer[8192];
    const auto n = ::read(output.fd.get(), buffer, sizeof buffer);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
    if (n > 0) output.rest.append(buffer, n);
    size_t at = 0;
    for (size_t end; (end = output.rest.find('\n', at)) != std::string::npos; at = end + 1) {
      emit(rank, is_stderr, output.rest.substr(at, end - at));
    }
    output.rest.erase(0, at);
    if (n > 0) return true;
    if (!output.rest.empty()) emit(rank, is_stderr, std::exchange(output.rest, {}));
    output.fd.close();
    return false;
  }

  void read_lines(milliseconds wait, bool to_the_end = false) {
    const auto until = Clock::now() + milliseconds(1000);
    for (bool more = true; more;) {
      std::vector<pollfd> polls;
      std::vector<std::pair<int, bool>> who;
      for (size_t r = 0; r < children_.size(); r++) {
        for (bool is_stderr : {false, true}) {
          const int fd = (is_stderr ? children_[r].err : children_[r].out).fd.get();
          if (fd < 0) continue;
          polls.push_back({fd, POLLIN, 0});
          who.emplace_back(static_cast<int>(r), is_stderr);
        }
      }
      // A grandchild may hold the pipe open for ever: the end is waited for a second at most.
      const int ready = ::poll(polls.data(), polls.size(), static_cast<int>(to_the_end ? 50 : wait.count()));
      for (size_t i = 0; i < polls.size(); i++) {
        if (polls[i].revents == 0) continue;
        auto& child = children_[who[i].first];
        drain(who[i].first, who[i].second ? child.err : child.out, who[i].second);
      }
      more = to_the_end && !polls.empty() && ready >= 0 && Clock::now() < until;
    }
  }

  void reap() {
    for (size_t r = 0; r < children_.size(); r++) {
      auto& child = children_[r];
      int status = 0;
      if (child.ended || ::waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) != child.pid) {
        lose_patience(static_cast<int>(r));
        continue;
      }
      if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
        child.stopped = WIFSTOPPED(status) ? Clock::now() : Clock::time_point();
        emit(static_cast<int>(r), true, WIFSTOPPED(status) ? "stopped by a signal, the others wait" : "goes on");
        continue;
      }
      child.ended = true;
      auto& end = result_.processes[r];
      end.seconds = std::chrono::duration<double>(Clock::now() - child.started).count();
      end.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
      end.exit_code = WIFSIGNALED(status) ? 128 + end.signal : WEXITSTATUS(status);
      end.stopped_by_launcher = child.told_to_stop;
      if (end.exit_code != 0 && result_.first_failed < 0) {
        result_.first_failed = static_cast<int>(r);
        failed_at_ = Clock::now();
      }
    }
  }

  void lose_patience(int rank) {
    auto& child = children_[rank];
    if (child.ended || child.stopped == Clock::time_point()) return;
    if (Clock::now() - child.stopped < options_.patience_with_stopped) return;
    child.stopped = {};
    result_.processes[rank].was_stopped = true;
    ::kill(child.pid, SIGKILL);
  }

  void pass_signal_on() {
    const int signal = options_.signal ? options_.signal() : 0;
    for (auto& child : children_) {
      if (signal != 0 && !child.ended) ::kill(child.pid, signal);
    }
  }

  void signal_rest(int signal) {
    for (auto& child : children_) {
      if (child.ended) continue;
      child.told_to_stop = true;
      ::kill(child.pid, signal);
    }
  }

  void stop_others() {
    if (!stopping_ && options_.cancelled && options_.cancelled()) failed_at_ = Clock::now() - options_.patience;
    if (failed_at_ == Clock::time_point()) return;
    const auto since = Clock::now() - failed_at_;
    if (since < options_.patience) return;
    // SIGKILL ends a stopped process as well, SIGTERM waits until it goes on.
    if (!stopping_) {
      signal_rest(SIGTERM);
      stopping_ = true;
    } else if (since > options_.patience + milliseconds(1000)) {
      signal_rest(SIGKILL);
    }
  }

  const LaunchOptions& options_;
  LaunchResult result_;
  std::vector<Child> children_;
  Clock::time_point failed_at_{};
  bool stopping_ = false;
};

}  // namespace

LaunchResult launch_local(const LaunchOptions& options) {
  if (options.num_processes < 1) {
    throw Error(ErrorKind::InvalidArgument, std::to_string(options.num_processes) + " processes cannot be started");
  }
  return Launch(options).run();
}

}  // namespace plumb
