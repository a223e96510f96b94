// Processes that go on in another generation when one of them is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/pipeline/launch/generations.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/transport/transport.h"

namespace plumb {
namespace {

using namespace testing_processes;
using testing::ElementsAre;

// Each generation meets five times until it is the last one; rank FAULTY of the first one fails by KIND.
Role lasting_role("lasting", [] {
  auto me = Membership::from_environment();
  const std::string kind = setting("KIND");
  if (kind == "twice" && std::getenv("PLUMB_PROCESS") == std::string("3")) return 5;  // the first new one
  if (kind == "early" && std::getenv("PLUMB_PROCESS") == std::string("1")) ::raise(SIGKILL);
  if (kind == "never" && std::getenv("PLUMB_PROCESS") == std::string("1"))
    std::this_thread::sleep_for(std::chrono::hours(1));
  while (const auto place = me->next()) {
    try {
      GlooOptions options;
      options.timeout = std::chrono::milliseconds(number_setting("TIMEOUT", 30000));
      ProcessGroup world = make_gloo_group(*place, options);
      world.set_timeout(std::chrono::milliseconds(number_setting("TIMEOUT", 30000)));
      for (int step = 0; step < 5; ++step) {
        const bool faulty = world.rank() == number_setting("FAULTY", 1) && step == 3;
        if (faulty && me->is_first_to("fail")) {
          if (kind == "kill" || kind == "twice" || kind == "silent") ::raise(SIGKILL);
          if (kind == "stop") ::raise(SIGSTOP);
          if (kind == "exit") return 3;
          if (kind == "good") me->fail_for_good();
          if (kind == "good") return 4;
        }
        const auto said = Transport(world).exchange(std::to_string(100 * step + world.rank()));
        for (int rank = 0; rank < world.size(); ++rank) {
          if (said.at(static_cast<size_t>(rank)) != std::to_string(100 * step + rank)) return 7;
        }
      }
      std::string ranks;
      for (const auto& text : Transport(world).exchange(std::to_string(world.rank()))) ranks += text;
      report("met", std::to_string(me->generation()) + ":" + ranks);
      return 0;
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::Communication) throw;
      std::fprintf(stderr, "%s\n", e.what());
    }
    if (kind == "silent" && place->rank == 2 && me->is_first_to("hang"))
      std::this_thread::sleep_for(std::chrono::hours(1));
    me->leave();
  }
  report("ended", "without a place");
  return setting("KIND") == "none" ? 0 : 1;
});

struct Lasting {
  LaunchResult result;
  std::vector<std::string> met, lost;
  std::string errors;
};

Lasting run_lasting(const std::string& kind, int faulty, const std::function<void(LaunchOptions&)>& change = {}) {
  Lasting run;
  LaunchOptions options;
  options.num_processes = 3;
  options.replacements = 1;
  options.patience = std::chrono::seconds(30);
  options.environment = {{"PLUMB_TEST_ROLE", "lasting"},
                         {"PLUMB_TEST_KIND", kind},
                         {"PLUMB_TEST_FAULTY", std::to_string(faulty)},
                         {"OMP_NUM_THREADS", "1"}};
  options.on_line = [&](int, bool is_stderr, const std::string& line) {
    if (is_stderr) run.errors += line + "\n";
    if (line.rfind("met=", 0) == 0) run.met.push_back(line.substr(4));
  };
  options.on_lost = [&](int rank, const ProcessEnd&, const std::string& instead) {
    run.lost.push_back(std::to_string(rank) + ": " + instead);
  };
  if (change) change(options);
  run.result = launch_local(options);
  return run;
}

TEST(Generations, GoOnWithANewProcessInTheLostOnesPlace) {
  for (const auto& [kind, faulty] : {std::pair{"kill", 0}, {"kill", 2}, {"exit", 1}}) {
    SCOPED_TRACE(kind);
    const Lasting run = run_lasting(kind, faulty);
    EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
    EXPECT_THAT(run.met, ElementsAre("1:012", "1:012", "1:012"));
    EXPECT_THAT(run.lost, ElementsAre(std::to_string(faulty) + ": a new process takes its place"));
  }
}

TEST(Generations, TakeASpareThatWaits) {
  const Lasting run = run_lasting("kill", 1, [](LaunchOptions& o) { o.spares = 2; });
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("1:012", "1:012", "1:012"));
  EXPECT_THAT(run.lost, ElementsAre("1: a spare process takes its place"));
}

TEST(Generations, GoOnWithFewer) {
  const Lasting run = run_lasting("kill", 0, [](LaunchOptions& o) { o.fewer = [](int left) { return left; }; });
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("1:01", "1:01"));
  const Lasting one = run_lasting("kill", 0, [](LaunchOptions& o) { o.fewer = [](int) { return 1; }; });
  EXPECT_EQ(one.result.exit_code(), 0) << "the other one waits and is not needed" << one.errors;
}

TEST(Generations, WaitForANewProcessThatFailsBeforeItJoins) {
  const Lasting run = run_lasting("twice", 1, [](LaunchOptions& o) { o.replacements = 2; });
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("1:012", "1:012", "1:012"));
  EXPECT_EQ(run.lost.size(), 2u);
}

TEST(Generations, BeginWithANewProcessForOneThatIsLostBeforeItJoins) {
  const Lasting run = run_lasting("early", -1);
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("0:012", "0:012", "0:012")) << "nobody has waited for it in a group";
  EXPECT_THAT(run.lost, ElementsAre("1: a new process takes its place"));
}

TEST(Generations, DoNotWaitForEverForAProcessThatDoesNotJoin) {
  const Lasting run = run_lasting("never", -1, [](LaunchOptions& o) {
    o.patience_with_silent = std::chrono::seconds(6);
    o.environment.emplace_back("PLUMB_TEST_TIMEOUT", "6000");
  });
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("1:012", "1:012", "1:012"));
  EXPECT_THAT(run.lost, ElementsAre("1: a new process takes its place"));
}

TEST(Generations, KillAProcessThatIsStopped) {
  const Lasting run =
      run_lasting("stop", 1, [](LaunchOptions& o) { o.patience_with_stopped = std::chrono::milliseconds(500); });
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("1:012", "1:012", "1:012"));
}

TEST(Generations, MakeUpForAProcessThatHangsAsAPartOfTheLossBefore) {
  const Lasting run =
      run_lasting("silent", 1, [](LaunchOptions& o) { o.patience_with_silent = std::chrono::seconds(10); });
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("1:012", "1:012", "1:012"));
  EXPECT_EQ(run.lost.size(), 2u);
}

TEST(Generations, EndWhenTheyMayNotGoOn) {
  const Lasting none = run_lasting("good", 2, [](LaunchOptions& o) { o.replacements = 5; });
  EXPECT_EQ(none.result.first_failed, 2) << "another in its place would fail, too";
  EXPECT_EQ(none.result.exit_code(), 4);
  EXPECT_TRUE(none.lost.empty());
  for (const ProcessEnd& end : none.result.processes) EXPECT_FALSE(end.stopped_by_launcher) << "each ended by itself";
}

TEST(Generations, LeaveAHealthyRunAlone) {
  const Lasting run = run_lasting("none", 1, [](LaunchOptions& o) { o.spares = 1; });
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors;
  EXPECT_THAT(run.met, ElementsAre("0:012", "0:012", "0:012"));
  EXPECT_TRUE(run.lost.empty());
}

}  // namespace
}  // namespace plumb
