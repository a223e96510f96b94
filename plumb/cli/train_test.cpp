// Trainings of the command: options from files, layouts, printed lines.
#include <cmath>

#include "plumb/cli/training_command_testing.h"

namespace {

TEST_F(Train, PrintsEveryOptionOfItsHelpBackAndTakesItAsAFile) {
  const std::string more =
      "--microbatches 2 --clip 0.5 --rate cosine --warmup 2 --group '*.bias: lr=0.5x' --no-shuffle";
  const Ended run = plumb(base() + more);
  const std::string options = options_of(run);
  std::set<std::string> printed, helped;
  std::istringstream lines(options);
  for (std::string line; std::getline(lines, line);) {
    const size_t from = line.rfind("# ", 0) == 0 ? 2 : 0;
    printed.insert(line.substr(from, line.find_first_of(" :", from) - from));
  }
  std::istringstream help(plumb("train --help").out);
  for (std::string line; std::getline(help, line);) {
    if (line.rfind("  --", 0) == 0) helped.insert(line.substr(4, line.find_first_of(" =", 4) - 4));
  }
  helped.erase("config");
  helped.erase("no-shuffle");
  helped.erase("no-resume");
  helped.insert({"file", "shuffle", "resume"});
  EXPECT_EQ(helped, printed);
  std::ofstream(folder() / "run.toml") << options;
  const Ended again = plumb("train --config run.toml");
  EXPECT_EQ(values(again), values(run));
  EXPECT_EQ(options_of(again), options);
  EXPECT_EQ(values(plumb("train --config run.toml --steps 2")).size(), 2u) << "the command line goes before";
  std::ofstream(folder() / "wrong.toml") << "lr = 0.1\nstep = 5\n";
  const Ended wrong = plumb("train --config wrong.toml");
  EXPECT_EQ(wrong.code, 1);
  EXPECT_NE(wrong.err.find("wrong.toml:2: no option of a training is named 'step'"), std::string::npos) << wrong.err;
}

TEST_F(Train, RoundsWhatGoesFromStageToStage) {
  const std::string job = base() + "--microbatches 4 --stages 2 ";
  const auto plain = values(plumb(job)), wired = values(plumb(job + "--wire e4m3fn,e5m2"));
  EXPECT_NE(wired, plain);
  EXPECT_NEAR(wired.back(), plain.back(), 0.05 * plain.back());
  EXPECT_EQ(values(plumb(job + "--wire e4m3fn,e5m2 --schedule GPipe")), wired);
  EXPECT_EQ(values(plumb(job + "--wire e4m3fn,e5m2 --wire-exclude '*'")), plain);
  this->wrong(job + "--wire-exclude '*'", "--wire-exclude: every value goes from stage to stage as it is");
  const Ended unknown = plumb(job + "--wire e4m3fn,e5m2 --wire-exclude none");
  const size_t remedy = unknown.err.find("exclude some of ");
  ASSERT_NE(remedy, std::string::npos) << unknown.err;
  const std::string name = unknown.err.substr(remedy + 16, unknown.err.find_first_of(",\n", remedy) - remedy - 16);
  EXPECT_EQ(plumb(job + "--wire e4m3fn,e5m2 --wire-exclude " + name).code, 0) << name;
  const Ended wrong = plumb(job + "--wire mxfp8,e5m2");
  EXPECT_EQ(wrong.code, 2);
  EXPECT_NE(wrong.err.find("--wire: the wire format mxfp8 has no codes of one byte"), std::string::npos) << wrong.err;
}

TEST_F(Train, ClipsAndEvaluatesTheSameInEveryLayout) {
  const std::string job = base() + "--clip 0.3 --eval-data tokens.bin --eval-every 2 --eval-batches 3 ";
  const Ended one = plumb(job + "--microbatches 4"), two = plumb(job + "--microbatches 4 --stages 2");
  EXPECT_EQ(values(two), values(one));
  EXPECT_EQ(values(two, "norm"), values(one, "norm")) << "one order of summing";
  EXPECT_EQ(values(two, "eval_loss"), values(one, "eval_loss"));
  EXPECT_EQ(values(one, "eval_loss").size(), 3u);
  const Ended beside = plumb(job + "--microbatches 2 --data-parallel 2 --stages 2");
  const auto losses = values(beside), alone = values(one);
  ASSERT_EQ(losses.size(), alone.size());
  for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], alone[i], 1e-5);
  EXPECT_EQ(values(beside, "eval_targets"), values(one, "eval_targets"));
  // A tied weight counts once in the norm.
  const std::string tied = "train tied.pt2 --data tokens.bin --steps 3 --microbatches 2 --threads 1 --json ";
  const auto whole = values(plumb(tied), "norm"), cut = values(plumb(tied + "--stages 2 --at head"), "norm");
  ASSERT_EQ(whole.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(whole[i], cut[i], 1e-5);
}

