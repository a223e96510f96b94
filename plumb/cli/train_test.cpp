// Trainings of the command: options from files, layouts, what is told.
#include <cmath>

#include "plumb/cli/command_for_test.h"

namespace {

class Train : public Command {
 protected:
  // The values of a key over the events of a run with --json.
  static std::vector<double> values(const Ended& run, const char* key = "loss") {
    EXPECT_EQ(run.code, 0) << run.err;
    std::vector<double> found;
    std::istringstream lines(run.out);
    for (std::string line; std::getline(lines, line);) {
      const Json event = Json::parse(line);
      if (event.contains(key)) found.push_back(event[key].get<double>());
    }
    return found;
  }
  static std::string options_of(const Ended& run) {
    return Json::parse(run.out.substr(0, run.out.find('\n')))["options"].get<std::string>();
  }
  static std::string base() {
    return "train lm.pt2 --data tokens.bin --steps 5 --lr 0.01 --threads 1 --seed 3 --json ";
  }
};

TEST_F(Train, PrintsEveryOptionOfItsHelpBackAndTakesItAsAFile) {
  const std::string more = "--microbatches 2 --clip 0.5 --rate cosine --warmup 2 --group '*.bias: lr=0.5x' --no-shuffle";
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
  helped.insert({"file", "shuffle"});
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
  EXPECT_EQ(values(beside, "eval_targets")[0], 2 * 12 * 2 * 3) << "two microbatches a call";
  // A tied weight counts once in the norm.
  const std::string tied = "train tied.pt2 --data tokens.bin --steps 3 --microbatches 2 --threads 1 --json ";
  const auto whole = values(plumb(tied), "norm"), cut = values(plumb(tied + "--stages 2 --at head"), "norm");
  ASSERT_EQ(whole.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(whole[i], cut[i], 1e-5);
}

TEST_F(Train, CutsBatchesThatDoNotDivide) {
  const std::string job =
      "train dynamic.pt2 --data tokens.bin --steps 4 --batch 7 --microbatches 3 --threads 1 --seed 3 --json ";
  EXPECT_EQ(values(plumb(job + "--stages 2")), values(plumb(job)));
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

}  // namespace
