// plumb diff, hashes and replays of trainings, and audits of ranks that are wrong.
#include "plumb/cli/training_command_testing.h"

namespace {

class Diffs : public Checkpoints {
 protected:
  void SetUp() override {
    Checkpoints::SetUp();
    for (const auto& entry : fs::directory_iterator(folder()))
      if (entry.path().filename().string().starts_with("h_")) fs::remove(entry.path());
  }
  static std::string four() { return base() + "--microbatches 4 --gradient-groups 2 "; }
  static Json diff(const std::string& arguments) {
    const Ended run = plumb("diff --json " + arguments);
    EXPECT_EQ(run.code, 0) << run.err;
    return run.code == 0 ? Json::parse(run.out) : Json();
  }
};

TEST_F(Diffs, EveryLayoutHasTheSameHashes) {
  ASSERT_EQ(plumb(four() + "--replay 3 --hashes h_one").code, 0);
  for (const char* layout : {"--stages 2", "--stages 2 --schedule ZBVZeroBubble", "--data-parallel 2 --microbatches 2",
                             "--stages 2 --data-parallel 2 --microbatches 2 --schedule Interleaved1F1B"}) {
    SCOPED_TRACE(layout);
    SetUp();
    ASSERT_EQ(plumb(four() + "--replay 3 --hashes h_one").code, 0);
    ASSERT_EQ(plumb(four() + "--replay 3 --hashes h_other " + layout).code, 0);
    const Json found = diff("h_one h_other");
    EXPECT_TRUE(found["equal"].get<bool>()) << found["conclusion"];
    EXPECT_GT(found["compared"].get<int>(), 100);
  }
}

TEST_F(Diffs, TrainingsThatPartAreNamedAndTheirStepIsDoneAgainWhole) {
  const std::string one = base() + "--microbatches 2 --checkpoint-every 2 --keep-last 0 ",
                    other = one + "--weight-decay 0.2 ";
  fs::remove_all(folder() / "run2");
  ASSERT_EQ(plumb(one + "--hashes h_a --checkpoints run").code, 0);
  ASSERT_EQ(plumb(other + "--hashes h_b --checkpoints run2").code, 0);
  const Json found = diff("h_a h_b");
  EXPECT_EQ(found["first"]["step"], 1) << found["conclusion"];
  EXPECT_EQ(found["first"]["kind"], "after_step");
  EXPECT_TRUE(diff("h_a h_a")["equal"].get<bool>());
  // Done again from the checkpoint of step 2, at another layout; nothing else is written.
  const Ended again = plumb(one + "--checkpoints run --replay 4 --hashes h_a4 --stages 2 --save never.pt2");
  EXPECT_EQ(values(again, "resumed"), std::vector<double>{2}) << again.err;
  EXPECT_FALSE(fs::exists(folder() / "never.pt2"));
  EXPECT_TRUE(diff("h_a h_a4")["equal"].get<bool>());
  ASSERT_EQ(plumb(other + "--checkpoints run2 --replay 4 --hashes h_b4").code, 0);
  const Json whole = diff("h_a4 h_b4");
  EXPECT_EQ(whole["first"]["step"], 3);
  const Ended said = plumb("diff h_a h_b --replays h_a4 h_b4 --html diff.html");
  EXPECT_NE(said.out.find("programs, options or kernels"), std::string::npos) << said.out << said.err;
  EXPECT_NE(read(folder() / "diff.html").find("The first difference"), std::string::npos);
  const Json checkpoints = diff("run run2");
  EXPECT_FALSE(checkpoints["equal"].get<bool>());
}

TEST_F(Diffs, ARankThatComputesWrongIsNamedWithItsMicrobatch) {
  ASSERT_EQ(plumb(four() + "--replay 3 --hashes h_one").code, 0);
  ASSERT_EQ(plumb(four() + "--replay 3 --hashes h_other --stages 2 --inject 'flip rank 1 at 1F2 of step 3'").code, 0);
  const Json first = diff("h_one h_other")["first"];
  EXPECT_EQ(first["step"], 3);
  EXPECT_EQ(first["rank"], 1) << first;
  EXPECT_EQ(first["microbatch"], 2) << first;
}

TEST_F(Diffs, FilesAreComparedOnAnInput) {
  ASSERT_EQ(plumb(base() + "--save other.pt2").code, 0);
  const Json found = diff("lm.pt2 other.pt2 --input ids.pt");
  EXPECT_FALSE(found["equal"].get<bool>());
  EXPECT_TRUE(found["first"].contains("ulps"));
  EXPECT_TRUE(diff("lm.pt2 lm.pt2 --input ids.pt")["equal"].get<bool>());
}

TEST_F(Diffs, FilesThatWriteIntoInputsOrHaveOutputsWithoutASumAreComparedWithThemselves) {
  python(R"py(
from torch import nn
class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x, cache):
        cache[0].copy_(self.fc(x)[0].detach())
        return self.fc(x) + cache
class Complex(Cache):
    def forward(self, x):
        return torch.fft.rfft(self.fc(x)), self.fc(x)
class Nothing(nn.Module):
    def forward(self, ids):
        return ids * 0.5
class Bytes(Cache):
    def forward(self, x):
        return self.fc(x).to(torch.float8_e5m2)
x = torch.randn(4, 4)
for name, model, args in [("cache", Cache(), (x, torch.zeros(4, 4))), ("complex", Complex(), (x,)),
                          ("nothing", Nothing(), (torch.arange(3),)), ("bytes", Bytes(), (x,))]:
    torch.save(args, f"{name}.pt")
    torch.export.save(torch.export.export(model, args), f"{name}.pt2")
)py");
  for (const std::string name : {"cache", "complex", "nothing", "bytes"}) {
    SCOPED_TRACE(name);
    const Json found = diff(name + ".pt2 " + name + ".pt2 --input " + name + ".pt");
    EXPECT_TRUE(found["equal"].get<bool>()) << found["conclusion"];
  }
  for (const char* name : {"complex", "bytes"}) {
    const std::string file = name;
    EXPECT_EQ(plumb("run " + file + ".pt2 --backward --input " + file + ".pt -o got.pt").code, 0);
    python("assert torch.load('got.pt')['gradients']['fc.bias'].gt(0).all()");
  }
}

