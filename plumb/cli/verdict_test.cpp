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

TEST_F(Verdicts, AreNotGivenWithoutAGradientAndTheTrainingGoesOn) {
  python(
      "import torch\n"
      "class Zero(torch.nn.Module):\n"
      "    def __init__(self):\n"
      "        super().__init__()\n"
      "        self.layer = torch.nn.Linear(8, 4)\n"
      "    def forward(self, x):\n"
      "        return (self.layer(x) * 0).sum()\n"
      "torch.export.save(torch.export.export(Zero(), (torch.randn(6, 8),)), 'zero.pt2')");
  const std::string data = "zero.pt2 --data rows.pt --loss output --threads 1 ";
  const Ended judged = plumb("verdict " + data + "--recipes bf16");
  EXPECT_EQ(judged.code, 1) << judged.out;
  EXPECT_NE(judged.err.find("there is no verdict, for no step could be measured: the full-precision gradient"),
            std::string::npos)
      << judged.err;
  const std::string train = "train " + data + "--steps 3 --json ";
  EXPECT_EQ(values(plumb(train + "--verdict bf16")), values(plumb(train)));
}

TEST_F(Verdicts, RefusesVerdictsThatCannotBeMeasured) {
  wrong("verdict lm.pt2 --data tokens.bin --recipes fp9", "--recipes: 'fp9' is no recipe");
  wrong("verdict lm.pt2 --data tokens.bin --recipes all,fp8", "--recipes: 'all' is no recipe");
  wrong("train lm.pt2 --data tokens.bin --verdict fp8 --stages 2", "--verdict: is measured on a model in one part");
  wrong("train lm.pt2 --data tokens.bin --formats fp9", "--formats: 'fp9' is no recipe");
  wrong("verdict lm.pt2 --data tokens.bin --warmup 1000000", "--warmup 1000000: so many steps are trained before");
  EXPECT_EQ(plumb("verdict lm.pt2").code, 2);
  EXPECT_EQ(plumb("verdict missing.pt2 --data tokens.bin").code, 1);
}

}  // namespace
