// plumb plan: the table, the time line and what is said where no schedule can be had.
#include "plumb/cli/command_testing.h"

namespace {

using Planning = Command;

TEST_F(Planning, PlansForGivenCostsWithinAMemoryLimit) {
  const std::string costs = "plan --ranks 4 --microbatches 8 --costs 1,1,1 ";
  const Ended text = plumb(costs);
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("1F1B"), std::string::npos);
  const Json table = Json::parse(plumb(costs + "--memory-limit 2.5 --json").out);
  EXPECT_LE(table["schedules"][0]["memory"][0].get<double>(), 2.5);
  for (const auto& row : table["schedules"]) {
    if (row["schedule"] == "1F1B") EXPECT_FALSE(row["fits"].get<bool>());
  }
  EXPECT_EQ(plumb(costs + "--memory-limit 0.1").code, 1);
  EXPECT_EQ(Json::parse(plumb(costs + "--take GPipe --json").out)["taken"], "GPipe");
  wrong(costs + "--take Interleaved", "--take: no schedule named 'Interleaved' was compared");
  wrong("plan --ranks 4 --microbatches 8", "--costs");
  wrong("plan --ranks 4 --microbatches 8 --costs 1,1", "--costs");
  wrong(costs + "--memory-limit much", "--memory-limit");
  wrong(costs + "--schedules nope", "nope");
  wrong("plan --ranks 2 --costs 1e308,1e308,1e308", "--costs");
}

TEST_F(Planning, PlanMeasuresTheStepThatItDraws) {
  const std::string costs =
      "plan --ranks 2 --microbatches 3 --costs 1,1,1 --schedules 1F1B,ZBVZeroBubble --take ZBVZeroBubble ";
  const Json table = Json::parse(plumb(costs + "--json").out);
  for (const auto& row : table["schedules"]) {
    const double step = row["step"], work = 9;  // work of each rank: three parts of three microbatches
    EXPECT_NEAR(row["bubble"].get<double>(), 1 - work / step, 1e-9) << row;
    EXPECT_NEAR(row["zero_bubble_rate"].get<double>(), 1 - work / row["apart"].get<double>(), 1e-9) << row;
  }
  const Ended text = plumb(costs);
  EXPECT_NE(text.out.find("bubble: the ranks' idle share of it"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("F forward, I input half of a backward"), std::string::npos) << text.out;
}

TEST_F(Planning, PlanSaysWhyNoScheduleCanBeHad) {
  const Ended many = plumb("plan mlp.pt2 --ranks 40 --microbatches 2 --estimate");
  EXPECT_EQ(many.code, 1);
  EXPECT_NE(many.err.find("no schedule can be had: "), std::string::npos) << many.err;
  EXPECT_EQ(many.err.find("memory limit"), std::string::npos) << many.err;
  const Ended little = plumb("plan lm.pt2 --ranks 2 --microbatches 2 --estimate --memory-limit 1kB");
  EXPECT_EQ(little.code, 1);
  EXPECT_NE(little.out.find("the parameters alone take more memory than the limit"), std::string::npos) << little.out;
  EXPECT_EQ((little.out + little.err).find("-1"), std::string::npos) << little.out;
}

TEST_F(Planning, DrawsNoWiderThanTheTerminal) {
  python(
      "import fcntl, os, pty, struct, subprocess, termios\n"
      "read, write = pty.openpty()\n"
      "fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 60, 0, 0))\n"
      "subprocess.run(['" PLUMB_COMMAND
      "', 'plan', '--ranks', '2', '--microbatches', '2', '--costs', '1,1,1', '--schedules', '1F1B'], stdout=write, "
      "check=True)\n" +
      std::string(kReadTerminal) +
      "lines = [l for l in said.splitlines() if l.startswith('rank ')]\n"
      "assert len(lines) == 2 and all(40 < len(l) <= 60 for l in lines), lines");
}

// Losses of a run with --json.
std::vector<double> losses(const Ended& run) {
  std::vector<double> found;
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) {
    const Json event = Json::parse(line);
    if (event.contains("loss")) found.push_back(event["loss"].get<double>());
  }
  return found;
}

constexpr const char* kPlan = "plan lm.pt2 --ranks 2 --microbatches 4 ";