TEST_F(Diffs, RefusesWhatCannotBeCompared) {
  wrong("diff lm.pt2 .", "are of two kinds");
  wrong("diff . lm.pt2", "are of two kinds");
  wrong("diff h_none h_none --tolerance nan", "--tolerance");
  wrong("diff h_none h_none --tolerance 0.1", "--tolerance, --device: only for two .pt2 files");
  wrong("diff lm.pt2 lm.pt2 --input ids.pt --device nowhere", "--device nowhere");
  wrong(base() + "--replay 3", "--replay: nothing says where to");
  wrong(base() + "--replay 6 --hashes h_x", "--replay 6: more than --steps 5");
  wrong(base() + "--stages 2 --audit-every 3", "--audit-every: nothing is audited");
  wrong(base() + "--stages 2 --audit", "--audit: nobody makes up for a rank that is wrong");
  EXPECT_EQ(plumb("diff h_none h_missing").code, 1);
  for (const char* other : {"lm.pt2", "."}) {
    const Ended missing = plumb(std::string("diff h_missing ") + other);
    EXPECT_NE(missing.err.find("h_missing: cannot be opened"), std::string::npos) << missing.err;
  }
}

class Audits : public Checkpoints {};

TEST_F(Audits, ARankWhoseMemoryRotsIsNamedAndTheRunEndsUndisturbed) {
  const std::string run = job() + "--stages 2 ";
  const Ended whole = plumb(run + "--save whole.pt2");
  for (const char* fault :
       {"rot rank 1 at 1F2 of step 4", "rot_state rank 0 at 0B1 of step 6", "rot_gradient rank 1 at 1B2 of step 5"}) {
    SCOPED_TRACE(fault);
    const Ended audited =
        plumb(run + "--audit --max-restarts 1 --save other.pt2 --inject '" + std::string(fault) + "'");
    EXPECT_EQ(audited.code, 0) << audited.err;
    EXPECT_EQ(values(audited, "audit").size(), 1u) << audited.out;
    EXPECT_EQ(by_step({audited}), values(whole));
    expect_same_weights();
  }
}

