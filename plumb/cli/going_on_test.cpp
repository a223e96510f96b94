// Runs that are stopped, lose ranks or are started again: none ends as another run, or as finished before it is.
#include <tuple>

#include "plumb/cli/training_command_testing.h"

namespace {

// Starts a training, waits for its third step, sends a signal to one rank's process and prints the exit code, then what
// the training printed.
const char* const kSignalToOne = R"py(
import os, signal, subprocess, sys
rank, number = sys.argv[2], getattr(signal, sys.argv[3])
p = subprocess.Popen([COMMAND] + sys.argv[1].split(), stdout=subprocess.PIPE, text=True)
lines = []
while not (lines and '"step":3,' in lines[-1]):
    lines.append(p.stdout.readline())
    assert lines[-1], "it ended"
children = open(f"/proc/{p.pid}/task/{p.pid}/children").read().split()
(one,) = [c for c in children if b"RANK=%s\0" % rank.encode() in b"\0" + open(f"/proc/{c}/environ", "rb").read()
          .replace(b"LOCAL_RANK", b"LOCAL")]
os.kill(int(one), number)
out = "".join(lines) + p.communicate(timeout=300)[0]
print(p.returncode, out, sep="\n", end="")
)py";

class GoingOn : public Checkpoints {
 protected:
  void SetUp() override {
    Checkpoints::SetUp();
    for (const char* name : {"h", "h.rank0", "h.rank1", "other.pt2"}) fs::remove(folder() / name);
    fs::remove_all(folder() / "tb");
    std::ofstream(folder() / "rules.toml") << "every = 1\n[[rule]]\n";
  }
  static std::string saved() { return job() + "--checkpoints run --checkpoint-every 2 "; }
};

TEST_F(GoingOn, ALostRankLosesNothingWhereTiedWeightsAreCutApartAndEvaluated) {
  const std::string tied =
      "train tied.pt2 --data tokens.bin --steps 6 --microbatches 2 --threads 1 --lr 0.01 --json "
      "--eval-data tokens.bin --eval-every 2 --eval-batches 2 ";
  // With --transmit the last stage has no tensor of its own; under VMin one rank has both copies.
  const std::string three = "--stages 3 --at layers.0,head ";
  for (const auto& [layout, faults] : std::map<std::string, std::vector<std::string>>{
           {three, {"kill rank 2 at 2F1 of step 4", "kill rank 0 at 0B1 of step 3"}},
           {three + "--transmit head.weight ", {"kill rank 2 at 2F1 of step 4", "kill rank 0 at 0B1 of step 3"}},
           {"--stages 2 --schedule VMin ", {"kill rank 0 at 3F1 of step 4"}}}) {
    SCOPED_TRACE(layout);
    const Ended whole = plumb(tied + layout + "--save whole.pt2");
    for (const std::string& fault : faults) {
      const Ended run = plumb(tied + layout + "--save other.pt2 --max-restarts 1 --inject '" + fault + "'");
      EXPECT_EQ(run.code, 0) << fault << "\n" << run.out << run.err;
      EXPECT_EQ(by_step({run}), values(whole));
      expect_same_weights();
    }
  }
}

TEST_F(GoingOn, APipelineThatIsLeftAloneEvaluatesTheSameRows) {
  const std::string run = job() +
                          "--data-parallel 2 --microbatches 2 --eval-data tokens.bin --eval-every 1 --eval-batches 1 "
                          "--checkpoints run ";
  const auto wanted = values(plumb(run), "eval_loss");
  fs::remove_all(folder() / "run");
  const Ended recut = plumb(run + "--max-restarts 1 --recut --inject 'kill rank 1 at 0F1 of step 3'");
  EXPECT_EQ(values(recut, "restart").size(), 1u) << recut.err;
  EXPECT_EQ(values(recut, "eval_loss"), wanted);
}