TEST_F(Planning, WritesAPlanThatATrainingFollowsWithTheBitsOfOneProcess) {
  const std::string train = "train lm.pt2 --data tokens.bin --steps 3 --lr 0.01 --threads 1 --seed 3 --json ";
  const Ended whole = plumb(train + "--microbatches 4 --save whole.pt2");
  ASSERT_EQ(whole.code, 0) << whole.err;
  for (const std::string take : {"ZBVZeroBubble", "Joint"}) {
    const Ended planned =
        plumb(kPlan + ("-o best.json --html best.html --schedules 1F1B,ZBVZeroBubble,Joint --take " + take));
    ASSERT_EQ(planned.code, 0) << planned.err;
    EXPECT_NE(planned.out.find("costs are processor time"), std::string::npos) << planned.out;
    EXPECT_NE(read(folder() / "best.html").find("Plan of lm.pt2"), std::string::npos);
    const Ended run = plumb(train + "--plan best.json --save other.pt2");
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(losses(whole), losses(run)) << take;
    EXPECT_TRUE(read(folder() / "whole.pt2") == read(folder() / "other.pt2")) << take;
  }
  EXPECT_EQ(plumb(train + "--plan best.json --stages 2 --dry-run").code, 0) << "what the plan says, said twice";
  wrong(train + "--plan best.json --stages 4", "--stages");
  wrong(train + "--plan best.json --schedule GPipe", "--plan");
  const Ended other = plumb("train mlp.pt2 --data rows.pt --targets targets.pt --loss mse --plan best.json");
  EXPECT_EQ(other.code, 1) << "a plan of another model";
  EXPECT_NE(other.err.find("or a plan of this one: plumb plan -o"), std::string::npos) << other.err;
  shell("echo '{}' > bad.json");
  const Ended bad = plumb(train + "--plan bad.json");
  EXPECT_EQ(bad.code, 1);
  EXPECT_NE(bad.err.find("is no plan of plumb"), std::string::npos) << bad.err;
}

TEST_F(Planning, TransmitsATiedWeightAndSoKeepsTheBitsOfOneProcess) {
  const std::string train = "train tied.pt2 --data tokens.bin --steps 3 --lr 0.01 --threads 1 --json --save ";
  const Ended whole = plumb(train + "whole.pt2 --microbatches 4");
  const Ended planned =
      plumb("plan tied.pt2 --ranks 2 --microbatches 4 --schedules 1F1B --estimate --transmit all -o best.json");
  ASSERT_EQ(planned.code, 0) << planned.err;
  const Ended run = plumb(train + "other.pt2 --plan best.json");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(losses(whole), losses(run));
  EXPECT_TRUE(read(folder() / "whole.pt2") == read(folder() / "other.pt2"));
  wrong("plan tied.pt2 --ranks 2 --transmit no.such", "--transmit no.such");
  wrong("train tied.pt2 --data tokens.bin --plan best.json --transmit head.weight", "--transmit head.weight");
  wrong("train tied.pt2 --data tokens.bin --plan best.json --verdict fp8", "without --plan");
  wrong("plan --costs 1,1,1 --ranks 2 --transmit all", "--transmit");
}

TEST_F(Planning, PlansWithTheLossAndTheLinkThatItIsTold) {
  const auto step = [](const std::string& options) {
    const Ended ended = plumb(kPlan + ("--estimate --schedules 1F1B --json " + options));
    EXPECT_EQ(ended.code, 0) << ended.err;
    return Json::parse(ended.out)["schedules"][0]["step"].get<double>();
  };
  EXPECT_GT(step("--loss cross_entropy"), step("--loss none"));
  EXPECT_EQ(step("--loss cross_entropy"), step("")) << "planned with a loss unless none is asked for";
  EXPECT_GT(step("--link 0.001,1000"), step("--link 100,1"));
  wrong(kPlan + std::string("--link 0"), "--link");
  wrong(kPlan + std::string("--link inf,1"), "--link");
  wrong(kPlan + std::string("--link 1,inf"), "--link");
  wrong(kPlan + std::string("--link 1e-300,1"), "--link");
  wrong(kPlan + std::string("--machine 1e-308,1,1"), "--machine");
  wrong(kPlan + std::string("--threads 100000"), "--threads");
  wrong(kPlan + std::string("-o both.json --html both.json"), "--html both.json: is the same file as that of -o");
  wrong(kPlan + std::string("--link 1,2,3"), "--link");
  wrong(kPlan + std::string("--loss output"), "--loss");
  wrong("plan --costs 1,1,1 --ranks 2 -o best.json", "-o");
}

}  // namespace