TEST_F(Train, EvaluatesAndSamplesWhatItLearned) {
  const Ended run = plumb(base() + "--steps 60 --eval-data tokens.bin --microbatches 4 --save learned.pt2");
  const Json found = Json::parse(plumb("eval learned.pt2 --data tokens.bin --json").out);
  EXPECT_NEAR(found["loss"].get<double>(), values(run, "eval_loss").at(0), 1e-6);
  EXPECT_NEAR(found["perplexity"].get<double>(), std::exp(found["loss"].get<double>()), 1e-6);
  EXPECT_EQ(found["targets"], 3996);
  EXPECT_GT(Json::parse(plumb("eval lm.pt2 --data tokens.bin --json").out)["loss"], found["loss"]);
  // The data is of a to h alone.
  const Ended text = plumb("sample learned.pt2 --prompt abc --tokens 40 --top-k 8 --seed 1");
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(text.out.find_first_not_of("abcdefgh\n"), std::string::npos) << text.out;
  EXPECT_EQ(text.out.size(), 44u);
  EXPECT_EQ(text.out, plumb("sample learned.pt2 --prompt abc --tokens 40 --top-k 8 --seed 1").out);
  EXPECT_NE(text.out, plumb("sample learned.pt2 --prompt abc --tokens 40 --top-k 8 --seed 2").out);
  const std::string greedy = "sample learned.pt2 --prompt abc --tokens 20 --temperature 0 --json --seed ";
  EXPECT_EQ(plumb(greedy + "1").out, plumb(greedy + "2").out);
  python(
      "import json\n"
      "net = torch.export.load('learned.pt2').module()\n"
      "ids = list(b'abc')\n"
      "for _ in range(20):\n"
      "    x = torch.zeros(2, 12, dtype=torch.long); last = ids[-12:]; x[0, :len(last)] = torch.tensor(last)\n"
      "    ids.append(net(x)[0, len(last) - 1].argmax().item())\n"
      "import subprocess\n"
      "out = subprocess.check_output(['" PLUMB_COMMAND "'] + '" +
      greedy +
      "1'.split())\n"
      "assert json.loads(out)['tokens'] == ids[3:], (out, ids)");
  wrong("sample mlp.pt2", "sampling needs a model of one input");
  wrong("sample lm.pt2 --temperature -1", "--temperature");
  wrong("eval lm.pt2", "--data");
}

TEST_F(Train, RoundsByChanceInAnEvaluationByRowsAlone) {
  const std::string job =
      base() + "--formats e4m3fn-SR/e5m2-SR --eval-data tokens.bin --eval-batches 3 --eval-every 2 ";
  const Ended whole = plumb(job + "--microbatches 4 --gradient-groups 2");
  const auto wanted = values(whole, "eval_loss");
  ASSERT_EQ(wanted.size(), 3u);
  EXPECT_EQ(values(plumb(job + "--microbatches 2 --data-parallel 2"), "eval_loss"), wanted);
  fs::remove_all(folder() / "run");
  const std::string going_on = job + "--microbatches 4 --gradient-groups 2 --checkpoints run --checkpoint-every 2 ";
  EXPECT_NE(plumb(going_on + "--inject 'raise rank 0 at 0F1 of step 3'").code, 0);
  EXPECT_EQ(values(plumb(going_on), "eval_loss"), std::vector<double>(wanted.begin() + 1, wanted.end()));
}