TEST_F(GoingOn, NeitherClockNorErrorsOfALostRankOutliveTheLoss) {
  const Ended run = plumb(
      "train lm.pt2 --data tokens.bin --steps 9 --stages 2 --data-parallel 2 --threads 1 --log-every 3 --save "
      "other.pt2 "
      "--max-restarts 1 --recut --inject 'kill rank 1 at 1F0 of step 3'");
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.out.find("goes on after step 2"), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("  -"), std::string::npos) << "negative seconds" << run.out;
  EXPECT_EQ(run.err.find("] plumb: rank"), std::string::npos) << "one was not needed any more" << run.err;
}

TEST_F(GoingOn, ARunOfWhichNothingKeepsTheWeightsEndsWithAnError) {
  for (const char* layout : {"", "--stages 2 "}) {
    const std::string run =
        std::string("trap '' XFSZ; ulimit -f 8; " PLUMB_COMMAND " ") + base() + layout + "--steps 3 ";
    const Ended lost = shell(run + "--checkpoints run");
    EXPECT_EQ(lost.code, 1) << layout << lost.err;
    EXPECT_NE(lost.err.find("the checkpoint of step 3 was not written, and nothing else keeps the weights"),
              std::string::npos)
        << layout << lost.err;
    fs::remove_all(folder() / "run");
  }
}

TEST_F(GoingOn, AStopSignalToOneRankStopsAllAndTheExitCodeSaysSo) {
  std::ofstream(folder() / "one.py") << "COMMAND = '" PLUMB_COMMAND "'\n" << kSignalToOne;
  const std::string train = base() + "--steps 3000 --stages 2 --checkpoints run";
  for (const auto& [rank, signal, code] : std::vector<std::tuple<int, std::string, std::string>>{
           {0, "SIGTERM", "75\n"}, {1, "SIGUSR1", "75\n"}, {0, "SIGINT", "-2\n"}}) {
    SCOPED_TRACE(signal);
    fs::remove_all(folder() / "run");
    const Ended run = shell(PLUMB_TEST_PYTHON " one.py '" + train + "' " + std::to_string(rank) + " " + signal);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(run.out.rfind(code, 0), 0u) << run.out.substr(0, 200) << run.err;
    EXPECT_NE(run.out.find("\"interrupted\""), std::string::npos) << run.out;
    const Ended rest = plumb(base() + "--steps 3000 --checkpoints run --steps 5");
    EXPECT_EQ(rest.code, 0) << rest.err;
    EXPECT_NE(rest.out.find("\"resumed\""), std::string::npos) << rest.out;
  }
}

TEST_F(GoingOn, ARunWithAHistoryThatDiesBeforeItsFirstCheckpointBeginsAgain) {
  for (const char* layout : {"", "--stages 2 "}) {
    SCOPED_TRACE(layout);
    SetUp();
    const std::string run = job() + "--record rules.toml --history h --tensorboard tb --checkpoints run " + layout;
    EXPECT_NE(plumb(run + "--inject 'raise rank 0 at 0F1 of step 4'").code, 0);
    EXPECT_NE(plumb(run + "--inject 'raise rank 0 at 0F1 of step 3'").code, 0);
    const Ended done = plumb(run);
    EXPECT_EQ(values(done).size(), 9u) << done.err;
    EXPECT_EQ(values(done, "resumed"), std::vector<double>{0});
    const Json table = Json::parse(plumb("track --history h --json").out);
    EXPECT_GT(table.size(), 5u);
  }
}

TEST_F(GoingOn, TheHistoryAndTheEventsOfAnotherRunAreLeftAlone) {
  const std::string recorded = job() + "--steps 3 --rate constant --warmup 0 --record rules.toml ";
  ASSERT_EQ(plumb(recorded + "--history h --tensorboard tb").code, 0);
  const std::string before = read(folder() / "h");
  for (int start = 0; start < 2; ++start) {
    const Ended history = plumb(recorded + "--history h --checkpoints run");
    EXPECT_EQ(history.code, 1);
    EXPECT_NE(history.err.find("is there already\n  try: name another file, move that one away"), std::string::npos)
        << history.err;
    const Ended events = plumb(recorded + "--history h2 --tensorboard tb --checkpoints run");
    EXPECT_EQ(events.code, 1);
    EXPECT_NE(events.err.find("--tensorboard tb: holds the events of another run"), std::string::npos) << events.err;
    fs::remove(folder() / "h2");
  }
  EXPECT_TRUE(read(folder() / "h") == before);
}

