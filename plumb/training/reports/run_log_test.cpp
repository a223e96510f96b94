// Files that a training writes besides its weights while it runs.
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>

#include "plumb/core/input_file.h"
#include "plumb/recording/history.h"
#include "plumb/training/job.h"
#include "plumb/training/training_testing.h"

namespace plumb {
namespace {

using namespace testing_training;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class TrainingLog : public Training {
 public:
  std::vector<double> losses(const TrainOptions& o) const { return run(o, lm()).losses(); }
};

TEST_F(TrainingLog, TellsTokensAndMemoryOfEachStep) {
  const Told told = run(options, lm());
  EXPECT_EQ(told.of("tokens"), std::vector<double>(6, 2 * 7));
  for (const double memory : told.of("memory")) EXPECT_GT(memory, 1e7);
  EXPECT_EQ(run(rows(), mlp()).of("tokens"), std::vector<double>()) << "rows of floats are no tokens";
}

TEST_F(TrainingLog, ThePageHasTheScalesThatAreRecorded) {
  TrainOptions o = options;
  o.page = path("run.html");
  losses(o);
  EXPECT_THAT(read_file(o.page), AllOf(HasSubstr("tokens a second"), Not(HasSubstr("Scales"))));
  std::ofstream(folder / "rules.toml") << "every = 2\n[[rule]]\n";
  o.record = path("rules.toml");
  o.history = path("run.history");
  EXPECT_EQ(losses(o), losses(options));
  EXPECT_THAT(read_file(o.page), HasSubstr("Scales"));
}

TEST_F(TrainingLog, AFullDiskEndsThePageAndNotTheTraining) {
  TrainOptions o = options;
  o.page = "/dev/full";
  const Told told = run(o, lm());
  EXPECT_EQ(told.losses(), losses(options));
  EXPECT_THAT(nlohmann::json(told.events).dump(), HasSubstr("--page ends here: /dev/full"));
}

TEST_F(TrainingLog, AFullDiskForAVerdictOrATimeLineIsReported) {
  for (const char* name : {"verdict-page", "verdict-recipe", "timeline"}) {
    TrainOptions o = options;
    o.verdict = {"fp8"};
    const std::string file = path(std::string(name) + ".svg");
    set_field(o, train_field(name), {file});
    fs::create_symlink("/dev/full", file);
    const Told told = run(o, lm());
    EXPECT_EQ(told.losses(), losses(options));
    const std::string events = nlohmann::json(told.events).dump();
    EXPECT_THAT(events, HasSubstr(std::string("--") + name + " ends here: " + file));
    EXPECT_THAT(events, HasSubstr("\"verdict\":"));
  }
}

TEST_F(TrainingLog, AFullDiskEndsHistoryAndHashesAndNotTheTraining) {
  TrainOptions o = options;
  std::ofstream(folder / "rules.toml") << "every = 1\n[[rule]]\n";
  o.record = path("rules.toml");
  o.history = path("run.history");
  o.hashes = path("run.hashes");
  const auto before = ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  std::string problems;
  std::vector<double> losses;
  const auto take = [&](const TrainEvent& e) {
    if (const auto* problem = std::get_if<event::LogProblem>(&e)) problems += problem->problem + "\n";
    const auto* done = std::get_if<event::Stepped>(&e);
    if (!done) return;
    losses.push_back(done->loss);
    const rlimit full{std::min(fs::file_size(o.history), fs::file_size(o.hashes)), limit.rlim_max};
    if (done->step == 2) setrlimit(RLIMIT_FSIZE, &full);
  };
  Trainer(o, {.event = take}, {lm(), nullptr}).run();
  setrlimit(RLIMIT_FSIZE, &limit);
  ::signal(SIGXFSZ, before);
  EXPECT_EQ(losses, this->losses(options));
  EXPECT_THAT(problems, AllOf(HasSubstr("--hashes ends here: cannot write the history"), HasSubstr("run.hashes")));
  EXPECT_THAT(problems, HasSubstr("--history ends here: cannot write the history"));
  EXPECT_EQ(read_history(o.hashes).last_step(), 2);
}

TEST_F(TrainingLog, ARunThatGoesOnLeavesTheHistoriesOfAnotherRunsRanks) {
  TrainOptions o = options;
  o.hashes = path("run.hashes");
  for (const char* name : {"run.hashes.rank0", "run.hashes.rank1", "run.hashes"}) {
    HistoryWriter writer(path(name), false);
    for (int64_t step = 1; step <= 3; ++step) writer.scalars({step, {{"loss", 1}}});
  }
  EXPECT_EQ(hashes_file(o, 0, 1), o.hashes);
  EXPECT_EQ(read_history(path("run.hashes.rank1")).last_step(), 3);
}

TEST_F(TrainingLog, TableAndPageGoOnWithTheRun) {
  TrainOptions o = options;
  o.csv = path("run.csv");
  o.page = path("run.html");
  o.checkpoints = path("checkpoints");
  o.tensorboard = path("events");
  o.steps = 3;
  losses(o);
  o.steps = 6;
  losses(o);
  std::string events;
  for (const auto& entry : fs::directory_iterator(folder / "events")) events += read_file(entry.path());
  EXPECT_THAT(events, HasSubstr("\x10\x04\x3a\x02\x08\x01"))
      << "what starts at step 4 takes the place of what there was";
  const std::string table = read_file(o.csv);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 7) << table;
  for (int step = 1; step <= 6; ++step) EXPECT_THAT(table, HasSubstr("\n" + std::to_string(step) + ","));
  EXPECT_THAT(read_file(o.page), AllOf(HasSubstr("6 of 6"), HasSubstr("loss")));
  std::ofstream(folder / "run.csv") << "step,loss\n1,2\n";
  o.steps = 7;
  EXPECT_THAT(message_of([&] { losses(o); }), HasSubstr("run.csv: has other columns"));
  EXPECT_EQ(read_file(o.csv), "step,loss\n1,2\n");
}

TEST_F(TrainingLog, ATableThatIsThereAlreadyIsRefusedByARunThatBegins) {
  TrainOptions o = options;
  o.csv = path("run.csv");
  losses(o);
  const std::string table = read_file(o.csv);
  EXPECT_THAT(message_of([&] { losses(o); }), HasSubstr("run.csv: is there already, the table of another run"));
  EXPECT_EQ(read_file(o.csv), table);
  std::ofstream(o.csv) << "my notes";
  EXPECT_THAT(message_of([&] { losses(o); }), HasSubstr("run.csv: is there already, and is no table of a training"));
  EXPECT_EQ(read_file(o.csv), "my notes");
  // Without a step there is nothing to lose: of a run that ended before its first one, or from mktemp.
  for (const std::string& begin : {table.substr(0, table.find('\n') + 1), std::string()}) {
    std::ofstream(o.csv) << begin;
    losses(o);
    EXPECT_THAT(read_file(o.csv), HasSubstr("\n6,"));
  }
}

}  // namespace
}  // namespace plumb