TEST_F(Train, RoundsAValueThatSeveralStagesMultiplyAsOneProcessDoes) {
  python(
      "from torch import nn\n"
      "class Fan(nn.Module):\n"
      "    def __init__(self):\n"
      "        super().__init__()\n"
      "        self.table = nn.Embedding(256, 16)\n"
      "        self.norm = nn.LayerNorm(16)\n"
      "        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)\n"
      "        self.head = nn.Linear(16, 256, bias=False)\n"
      "        self.head.weight = self.table.weight\n"
      "    def forward(self, ids):\n"
      "        x = self.norm(self.table(ids))\n"
      "        return self.head(x + self.a(x).tanh() + self.b(x).tanh() + self.c(x).tanh())\n"
      "torch.export.save(torch.export.export(Fan(), (torch.randint(256, (2, 12)),)), 'fan.pt2')\n");
  for (const std::string format : {"mxfp8", "e4m3fn-SR/e5m2-SR"}) {
    const std::string job =
        "train fan.pt2 --data tokens.bin --steps 4 --lr 0.01 --microbatches 3 --threads 1 --json "
        "--transmit all --formats " +
        format;
    const Ended whole = plumb(job + " --save whole.pt2");
    const Ended other = plumb(job + " --stages 3 --at b,head --save other.pt2");
    EXPECT_EQ(values(whole), values(other)) << format;
    EXPECT_EQ(values(whole, "norm"), values(other, "norm")) << format;
    EXPECT_TRUE(read(folder() / "whole.pt2") == read(folder() / "other.pt2")) << format;
  }
  wrong("train fan.pt2 --data tokens.bin --csv one.csv --page one.csv",
        "--page one.csv: is the same file as that of --csv");
}

TEST_F(Train, CutsBatchesThatDoNotDivide) {
  const std::string job =
      "train dynamic.pt2 --data tokens.bin --steps 4 --batch 7 --microbatches 3 --threads 1 --seed 3 --json ";
  EXPECT_EQ(values(plumb(job + "--stages 2")), values(plumb(job)));
}

TEST_F(Checkpoints, LetARunGoOnInAnotherLayoutBitForBit) {
  const Ended whole = plumb(job() + "--save whole.pt2");
  const std::vector<double> wanted = values(whole);
  ASSERT_EQ(wanted.size(), 9u);
  const std::vector<std::pair<std::string, std::string>> layouts = {
      {"", "--stages 2"},
      {"--stages 2", ""},
      {"--stages 2 --schedule ZBVZeroBubble", "--stages 4 --schedule GPipe"},
      {"--stages 3 --schedule Interleaved1F1B", "--stages 2 --at layers.1"}};
  for (const auto& [first, second] : layouts) {
    SCOPED_TRACE(first + " then " + second);
    fs::remove_all(folder() / "run");
    // A fault ends the first one in the middle of step 6, after the checkpoint of step 4.
    const Ended stopped =
        plumb(job() + "--checkpoints run --checkpoint-every 4 --inject 'raise rank 0 at 0F1 of step 6' " + first);
    EXPECT_NE(stopped.code, 0);
    const Ended rest = plumb(job() + "--checkpoints run --checkpoint-every 4 --save other.pt2 " + second);
    EXPECT_EQ(values(rest, "resumed"), std::vector<double>{4}) << rest.out << rest.err << stopped.err;
    EXPECT_EQ(by_step({stopped, rest}), wanted);
    expect_same_weights();
  }
}

TEST_F(Checkpoints, LetARunGoOnWithAnotherNumberOfReplicasBitForBit) {
  const Ended whole = plumb(job() + "--microbatches 2 --data-parallel 2 --save whole.pt2");
  const std::vector<double> wanted = values(whole);
  const std::string parted = "--microbatches 2 --data-parallel 2 ", once = "--microbatches 4 ",
                    kept = "--gradient-groups 2 ";
  const std::vector<std::pair<std::string, std::string>> layouts = {
      {parted, once}, {once + kept, parted}, {parted + "--stages 2", once}};
  for (const auto& [first, second] : layouts) {
    SCOPED_TRACE(first + " then " + second);
    fs::remove_all(folder() / "run");
    const std::string saved = job() + "--checkpoints run --checkpoint-every 4 ";
    const Ended stopped = plumb(saved + "--inject 'raise rank 0 at 0F1 of step 6' " + first);
    EXPECT_NE(stopped.code, 0);
    const Ended rest = plumb(saved + "--save other.pt2 " + second);
    EXPECT_EQ(values(rest, "resumed"), std::vector<double>{4}) << rest.out << rest.err << stopped.err;
    EXPECT_EQ(by_step({stopped, rest}), wanted);
    expect_same_weights();
  }
  EXPECT_NE(values(plumb(job())), wanted) << "another order";
  const std::string more =
      job() + "--checkpoints run --steps 4 --rate constant --warmup 0 --microbatches 1 --data-parallel 4 ";
  fs::remove_all(folder() / "run");
  ASSERT_EQ(plumb(job() + "--checkpoints run --steps 2 --rate constant --warmup 0 " + parted).code, 0);
  wrong(more, "gradient_groups is 2, but there are 4 replicas");
  EXPECT_EQ(plumb(more + "--gradient-groups 4").code, 0) << "in another order, as it was told to";
  wrong("train lm.pt2 --data tokens.bin --gradient-groups 3", "gradient_groups is 3");
}