TEST_F(GoingOn, ANewRunBesideOlderCheckpointsGoesOnWithItsOwn) {
  const Ended whole = plumb(saved() + "--save whole.pt2");
  EXPECT_EQ(values(whole).size(), 9u);
  const Ended killed = plumb(saved() + "--no-resume --inject 'raise rank 0 at 0F1 of step 6'");
  EXPECT_NE(killed.code, 0);
  const Ended rest = plumb(saved() + "--save other.pt2");
  EXPECT_EQ(values(rest, "resumed"), std::vector<double>{4}) << "that of step 9 is the other run's" << rest.out;
  EXPECT_NE(rest.out.find("step-00000009 is not used: it is of another run"), std::string::npos) << rest.out;
  EXPECT_EQ(by_step({killed, rest}), by_step({whole}));
  expect_same_weights();
}

TEST_F(GoingOn, ANewRunThatLosesAllItsRanksGoesOnWithItsOwnCheckpoints) {
  ASSERT_EQ(plumb(saved()).code, 0);
  const Ended run = plumb(saved() + "--no-resume --max-restarts 1 --inject 'kill rank 0 at 0F3 of step 8'");
  EXPECT_EQ(run.code, 0) << run.err;
  ASSERT_EQ(values(run, "resumed").size(), 1u);
  EXPECT_GE(values(run, "resumed")[0], 4) << "that of step 6 may not have been whole yet";
  EXPECT_LT(values(run, "resumed")[0], 8) << "that of step 9 is the other run's";
}

TEST_F(GoingOn, ACheckpointOfAnotherModelIsRefusedByName) {
  ASSERT_EQ(plumb(base() + "--checkpoints run").code, 0);
  python("exec(open('write.py').read().replace('gelu', 'relu').replace('lm.pt2', 'relu.pt2'))");
  const Ended other =
      plumb("train relu.pt2 --data tokens.bin --steps 7 --lr 0.01 --threads 1 --seed 3 --checkpoints run");
  EXPECT_EQ(other.code, 2);
  EXPECT_NE(other.err.find("is of another model"), std::string::npos) << other.err;
  EXPECT_EQ(values(plumb(base() + "--steps 7 --checkpoints run")).size(), 2u);
}

TEST_F(GoingOn, WhatNothingSavesIsSaidAtTheStart) {
  const std::string lost = "what is learned will be lost";
  EXPECT_NE(plumb(base() + "--steps 1 --csv run.csv").err.find(lost), std::string::npos);
  EXPECT_NE(plumb(base() + "--steps 1 --stages 2").err.find(lost), std::string::npos);
  for (const char* kept : {"--save other.pt2", "--checkpoints run"})
    EXPECT_EQ(plumb(base() + "--steps 1 " + kept).err.find(lost), std::string::npos);
}

TEST_F(GoingOn, ProcessesThatCannotBeMetOrStartedAreNamed) {
  wrong("train lm.pt2 --data tokens.bin --data-parallel 1000000", "--data-parallel");
  wrong("train lm.pt2 --data tokens.bin --data-parallel 60000", "are 60000 processes on this machine");
  const Ended orphan =
      shell("PLUMB_PROCESS=0 RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 timeout 60 " PLUMB_COMMAND
            " train lm.pt2 --data tokens.bin --stages 2 --steps 1 --patience 3");
  EXPECT_EQ(orphan.code, 1) << orphan.err;
  EXPECT_NE(orphan.err.find("cannot reach the store of its launcher"), std::string::npos) << orphan.err;
}

