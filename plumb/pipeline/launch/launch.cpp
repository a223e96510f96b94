#include "plumb/pipeline/launch/launch.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>
#include <random>
#include <set>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/launch/children.h"
#include "plumb/pipeline/launch/generations.h"
#include "plumb/pipeline/transport/listen.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;

class Launch {
 public:
  using Clock = Children::Clock;

  explicit Launch(const LaunchOptions& options)
      : options_(options),
        children_([this](int child, bool is_stderr, const std::string& line) { emit(child, is_stderr, line); },
                  options.patience_with_stopped) {}

  LaunchResult run() {
    Descriptor socket;  // so that no other program can take the port
    if (options_.replacements > 0) {
      generations_ = std::make_unique<Generations>(options_.num_processes + options_.spares);
      port_ = generations_->port();
    } else {
      socket = Descriptor(listen_at("127.0.0.1", port_));
    }
    for (int r = 0; r < options_.num_processes; r++) members_.push_back(start(r, socket.get()));
    socket.close();
    if (generations_) {
      for (int s = 0; s < options_.spares; s++) spares_.push_back(start(-1, -1));
    }
    while (!members_ended()) {
      children_.watch(milliseconds(20));
      pass_signal_on();
      if (failed_at_ == Clock::time_point() && !make_up_for_lost()) give_up();
      stop_others();
    }
    end_spares();
    children_.read_to_the_end();
    for (size_t r = 0; r < members_.size(); r++) {
      result_.processes.push_back(children_[members_[r]].end);
      // The others may have ended before it.
      if (members_[r] == in_vain_ && children_[in_vain_].failed()) result_.first_failed = static_cast<int>(r);
    }
    return result_;
  }

 private:
  int start(int rank, int socket) {
    auto variables = options_.environment;
    const std::string size = std::to_string(options_.num_processes), own = std::to_string(std::max(rank, 0));
    variables.insert(variables.end(), {{"RANK", own},
                                       {"LOCAL_RANK", own},
                                       {"WORLD_SIZE", size},
                                       {"LOCAL_WORLD_SIZE", size},
                                       {"MASTER_ADDR", "127.0.0.1"},
                                       {"MASTER_PORT", std::to_string(port_)},
                                       {"PLUMB_RUN", run_}});
    if (generations_) {
      variables.emplace_back("PLUMB_PROCESS", std::to_string(children_.count()));
    } else {
      variables.emplace_back("PLUMB_STORE_SOCKET", std::to_string(socket));
    }
    rank_of_.push_back(rank);
    return children_.start(options_.program, options_.arguments, variables, rank == 0 ? socket : -1);
  }

  void begin_generation() {
    for (size_t r = 0; r < members_.size(); r++) rank_of_[members_[r]] = static_cast<int>(r);
    generations_->begin(members_);
    taking_part_ = {members_.begin(), members_.end()};
    failing_since_ = {};
  }

  bool members_ended() const {
    return std::ranges::all_of(members_, [&](int member) { return children_[member].ended; });
  }

  void emit(int child, bool is_stderr, const std::string& line) {
    const int rank = rank_of_[child];
    if (options_.on_line) {
      options_.on_line(rank, is_stderr, line);
    } else if (is_stderr) {
      std::fprintf(stderr, "[%s] %s\n", rank < 0 ? "spare" : (str("rank ", rank)).c_str(), line.c_str());
    } else {
      std::fprintf(stdout, "%s\n", line.c_str());
      std::fflush(stdout);
    }
  }

  // False if a process has failed and the others cannot go on.
  bool make_up_for_lost() {
    bool lost = false, done = false;
    for (const int member : members_) {
      lost = lost || children_[member].failed();
      done = done || (children_[member].ended && !children_[member].failed());
    }
    if (!generations_) return !lost;
    if (!lost && failing_since_ == Clock::time_point() && !generations_->anyone_left()) {
      // Ranks that meet would wait for one that is lost before it comes; they notice one that lives and does not come.
      const bool late = Clock::now() - started_ > options_.patience_with_silent;
      if (taking_part_.empty() && (late || all_are_ready())) begin_generation();
      return true;
    }
    // A process that has ended well has written what there is to be written.
    in_vain_ = generations_->in_vain();
    if (signalled_ || done || in_vain_ >= 0) return false;
    if (failing_since_ == Clock::time_point()) {
      failing_since_ = Clock::now();
      used_before_ = used_;
    }
    for (size_t r = 0; r < members_.size(); r++) {
      if (children_[members_[r]].failed() && !missing_.contains(static_cast<int>(r)) && !replace(static_cast<int>(r)))
        return false;
    }
    if (!all_have_left() || !all_are_ready()) return true;
    // They lost each other, and all are there.
    if (used_ == used_before_) {
      if (used_ >= options_.replacements) return false;
      ++used_;
    }
    go_on();
    return true;
  }