TEST_F(Checkpoints, OfTiedWeightsGoOnAtTheSameCuts) {
  const std::string tied = "train tied.pt2 --data tokens.bin --steps 6 --microbatches 2 --threads 1 --lr 0.01 --json ";
  for (const char* layout : {"", "--stages 2 --at head"}) {
    fs::remove_all(folder() / "run");
    const Ended whole = plumb(tied + layout);
    const std::string part = tied + "--checkpoints run --checkpoint-every 2 " + layout;
    const Ended stopped = plumb(part + " --inject 'raise rank 0 at 0F1 of step 4'"), rest = plumb(part);
    EXPECT_EQ(values(rest, "resumed"), std::vector<double>{2}) << rest.err;
    EXPECT_EQ(by_step({stopped, rest}), values(whole));
  }
  EXPECT_EQ(plumb(tied + "--checkpoints run --stages 2").code, 0) << "loads what another cut wrote";
}

// A run that loses ranks ends with the bits of the one that nothing befell.
TEST_F(Checkpoints, ALostRankLosesNothing) {
  const Ended whole = plumb(job() + "--save whole.pt2 --stages 3");
  const auto lose = [&](const std::string& more, size_t lost) {
    SCOPED_TRACE(more);
    fs::remove(folder() / "other.pt2");
    const Ended run = plumb(job() + "--stages 3 --save other.pt2 --max-restarts 2 " + more);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(values(run, "restart").size(), lost);
    EXPECT_EQ(by_step({run}), values(whole));
    expect_same_weights();
    return run;
  };
  const Ended two = lose("--inject 'kill rank 0 at 0B2 of step 4' --inject 'raise rank 2 at 2F1 of step 7'", 2);
  ASSERT_EQ(values(two, "resumed").size(), 2u);
  EXPECT_GE(values(two, "resumed")[0], 2) << "at most one whole step is computed again";
  EXPECT_GE(values(two, "resumed")[1], 5);
  EXPECT_NE(two.out.find("copies in memory"), std::string::npos);
  const Ended early = lose(
      // With less patience than a busy machine needs, ranks that are slow are taken for lost.
      "--spares 1 --patience 5 --inject 'kill rank 1 at 1F0 of step 1' --inject 'stop rank 2 at 2F0 of step 6'", 2);
  ASSERT_EQ(values(early, "resumed").size(), 2u);
  EXPECT_EQ(values(early, "resumed")[0], 0) << "no rank had sent its copy yet: it begins anew, and says so";
  lose("--recut --inject 'kill rank 1 at 1B3 of step 5'", 1);
  const Ended most = lose("--inject 'kill rank 1 at 1F2 of step 6' --inject 'kill rank 2 at 2F0 of step 6'", 2);
  ASSERT_FALSE(values(most, "resumed").empty());
  for (const double step : values(most, "resumed")) EXPECT_GE(step, 4) << "one that is left has the state of all";
}

TEST_F(Checkpoints, OfAWireThatRecutHasLeftOutLetTheSameCommandGoOn) {
  const std::string wired = base() +
                            "--stages 2 --microbatches 2 --wire e4m3fn,e5m2 --wire-exclude '*' "
                            "--checkpoints run --max-restarts 1 --recut ";
  const Ended one = plumb(wired + "--inject 'kill rank 1 at 1F1 of step 3'");
  EXPECT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(values(one, "restart").size(), 1u);
  const Ended two = plumb(wired + "--steps 7");
  EXPECT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(values(two, "step"), (std::vector<double>{6, 7}));
}