TEST_F(GoingOn, ARankThatCannotStartIsToldToThoseThatWaitForIt) {
  const std::string ranks = "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + own_port() +
                            " timeout 45 " PLUMB_COMMAND " train lm.pt2 --stages 2 --steps 1 --save other.pt2 --data ";
  for (const auto& [wrong, says] :
       std::map<std::string, std::string>{{"missing.bin", "missing.bin: cannot be opened"},
                                          {"tokens.bin --config missing.toml", "missing.toml: cannot be opened"},
                                          {"tokens.bin --lr x", "--lr: x is no positive"}}) {
    for (const int failed : {0, 1}) {
      SCOPED_TRACE(wrong + " on rank " + std::to_string(failed));
      const std::string other = "RANK=" + std::to_string(1 - failed) + " " + ranks + "tokens.bin";
      const Ended both =
          shell("(" + other + "; echo code $?) & RANK=" + std::to_string(failed) + " " + ranks + wrong + "; wait");
      EXPECT_NE(both.out.find("code 1"), std::string::npos) << both.out;
      EXPECT_NE(both.err.find("rank " + std::to_string(1 - failed) + " of 2 cannot start: rank " +
                              std::to_string(failed) + " failed: " + says),
                std::string::npos)
          << both.err;
    }
  }
}

TEST_F(GoingOn, WhatIsPrintedIsWhatWasAskedFor) {
  const std::string train = "train lm.pt2 --data tokens.bin --steps 5 --lr 0.01 --threads 1 --group '*.bias: lr=0.5x' ";
  for (const char* layout : {"", "--stages 2 "}) {
    SCOPED_TRACE(layout);
    const Ended quiet = plumb(train + layout + "--quiet --save other.pt2");
    EXPECT_EQ(quiet.code, 0);
    EXPECT_EQ(quiet.out + quiet.err, "");
    const Ended lines = plumb(train + layout + "--log-every 2 --save other.pt2");
    for (int step = 1; step <= 5; ++step) {
      const bool printed = lines.out.find("step " + std::to_string(step) + "/5  loss ") != std::string::npos;
      EXPECT_EQ(printed, step % 2 == 0 || step == 5) << lines.out;
    }
    EXPECT_NE(lines.out.find("  lr 0.01  "), std::string::npos) << lines.out;
    EXPECT_EQ(lines.out.find("e+0"), std::string::npos) << lines.out;
    EXPECT_EQ(lines.err.find("lr = "), std::string::npos) << lines.err;
    const Ended printed = plumb(train + layout + "--options - --save other.pt2");
    EXPECT_NE(printed.err.find("\n# group *.bias: "), std::string::npos) << printed.err;
    std::ofstream(folder() / "printed.toml") << printed.err;
    ASSERT_EQ(plumb(train + layout + "--options kept.toml --save other.pt2").code, 0);
    for (const char* file : {"printed.toml", "kept.toml"}) {
      const Ended again = plumb("train --json --config " + std::string(file));
      EXPECT_EQ(values(again).size(), 5u) << again.err;
      EXPECT_NE(options_of(again).find("*.bias: lr=0.5x"), std::string::npos);
    }
  }
}

TEST_F(GoingOn, AnotherKindOfMachineIsNamedOnce) {
  ASSERT_EQ(plumb(base() + "--steps 2 --checkpoints run").code, 0);
  const Ended same = plumb(base() + "--steps 3 --checkpoints run");
  EXPECT_EQ(same.err.find("determinism"), std::string::npos) << same.err;
  const std::string other = "ATEN_CPU_CAPABILITY=default ";
  const Ended resumed = shell(other + PLUMB_COMMAND " " + base() + "--steps 4 --checkpoints run");
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_NE(resumed.out.find("step-00000003 was written on "), std::string::npos) << resumed.out;
  EXPECT_NE(resumed.out.find("ATEN_CPU_CAPABILITY=default"), std::string::npos) << resumed.out;
  // Two ranks by hand, with one environment each.
  const std::string rank = "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + own_port() + " " PLUMB_COMMAND " " +
                           base() + "--steps 2 --stages 2 ";
  const Ended both = shell(other + "RANK=1 " + rank + " & RANK=0 " + rank + "; wait");
  EXPECT_NE(both.out.find("rank 1 computes on another kind of machine than rank 0 does"), std::string::npos)
      << both.out << both.err;
}

}  // namespace
