// plumb verdict, and trainings in the recipe that it writes.
#include "plumb/cli/training_command_testing.h"

namespace {

class Verdicts : public Train {};

TEST_F(Verdicts, TakesTheRecipeOfAVerdict) {
  const std::string judge = "verdict lm.pt2 --data tokens.bin --steps 2 --threads 1 --seed 3 ";
  const Ended run = plumb(judge + "--recipes fp32,mxfp8 --html v.html -o v.toml");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.out.rfind("The fewest bits that will do: mxfp8: ok", 0), 0u) << run.out;
  EXPECT_NE(read(folder() / "v.html").find("Number formats of lm.pt2"), std::string::npos);
  const Json json = Json::parse(plumb(judge + "--recipes fp32,mxfp8 --json").out);
  EXPECT_EQ(json["recipes"][0]["score"], 0);
  EXPECT_EQ(json["recipes"][1]["verdict"], "ok");
  EXPECT_EQ(json["file"].get<std::string>(), read(folder() / "v.toml"));
  const auto plain = values(plumb(base())), rounded = values(plumb(base() + "--formats v.toml"));
  EXPECT_NE(rounded, plain);
  EXPECT_EQ(values(plumb(base() + "--formats mxfp8")), rounded);
  EXPECT_EQ(values(plumb(base() + "--formats mxfp8 --microbatches 4 --stages 2")),
            values(plumb(base() + "--formats mxfp8 --microbatches 4")));
  EXPECT_EQ(plumb("opt lm.pt2 --pass=simulate_format,recipe=v.toml -o rounded.pt2").code, 0);
}

TEST_F(Verdicts, SaysItsVerdictAndStaysTheSameTraining) {
  EXPECT_EQ(values(plumb(base() + "--verdict fp8,mxfp4")), values(plumb(base())));
  const Ended run = plumb("train lm.pt2 --data tokens.bin --steps 5 --verdict all --verdict-steps 1");
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.out.find("verdict at step 1: "), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("blocks128"), std::string::npos) << run.out;
}

TEST_F(Verdicts, RefusesVerdictsThatCannotBeMeasured) {
  wrong("verdict lm.pt2 --data tokens.bin --recipes fp9", "--recipes: 'fp9' is no recipe");
  wrong("verdict lm.pt2 --data tokens.bin --recipes all,fp8", "--recipes: 'all' is no recipe");
  wrong("train lm.pt2 --data tokens.bin --verdict fp8 --stages 2", "--verdict: is measured on a model in one part");
  wrong("train lm.pt2 --data tokens.bin --formats fp9", "--formats: 'fp9' is no recipe");
  EXPECT_EQ(plumb("verdict lm.pt2").code, 2);
  EXPECT_EQ(plumb("verdict missing.pt2 --data tokens.bin").code, 1);
}

}  // namespace