TEST_F(Checkpoints, ALostReplicaLosesNothing) {
  const std::string layout = job() + "--microbatches 2 --stages 2 --data-parallel 2 ";
  const Ended whole = plumb(layout + "--save whole.pt2");
  for (const char* more :
       {"--inject 'kill rank 3 at 1F1 of step 4'", "--recut --inject 'kill rank 0 at 0B0 of step 4'"}) {
    SCOPED_TRACE(more);
    const Ended run = plumb(layout + "--save other.pt2 --max-restarts 1 " + more);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_NE(run.out.find("copies in memory"), std::string::npos);
    EXPECT_EQ(by_step({run}), values(whole));
    expect_same_weights();
  }
}

TEST_F(Checkpoints, OneProcessIsStartedAgainFromTheLastOne) {
  const Ended whole = plumb(job() + "--save whole.pt2");
  const Ended run = plumb(job() +
                          "--save other.pt2 --max-restarts 1 --checkpoints run --checkpoint-every 2 "
                          "--inject 'kill rank 0 at 0F3 of step 6'");
  EXPECT_EQ(run.code, 0) << run.err;
  ASSERT_EQ(values(run, "resumed").size(), 1u);
  EXPECT_GE(values(run, "resumed")[0], 2) << "that of step 4 may not have been whole yet";
  EXPECT_EQ(by_step({run}), values(whole));
  expect_same_weights();
}

TEST_F(Checkpoints, WrongWaysToLoseARankAreNamed) {
  wrong("train lm.pt2 --data tokens.bin --max-restarts 1", "--max-restarts: there are no checkpoints");
  wrong("train lm.pt2 --data tokens.bin --stages 2 --spares 1", "--spares: no lost process is made up for");
  wrong("train lm.pt2 --data tokens.bin --max-restarts 1 --checkpoints run --data-parallel 3 --batch 6 --recut",
        "--recut: there is no layout on fewer processes");
  for (const char* layout : {"--stages 1 ", "--stages 1 --data-parallel 2 --batch 4 "})
    wrong(std::string("train lm.pt2 --data tokens.bin --max-restarts 1 --checkpoints run --recut --wire e4m3fn,e5m2 ") +
              layout,
          "--wire: with one stage nothing goes from stage to stage");
  wrong("train lm.pt2 --data tokens.bin --stages 2 --max-restarts 1 --copies-to-neighbor 5",
        "all processes are on this host");
  wrong("train lm.pt2 --data tokens.bin --patience 0", "--patience");
  wrong("train lm.pt2 --data tokens.bin --inject 'kill rank 0 at 0F7 of step 1'", "rank 0 has no action 0F7");
  wrong("train lm.pt2 --data tokens.bin --inject 'kill rank 1 at 0F0 of step 1'", "there are 1 ranks");
  wrong("train lm.pt2 --data tokens.bin --inject 'kill all'", "is no fault");
  // A failure that another process would meet, too, is not tried again.
  const Ended nan = plumb(
      "train lm.pt2 --data tokens.bin --steps 50 --optimizer sgd --lr 1e30 --threads 1 --stages 2 "
      "--max-restarts 3 --json");
  EXPECT_EQ(nan.code, 1);
  EXPECT_EQ(nan.out.find("restart"), nan.out.find("restarts")) << nan.out;
  EXPECT_NE(nan.err.find("first was the value of "), std::string::npos) << nan.err;
}

TEST_F(Checkpoints, RefuseAnotherRun) {
  ASSERT_EQ(plumb(job() + "--checkpoints run --steps 2 --rate constant").code, 0);
  const auto refuses = [&](const std::string& change, const std::string& says) {
    wrong(job() + "--checkpoints run --rate constant " + change, says);
  };
  refuses("--seed 4", "has [\"4\"]");
  refuses("--lr 0.02", "--lr");
  refuses("--microbatches 2", "rows of a step");
  std::ofstream(folder() / "more.bin") << read(folder() / "tokens.bin") << "abc";
  refuses("--data more.bin", "--data (names, sizes, types)");
  const std::string rounded = job() + "--formats recipe.toml --checkpoints run/rounded --rate constant ";
  std::ofstream(folder() / "recipe.toml") << "fwd = \"e4m3fn-RN\"\n";
  ASSERT_EQ(plumb(rounded).code, 0);
  std::ofstream(folder() / "recipe.toml") << "fwd = \"mxfp4-RN\"\n";
  wrong(rounded + "--steps 12", "is of a run with --formats (the recipe's text)");
  EXPECT_EQ(plumb(job() + "--checkpoints run --rate constant --no-resume --seed 4").code, 0);
  std::ofstream(folder() / "run" / "step-00000009" / "checkpoint.json") << "{}";
  const Ended damaged = plumb(job() + "--checkpoints run --rate constant --seed 4 --no-resume --warmup 0 --steps 1");
  EXPECT_EQ(damaged.code, 0) << damaged.err;
}

