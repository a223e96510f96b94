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
  wrong("plan --ranks 4 --microbatches 8", "--costs");
  wrong("plan --ranks 4 --microbatches 8 --costs 1,1", "--costs");
  wrong(costs + "--memory-limit much", "--memory-limit");
  wrong(costs + "--schedules nope", "nope");
}

TEST_F(Planning, PlanMeasuresTheStepThatItDraws) {
  const std::string costs =
      "plan --ranks 2 --microbatches 3 --costs 1,1,1 --schedules 1F1B,ZBVZeroBubble --take ZBVZeroBubble ";
  const Json table = Json::parse(plumb(costs + "--json").out);
  for (const auto& row : table["schedules"]) {
    const double step = row["step"], work = 9;  // of each rank: three parts of three microbatches
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
      "check=True)\n"
      "lines = [l for l in os.read(read, 65536).decode().splitlines() if l.startswith('rank ')]\n"
      "assert len(lines) == 2 and all(40 < len(l) <= 60 for l in lines), lines");
}

}  // namespace
