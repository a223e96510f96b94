// Behavior of every rank when one fails: it ends by itself, in time, and says which rank, which action and why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include "plumb/core/error.h"
#include "plumb/pipeline/models_testing.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/pipeline/transport/transport.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using namespace testing_processes;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

// Two good steps' worth of pipeline, of which rank FAULTY leaves the second one in the middle, by KIND.
Role fault_role("fault", [] {
  const std::string kind = setting("KIND");
  auto group = test_group(std::chrono::seconds(60));
  const bool faulty = group.rank() == number_setting("FAULTY", 1);
  auto model = test_model("mlp", group.size());
  auto stage = model.make_stage(group.rank());
  int forwards = 0;
  auto forward = [&](const Tensors& in) -> Tensors {
    if (faulty && ++forwards == 7) {  // 1F1B, the second step's third microbatch
      if (kind == "exit") ::_exit(3);
      if (kind == "kill") ::raise(SIGKILL);
      if (kind == "stop") ::raise(SIGSTOP);
      if (kind == "raise") throw std::runtime_error("no more cheese");
      if (kind == "nan") return {stage->forward(in)[0] / 0.0 * 0.0};
      if (kind == "shape") return {stage->forward(in)[0].narrow(1, 0, 3)};
    }
    return stage->forward(in);
  };
  const bool other_schedule = faulty && kind == "schedule";
  std::map<int, std::shared_ptr<StageFunction>> stages{
      {group.rank(), std::make_shared<LambdaStage>(forward, stage->parameters())}};
  if (faulty && kind == "missing") stages.clear();
  PipelineOptions options;
  options.loss = model.loss;
  options.check_numerics = kind == "nan";
  options.scale_grads = !faulty || kind != "scale";
  Pipeline pipeline(model.layout, make_schedule(other_schedule ? "GPipe" : "1F1B", group.size(), 4), stages, group,
                    options);
  for (int step = 0; step < 3; step++) {
    // Not in the first step, which makes what the others find.
    if (step == 1) group.set_timeout(std::chrono::milliseconds(number_setting("TIMEOUT", 60000)));
    auto [inputs, targets] = model.batch(step);
    pipeline.step(inputs, targets);
  }
  report("finished", "yes");
  return 0;
});

Run run_fault(const std::string& kind, int ranks, int faulty, int timeout = 60000, bool apart = false) {
  std::map<std::string, std::string> settings{
      {"KIND", kind}, {"FAULTY", std::to_string(faulty)}, {"TIMEOUT", std::to_string(timeout)}};
  if (apart) settings["APART"] = "1";
  // Shorter than the time-out: who waits for that instead of noticing a fault is ended by the launcher. A stopped rank
  // is ended by nobody else.
  return run_role("fault", ranks, settings, std::chrono::seconds(kind == "stop" ? 10 : 30));
}

// Ranks that share memory, and ranks as on hosts of their own.
class LostRanks : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Faults, LostRanks, testing::Bool(),
                         [](const auto& info) { return info.param ? "OnOtherHosts" : "OnOneHost"; });

// Every other rank ended by itself with an error.
void expect_others_ended(const Run& run, int faulty) {
  for (int r = 0; r < static_cast<int>(run.result.processes.size()); r++) {
    if (r == faulty) continue;
    EXPECT_EQ(run.result.processes[r].exit_code, 1) << "rank " << r << ": " << run.errors[r];
    EXPECT_FALSE(run.result.processes[r].stopped_by_launcher) << "rank " << r;
    EXPECT_THAT(run.errors[r], HasSubstr("rank " + std::to_string(faulty)));
    EXPECT_EQ(run.reports[r].count("finished"), 0u);
  }
}

TEST_P(LostRanks, WhoRaiseAreNamedWithTheirText) {
  auto run = run_fault("raise", 3, 2, 60000, GetParam());
  expect_others_ended(run, 2);
  EXPECT_THAT(run.errors[2], HasSubstr("rank 2 at 2F2: no more cheese"));
  EXPECT_THAT(run.errors[1], HasSubstr("rank 2 failed: rank 2 at 2F2: no more cheese"));
  EXPECT_THAT(run.errors[1], HasSubstr("waiting for 2SEND_B"));
  EXPECT_THAT(run.errors[0], HasSubstr("rank 2 failed: rank 2 at 2F2: no more cheese")) << "told on by rank 1";
}

TEST(Faults, NameTheRankWhoseValuesAreNotNumbers) {
  auto run = run_fault("nan", 2, 0);
  expect_others_ended(run, 0);
  EXPECT_THAT(run.errors[0], HasSubstr("rank 0 at 0F2: output 0 of stage 0, microbatch 2: entry [0, 0] is"));
  EXPECT_THAT(run.errors[1], HasSubstr("rank 0 failed: rank 0 at 0F2: output 0 of stage 0, microbatch 2"));
}

TEST(Faults, NameTheRankThatCannotUseWhatItGets) {
  auto run = run_fault("shape", 2, 0);
  expect_others_ended(run, 1);
  EXPECT_THAT(run.errors[1], HasSubstr("rank 1 at 1F2: "));
  EXPECT_THAT(run.errors[0], HasSubstr("rank 1 failed: rank 1 at 1F2: "));
}