  bool replace(int rank) {
    const ProcessEnd end = children_[members_[rank]].end;
    if (!end.was_silent) {
      if (used_ >= options_.replacements) return false;
      used_++;
    }
    const auto tell = [&](const std::string& instead) {
      if (options_.on_lost) options_.on_lost(rank, end, instead);
    };
    while (!spares_.empty()) {
      const int spare = spares_.front();
      spares_.pop_front();
      if (children_[spare].ended) continue;
      members_[rank] = spare;
      tell("a spare process takes its place");
      return true;
    }
    if (options_.fewer) {
      missing_.insert(rank);
      tell("the others go on without it");
      return true;
    }
    members_[rank] = start(rank, -1);
    tell("a new process takes its place");
    return true;
  }

  // Returns whether all that took part in the generation and live wait for the next one. Ends who does not in time.
  bool all_have_left() {
    bool all = true;
    for (const int member : taking_part_) {
      if (children_[member].ended || generations_->has_left(member)) continue;
      all = false;
      if (Clock::now() - failing_since_ > options_.patience_with_silent) children_.kill_silent(member);
    }
    return all;
  }

  // A new process that fails before it can join is made up for while the others wait.
  bool all_are_ready() const {
    for (size_t r = 0; r < members_.size(); r++) {
      const int member = members_[r];
      const bool is_new = !taking_part_.contains(member) && !missing_.contains(static_cast<int>(r));
      if (is_new && !generations_->is_ready(member)) return false;
    }
    return true;
  }

  void go_on() {
    if (!missing_.empty()) {
      const auto missing = std::exchange(missing_, {});
      std::vector<int> left;
      for (size_t r = 0; r < members_.size(); r++) {
        if (!missing.contains(static_cast<int>(r))) left.push_back(members_[r]);
      }
      const int wanted = left.empty() ? 0 : options_.fewer(static_cast<int>(left.size()));
      if (wanted > 0 && wanted <= static_cast<int>(left.size())) {
        members_.assign(left.begin(), left.begin() + wanted);
        spares_.insert(spares_.end(), left.begin() + wanted, left.end());
      } else {
        for (const int rank : missing) members_[rank] = start(rank, -1);
        return;  // they are waited for
      }
    }
    begin_generation();
  }

  void pass_signal_on() {
    const int signal = options_.signal ? options_.signal() : 0;
    if (signal == 0) return;
    signalled_ = true;
    for (int c = 0; c < children_.count(); c++) children_.signal(c, signal, false);
  }

  void give_up() {
    children_.watch(milliseconds(0));  // others may have ended before the one that was seen
    failed_at_ = Clock::now();
    if (generations_) generations_->end(false);
  }

  void signal_rest(int signal) {
    for (int c = 0; c < children_.count(); c++) children_.signal(c, signal, true);
  }

  // Returns the rank that has failed, -1 for none. One that a signal has ended goes before those that ended by
  // themselves: they may have lost it.
  int first_failed() {
    int first = -1;
    for (size_t r = 0; r < members_.size(); r++) {
      const auto& child = children_[members_[r]];
      if (!child.failed()) continue;
      if (first < 0 || (child.end.signal != 0 && children_[members_[first]].end.signal == 0))
        first = static_cast<int>(r);
    }
    return first;
  }

  void stop_others() {
    if (!stopping_ && options_.cancelled && options_.cancelled()) failed_at_ = Clock::now() - options_.patience;
    if (failed_at_ == Clock::time_point()) return;
    if (result_.first_failed < 0) result_.first_failed = first_failed();
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

  // They wait, and hold nothing that would be lost.
  void end_spares() {
    if (!generations_ || children_.all_ended()) return;
    if (failed_at_ == Clock::time_point()) generations_->end(true);
    const auto until = Clock::now() + milliseconds(1000);
    while (!children_.all_ended() && Clock::now() < until) children_.watch(milliseconds(5));
  }

  const LaunchOptions& options_;
  LaunchResult result_;
  std::unique_ptr<Generations> generations_;  // null: the first loss is the end
  int port_ = 0;
  const std::string run_ = std::to_string(std::random_device()());
  int in_vain_ = -1;                // the child that nobody is to replace
  int used_ = 0, used_before_ = 0;  // replacements, and those before this loss
  std::vector<int> rank_of_;        // by child; -1: a spare
  std::vector<int> members_;        // by rank, that child
  std::deque<int> spares_;          // children
  std::set<int> taking_part_;       // children in the generation that runs; empty before the first one
  std::set<int> missing_;           // ranks that nobody takes
  const Clock::time_point started_ = Clock::now();
  Clock::time_point failing_since_{}, failed_at_{};
  bool signalled_ = false, stopping_ = false;
  Children children_;  // last: its lines come here
};

}  // namespace

LaunchResult launch_local(const LaunchOptions& options) {
  if (options.num_processes < 1) {
    throw Error(ErrorKind::InvalidArgument, str(options.num_processes, " processes cannot be started"));
  }
  if (options.replacements < 0 || options.spares < 0) {
    throw Error(ErrorKind::InvalidArgument, str(options.replacements, " replacements, ", options.spares, " spares"), "",
                "0 or more of each");
  }
  return Launch(options).run();
}

}  // namespace plumb