TEST_F(Checkpoints, AreWrittenOnSigtermAndTheRunGoesOn) {
  const char* stop =
      "import subprocess, signal, sys\n"
      "p = subprocess.Popen([COMMAND] + sys.argv[1].split(), stdout=subprocess.PIPE, text=True)\n"
      "lines = [p.stdout.readline() for _ in range(6)]\n"
      "p.send_signal(signal.SIGTERM)\n"
      "out = ''.join(lines) + p.communicate(timeout=300)[0]\n"
      "print(out, end='')\n"
      "sys.exit(p.returncode)\n";
  std::ofstream(folder() / "term.py") << "COMMAND = '" PLUMB_COMMAND "'\n" << stop;
  for (const char* layout : {"", " --stages 2"}) {
    fs::remove_all(folder() / "run");
    const std::string train = base() + "--steps 3000 --checkpoints run --eval-data tokens.bin" + layout;
    const Ended run = shell(PLUMB_TEST_PYTHON " term.py '" + train + "'");
    EXPECT_EQ(run.code, 75) << run.err;
    EXPECT_EQ(run.out.find("eval_loss"), std::string::npos) << "it is not due" << run.out;
    const Ended rest = plumb(base() + "--steps 3000 --checkpoints run --steps 5");
    EXPECT_EQ(rest.code, 0) << rest.err;
    EXPECT_NE(rest.out.find("\"resumed\""), std::string::npos) << rest.out;
  }
}

TEST_F(Train, NamesTheFirstNumberThatIsNoneInEveryLayout) {
  for (const char* layout : {"", "--stages 2"}) {
    fs::remove_all(folder() / "dumped");
    const Ended run = plumb(
        std::string("train lm.pt2 --data tokens.bin --steps 50 --optimizer sgd --lr 1e30 --dump dumped --threads 1 ") +
        layout);
    EXPECT_EQ(run.code, 1);
    EXPECT_NE(run.err.find("first was the value of "), std::string::npos) << run.err;
    EXPECT_NE(run.out.find("dumped the step to dumped"), std::string::npos) << run.out;
    EXPECT_EQ(plumb("run dumped/model.pt2 --input dumped/inputs.pt -o again.pt").code, 0);
    EXPECT_GT(Json::parse(read(folder() / "dumped" / "step.json"))["step"].get<int>(), 1);
  }
}

TEST_F(Train, SaysWhatAnotherLauncherLeavesToIt) {
  const std::string train = " " PLUMB_COMMAND " train lm.pt2 --data tokens.bin --steps 2 --threads 1 --stages 2 ";
  const auto ranks = [&](const std::string& more) {
    return shell("for r in 0 1; do RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + own_port() + train +
                 more + " & done; wait");
  };
  const Ended dry = ranks("--dry-run");
  EXPECT_NE(dry.out.find("A step of 2 rows takes about"), std::string::npos) << dry.out << dry.err;
  EXPECT_EQ(dry.err.find("what is learned"), std::string::npos) << dry.err;
  EXPECT_NE(ranks("--spares 1 --max-restarts 1").err.find("--spares: torchrun starts the processes"),
            std::string::npos);
  const Ended lasts = ranks("--max-restarts 1 --audit --audit-every 1");
  for (const char* said : {"--max-restarts: makes up for no lost rank, for torchrun starts the processes",
                           "only the state is audited, and no microbatch runs again"}) {
    const size_t at = lasts.err.find(said);
    EXPECT_NE(at, std::string::npos) << lasts.err;
    EXPECT_EQ(lasts.err.find(said, at + 1), std::string::npos) << lasts.err;
  }
  EXPECT_NE(lasts.out.find("step 2/2"), std::string::npos) << lasts.out;
}

}  // namespace