TEST_P(LostRanks, WhoExitAreNamed) {
  auto run = run_fault("exit", 3, 1, 60000, GetParam());
  expect_others_ended(run, 1);
  EXPECT_EQ(run.result.first_failed, 1);
  EXPECT_EQ(run.result.exit_code(), 3);
  EXPECT_THAT(run.errors[0], ContainsRegex("rank 1( failed)?: it is gone"));
  EXPECT_THAT(run.errors[2], ContainsRegex("rank 1( failed)?: it is gone"));
}

TEST_P(LostRanks, WhoAreKilledAreNamed) {
  auto run = run_fault("kill", 2, 0, 60000, GetParam());  // rank 0 serves the store, too
  expect_others_ended(run, 0);
  EXPECT_EQ(run.result.processes[0].signal, SIGKILL);
  EXPECT_THAT(run.errors[1], HasSubstr("rank 0: it is gone"));
  EXPECT_THAT(run.errors[1], Not(HasSubstr("frame #"))) << "the store that went is not asked";
  EXPECT_LT(run.errors[1].size(), 500u);
}

TEST_P(LostRanks, WhoAreStoppedAreNamed) {
  auto run = run_fault("stop", 2, 1, 3000, GetParam());
  expect_others_ended(run, 1);
  EXPECT_TRUE(run.result.processes[1].stopped_by_launcher);
  EXPECT_THAT(run.errors[0], HasSubstr("rank 1: no answer within 3000 ms"));
}

TEST_P(LostRanks, RankZeroIsNamedThatIsStoppedWithItsStore) {
  auto run = run_fault("stop", 3, 0, 3000, GetParam());
  expect_others_ended(run, 0);
  EXPECT_THAT(run.errors[1], HasSubstr("rank 0: no answer within 3000 ms"));
}

Role meet_role("meet", [] {
  if (setting("STOPS") == std::getenv("RANK")) ::raise(SIGSTOP);
  test_group(std::chrono::seconds(3));
  report("met", "yes");
  return 0;
});

TEST(Faults, NameRankZeroThatWasStoppedBeforeTheRanksMet) {
  auto run = run_role("meet", 2, {{"STOPS", "0"}}, std::chrono::seconds(1));
  EXPECT_THAT(run.errors[1], HasSubstr("for rank 0"));
  EXPECT_EQ(run.result.first_failed, 1);
}

// Rank 1 may open `SPARE` more files than it has.
Role few_files_role("few_files", [] {
  meet();
  if (std::getenv("RANK") == std::string("1")) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const int next = ::dup(0);
    ::close(next);
    limit.rlim_cur = static_cast<rlim_t>(next + number_setting("SPARE", 0));
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  auto group = test_group(std::chrono::seconds(3));
  Transport(group).exchange("here");
  report("met", "yes");
  return 0;
});

TEST(Faults, NameTheRankThatMayOpenNoMoreFiles) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP()
      << "The undefined-behavior sanitizer opens files to look at an object, and reports one that it cannot look at.";
#endif
  int failed = 0;
  for (int spare : {0, 2, 4, 6, 8, 40}) {
    auto run = run_role("few_files", 2, {{"SPARE", std::to_string(spare)}});
    if (run.result.exit_code() == 0) continue;
    failed++;
    EXPECT_EQ(run.result.processes[1].signal, 0) << spare << run.errors[1];
    EXPECT_EQ(run.result.processes[1].exit_code, 1) << spare;
    EXPECT_THAT(run.errors[1], HasSubstr("rank 1")) << spare;
    EXPECT_THAT(run.errors[1], HasSubstr("Too many open files")) << spare;
    EXPECT_LT(spare, 40);
    EXPECT_EQ(run.result.processes[0].exit_code, 1) << spare << run.errors[0];
  }
  EXPECT_GT(failed, 2);
}

TEST(Faults, ALauncherSaysThatARankIsStoppedAndEndsIt) {
  LaunchOptions options;
  options.num_processes = 1;
  options.environment = {{"PLUMB_TEST_ROLE", "meet"}, {"PLUMB_TEST_STOPS", "0"}};
  options.patience_with_stopped = std::chrono::milliseconds(500);
  std::string said;
  options.on_line = [&](int, bool, const std::string& line) { said += line; };
  const LaunchResult result = launch_local(options);
  EXPECT_TRUE(result.processes[0].was_stopped);
  EXPECT_EQ(result.first_failed, 0);
  EXPECT_THAT(said, HasSubstr("stopped by a signal"));
}

TEST(Faults, FindDifferentSchedulesAndScalesBeforeTheFirstStep) {
  for (const char* fault : {"schedule", "scale"}) {
    auto run = run_fault(fault, 2, 1);
    EXPECT_THAT(run.errors[0], HasSubstr("different layouts or schedules")) << fault;
    EXPECT_THAT(run.errors[1], HasSubstr("different layouts or schedules")) << fault;
  }
}

TEST(Faults, TellTheOthersThatARankCannotStart) {
  auto run = run_fault("missing", 2, 1);
  EXPECT_THAT(run.errors[1], HasSubstr("rank 1 runs stage 1 in the schedule '1F1B' and was not given it"));
  EXPECT_THAT(run.errors[0], HasSubstr("rank 0 cannot start: rank 1 failed: rank 1 runs stage 1"));
  expect_others_ended(run, 1);
}

TEST(Faults, LeaveAHealthyRunAlone) {
  auto run = run_fault("none", 2, 1);
  EXPECT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1];
  for (auto& r : run.reports) EXPECT_EQ(r.count("finished"), 1u);
}

}  // namespace
}  // namespace plumb
