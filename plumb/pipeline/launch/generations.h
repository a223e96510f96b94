// The groups that a launcher makes of its processes, one after the other: when one is lost, the others keep their
// processes, leave the group that failed, and wait for the next generation, in which another has the lost one's rank.
//
// The launcher serves the store, so it outlives every rank. Keys of a generation's group have a prefix of their own.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/pipeline/launch/environment.h"

namespace plumb {

struct LauncherStore;  // c10d's, which this header does not need

// The launcher's side.
class Generations {
 public:
  // Serves the store for `processes` processes at a free port of loopback. Throws Error(ExecutionFailed) if there are
  // too few descriptors for that, Error(Communication) if it fails otherwise.
  explicit Generations(int processes);
  Generations(const Generations&) = delete;

  int port() const { return port_; }
  // Makes the next generation of these processes (their numbers as launched), by rank.
  void begin(const std::vector<int>& processes);
  // Ends the sequence: waiting processes end. `well`: the last generation did what there was to be done.
  void end(bool well);
  // Returns whether someone has left the generation that runs, and whether this process has.
  bool anyone_left() const;
  bool has_left(int process) const;
  // Returns whether it waits for its first one.
  bool is_ready(int process) const;
  // Returns the process whose error others in its place would meet, too; -1: none.
  int in_vain() const;

 private:
  std::shared_ptr<LauncherStore> store_;
  int port_ = 0, number_ = -1;
};

// A process's side.
class Membership {
 public:
  // Returns nullopt if this process's launcher makes no generations. Throws Error(Communication) if its store does not
  // respond in time.
  static std::optional<Membership> from_environment(std::chrono::milliseconds timeout = std::chrono::seconds(60));

  // Waits for the next generation that has a place for this process; nullopt if there will be none.
  std::optional<RankEnvironment> next();
  // Returns whether next() has found no generation because the last one ended well.
  bool ended_well() const { return ended_well_; }
  // Returns the generation of the last next(); 0 for the first one.
  int generation() const { return number_; }
  // Leaves the group of its generation: this process has no connection of it any more.
  void leave();
  // Tells the launcher that this process ends by an error that another in its place would meet, too.
  void fail_for_good();
  // Returns true for the first process of the run that asks, in any generation.
  bool is_first_to(const std::string& what);

 private:
  Membership() = default;
  std::shared_ptr<LauncherStore> store_;
  RankEnvironment env_;
  int process_ = 0, number_ = -1;
  bool ended_well_ = false;
};

}  // namespace plumb