TEST_F(Audits, AnAuditChangesNoBitOfARun) {
  // The second one sends a value that its own stage uses, too.
  for (const char* layout :
       {"--stages 2 ", "--stages 2 --at layers.0.up ", "--data-parallel 2 --microbatches 2 --gradient-groups 2 ",
        "--stages 2 --schedule ZBH1 --accumulate 2 "}) {
    SCOPED_TRACE(layout);
    const Ended audited = plumb(job() + layout + "--audit --audit-every 1 --max-restarts 1");
    EXPECT_EQ(values(audited), values(plumb(job() + layout)));
    EXPECT_TRUE(values(audited, "audit").empty()) << audited.out;
  }
}

TEST_F(Audits, AndRecordersKeepTheOrderOfAGradientsSumOverStages) {
  python(
      "from torch import nn\n"
      "class Fan(nn.Module):\n"
      "    def __init__(self):\n"
      "        super().__init__()\n"
      "        self.table, self.norm, self.head = nn.Embedding(256, 16), nn.LayerNorm(16), nn.Linear(16, 256)\n"
      "        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)\n"
      "        self.register_buffer('mean', torch.zeros(16))\n"
      "    def forward(self, ids):\n"
      "        x = self.norm(self.table(ids))\n"
      "        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)\n"
      "        x = x - self.mean\n"
      "        return self.head(x + self.a(x).tanh() + self.b(x).tanh() + self.c(x).tanh())\n"
      "torch.export.save(torch.export.export(Fan(), (torch.randint(256, (2, 12)),)), 'fan.pt2')\n");
  const std::string fan = "train fan.pt2 --data tokens.bin --steps 9 --microbatches 4 --threads 1 --json ",
                    run = fan + "--stages 3 --at a,c ";
  const auto wanted = values(plumb(run), "norm");
  std::ofstream(folder() / "all.toml") << "every = 1\n[[rule]]\nstatistics = [\"std\"]\n";
  for (const std::string watched :
       {"--audit --audit-every 1 --max-restarts 1", "--record all.toml --history of.history",
        "--audit --audit-every 1 --max-restarts 1 --record all.toml --history both.history --schedule ZBH1"}) {
    const Ended ended = plumb(run + watched);
    EXPECT_EQ(values(ended, "norm"), wanted) << watched;
    EXPECT_TRUE(values(ended, "audit").empty()) << ended.out;
  }
  // A replica that runs another one's microbatch again, with that one's buffer of the root, keeps its own buffer.
  const std::string replicas = fan + "--data-parallel 2 ";
  EXPECT_EQ(values(plumb(replicas + "--audit --audit-every 1 --max-restarts 1"), "norm"),
            values(plumb(replicas), "norm"));
}

TEST_F(Audits, AreNoPartOfWhatIsRecorded) {
  std::ofstream(folder() / "rules.toml") << "every = 1\n[[rule]]\nstatistics = [\"std\"]\n";
  const std::string run =
      job() + "--data-parallel 2 --microbatches 2 --gradient-groups 2 --max-restarts 1 --record rules.toml ";
  ASSERT_EQ(plumb(run + "--history alone.history").code, 0);
  ASSERT_EQ(plumb(run + "--history audited.history --audit --audit-every 1").code, 0);
  python(
      "import plumb\n"
      "frames = [plumb.read_history(name + '.history').to_dataframe('std') for name in ('alone', 'audited')]\n"
      "rows = [sorted(map(str, f[['step', 'name', 'direction', 'std']].itertuples(index=False))) for f in frames]\n"
      "assert len(rows[0]) > 0 and rows[0] == rows[1]\n");
}

TEST_F(Audits, ARankThatComputesWrongIsFoundByAnother) {
  const std::string run = job() + "--stages 2 ";
  const Ended whole = plumb(run + "--save whole.pt2");
  std::ofstream(folder() / "rules.toml") << "every = 1\n[[rule]]\n";
  // Rank 0 computes a microbatch of rank 1's step 4 again, by the seed: all of them are wrong.
  std::string faults;
  for (const char* action : {"1F0", "1F1", "1F2", "1F3"})
    faults += std::string("--inject 'flip rank 1 at ") + action + " of step 4' ";
  for (const char* recorded : {"", "--record rules.toml --history h "}) {
    SCOPED_TRACE(recorded);
    const Ended audited = plumb(run + "--audit --audit-every 1 --max-restarts 1 --save other.pt2 " + recorded + faults);
    EXPECT_EQ(audited.code, 0) << audited.err;
    EXPECT_EQ(values(audited, "audit"), std::vector<double>{4}) << audited.out;
    expect_same_weights();
  }
}

}  // namespace
