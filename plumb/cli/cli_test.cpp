// Runs the real program on files that Python wrote.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

struct Ended {
  int code = 0;
  std::string out, err;
};

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

const char* const kWrite = R"py(
import random, torch
from torch import nn
class Block(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(w), nn.Linear(w, 2 * w), nn.Linear(2 * w, w)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.layers = nn.ModuleList(Block(16) for _ in range(2))
    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
torch.manual_seed(0)
torch.export.save(torch.export.export(Lm(), (torch.randint(256, (2, 12)),)), "lm.pt2")
m, x = Mlp(), torch.randn(6, 8)
torch.export.save(torch.export.export(m, (x,)), "mlp.pt2")
torch.save(x, "x.pt")
torch.save(torch.randint(256, (2, 12)), "ids.pt")
y = m(x)
y.sum().backward()
torch.save({"y": y.detach(), "a": m.a.weight.grad}, "want.pt")
torch.save(torch.randn(60, 8), "rows.pt")
torch.save(torch.randn(60, 4), "targets.pt")
open("tokens.bin", "wb").write(bytes(random.Random(0).choices(b"abcdefgh", k=4000)))
open("corrupt.pt2", "wb").write(open("mlp.pt2", "rb").read()[:1500])
)py";

class Command : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    char name[] = "/tmp/plumb_cli_XXXXXX";
    folder() = ::mkdtemp(name);
    std::ofstream(folder() / "write.py") << kWrite;
    ASSERT_EQ(shell(PLUMB_TEST_PYTHON " write.py").code, 0);
  }
  static void TearDownTestSuite() { fs::remove_all(folder()); }
  static fs::path& folder() {
    static fs::path path;
    return path;
  }
  static Ended shell(const std::string& command) {
    Ended run;
    const int status = std::system(("cd " + folder().string() + " && " + command + " > .out 2> .err").c_str());
    run.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    run.out = read(folder() / ".out");
    run.err = read(folder() / ".err");
    return run;
  }
  static Ended plumb(const std::string& arguments) { return shell(PLUMB_COMMAND " " + arguments); }
  // Runs Python on the folder's files; fails the test if it does.
  static void python(const std::string& text) {
    std::ofstream(folder() / "check.py") << "import torch\n" << text << "\n";
    const Ended run = shell(PLUMB_TEST_PYTHON " check.py");
    EXPECT_EQ(run.code, 0) << run.err;
  }
  static void wrong(const std::string& arguments, const std::string& says) {
    const Ended run = plumb(arguments);
    EXPECT_EQ(run.code, 2) << arguments << "\n" << run.err;
    EXPECT_NE(run.err.find(says), std::string::npos) << arguments << "\n" << run.err;
    EXPECT_NE(run.err.find("try: "), std::string::npos) << run.err;
  }
};

TEST_F(Command, SaysItsVersionAndAnExampleForEverySubcommand) {
  EXPECT_EQ(plumb("--version").out.rfind("plumb ", 0), 0u);
  for (const char* name : {"show", "opt", "run", "train", "scale", "track", "split"}) {
    const Ended help = plumb(std::string(name) + " --help");
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.out.find("plumb " + std::string(name) + " "), std::string::npos) << help.out;
  }
}

TEST_F(Command, ShowsATextThatItReadsBack) {
  ASSERT_EQ(plumb("show lm.pt2 -o lm.txt").code, 0);
  EXPECT_EQ(plumb("show lm.txt").out, read(folder() / "lm.txt"));
  EXPECT_NE(read(folder() / "lm.txt").find("aten::gelu"), std::string::npos);
}

TEST_F(Command, ShowsTableJsonPictureAndDot) {
  EXPECT_NE(plumb("show mlp.pt2 --as table").out.find("aten::linear"), std::string::npos);
  const Json json = Json::parse(plumb("show mlp.pt2 --json").out);
  EXPECT_EQ(json["nodes"].back()["op"], "output");
  EXPECT_EQ(json["nodes"].back()["inputs"].size(), 1u);
  ASSERT_EQ(plumb("show lm.pt2 --as picture -o lm.svg").code, 0);
  python("import xml.dom.minidom\nassert len(xml.dom.minidom.parse('lm.svg').getElementsByTagName('title')) > 15");
  EXPECT_EQ(plumb("show mlp.pt2 --as dot").out.rfind("digraph", 0), 0u);
}

TEST_F(Command, RunsPassesFromFileToFile) {
  ASSERT_EQ(plumb("opt mlp.pt2 --pass=simulate_format,fwd=E4M3 --pass=dead_code -o fp8.pt2").code, 0);
  EXPECT_NE(plumb("show fp8.pt2").out.find("E4M3"), std::string::npos);
  ASSERT_EQ(plumb("show mlp.pt2 -o mlp.txt").code, 0);
  EXPECT_EQ(plumb("opt mlp.txt --pass=dead_code").out, read(folder() / "mlp.txt"));
  const Json list = Json::parse(plumb("opt --list --json").out);
  EXPECT_GT(list.size(), 4u);
}

TEST_F(Command, RunsForwardAndBackwardAsPythonDoes) {
  ASSERT_EQ(plumb("run mlp.pt2 --input x=x.pt --backward -o got.pt").code, 0);
  python(
      "got, want = torch.load('got.pt'), torch.load('want.pt')\n"
      "assert torch.equal(got['outputs'] if torch.is_tensor(got['outputs']) else got['outputs'][0], want['y'])\n"
      "assert torch.equal(got['gradients']['a.weight'], want['a'])");
  const Json json = Json::parse(plumb("run mlp.pt2 --input x.pt --json").out);
  EXPECT_EQ(json["outputs"][0]["sizes"], Json::parse("[6, 4]"));
}

TEST_F(Command, UnitScalesAFile) {
  const Ended run = plumb("scale lm.pt2 -o scaled.pt2 --json");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_FALSE(Json::parse(run.out)["entries"].empty());
  EXPECT_NE(plumb("show scaled.pt2").out.find("plumb::linear"), std::string::npos);
}

TEST_F(Command, TracksScales) {
  EXPECT_NE(plumb("track mlp.pt2 --input x.pt --backward").out.find("a.weight"), std::string::npos);
  const Json json = Json::parse(plumb("track mlp.pt2 --input x.pt --backward --json").out);
  bool has_gradient = false;
  for (const Json& node : json["nodes"]) has_gradient = has_gradient || node.value("bwd", Json()).is_object();
  EXPECT_TRUE(has_gradient);
}

TEST_F(Command, SplitsIntoStageFilesThatCompose) {
  ASSERT_EQ(plumb("split lm.pt2 --stages 2 -o stages").code, 0);
  const Json manifest = Json::parse(read(folder() / "stages" / "manifest.json"));
  EXPECT_EQ(manifest["stages"].size(), 2u);
  ASSERT_EQ(plumb("run stages/stage0.pt2 --input ids.pt -o middle.pt").code, 0);
  ASSERT_EQ(plumb("run stages/stage1.pt2 --input middle.pt -o end.pt").code, 0);
  ASSERT_EQ(plumb("run lm.pt2 --input ids.pt -o whole.pt").code, 0);
  python(
      "a, b = torch.load('end.pt'), torch.load('whole.pt')\n"
      "first = lambda v: v if torch.is_tensor(v) else v[0]\n"
      "assert torch.equal(first(a), first(b))");
  EXPECT_EQ(plumb("split lm.pt2 --at layers.0,layers.1 -o three").code, 0);
  EXPECT_TRUE(fs::exists(folder() / "three" / "stage2.pt2"));
}

TEST_F(Command, ReportsACutWithoutWritingIt) {
  const Ended ended = plumb("split lm.pt2 --stages 2 --report");
  EXPECT_EQ(ended.code, 0);
  EXPECT_NE(ended.out.find("slowest stage"), std::string::npos);
  EXPECT_EQ(plumb("split lm.pt2 --stages 2 --report -o reported").out.find(ended.out), 0u);
  EXPECT_TRUE(fs::exists(folder() / "reported" / "stage1.pt2"));
}

// The losses of `plumb train ... --json`, and what it said was saved.
struct Training {
  std::vector<double> losses;
  std::string saved;
};
Training training(const Ended& run) {
  Training t;
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) {
    const Json event = Json::parse(line);
    if (event.contains("loss")) t.losses.push_back(event["loss"]);
    if (event.contains("saved")) t.saved = event["saved"];
  }
  return t;
}

const char* const kTrain =
    "train lm.pt2 --data tokens.bin --steps 6 --lr 0.01 --microbatches 4 --threads 1 --seed 3 --json ";

TEST_F(Command, TrainsInTwoProcessesBitForBitAsInOne) {
  const Ended one = plumb(std::string(kTrain) + "--save one.pt2");
  ASSERT_EQ(one.code, 0) << one.err;
  const Training alone = training(one);
  ASSERT_EQ(alone.losses.size(), 6u);
  EXPECT_LT(alone.losses.back(), alone.losses.front());
  EXPECT_EQ(alone.saved, "one.pt2");
  for (const char* more : {"--stages 2 --save two.pt2", "--stages 2 --at layers.1 --schedule GPipe --save two.pt2"}) {
    const Ended two = plumb(std::string(kTrain) + more);
    ASSERT_EQ(two.code, 0) << two.err;
    EXPECT_EQ(training(two).losses, alone.losses);
    python(
        "a, b, c = (torch.export.load(n).state_dict for n in ('one.pt2', 'two.pt2', 'lm.pt2'))\n"
        "assert list(a) == list(b) and sorted(a) == sorted(c)\n"
        "assert all(torch.equal(a[n], b[n]) and not torch.equal(a[n], c[n]) for n in a)");
  }
}

TEST_F(Command, TrainsUnderTorchrun) {
  const Ended run = shell(PLUMB_TEST_PYTHON
                          " -m torch.distributed.run --standalone --nproc-per-node 2 --no-python " PLUMB_COMMAND " " +
                          std::string(kTrain) + "--stages 2 --save run.pt2");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(training(run).losses, training(plumb(kTrain)).losses);
}

TEST_F(Command, TrainsOnTensorFilesAndPrintsPlainLines) {
  const Ended run =
      plumb("train mlp.pt2 --data rows.pt --targets targets.pt --loss mse --optimizer sgd --lr 0.1 --steps 3");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.out.rfind("step 1/3  loss ", 0), 0u) << run.out;
  EXPECT_NE(run.out.find("step 3/3"), std::string::npos);
  EXPECT_EQ(run.out.find('\r'), std::string::npos);
}

TEST_F(Command, WrongTrainingNamesTheOption) {
  wrong("train lm.pt2", "--data");
  wrong("train lm.pt2 --data tokens.bin --schedule nope", "--schedule");
  wrong("train lm.pt2 --data tokens.bin --batch 7", "--batch");
  wrong("train lm.pt2 --data tokens.bin --loss output", "--data");
  wrong("train lm.pt2 --data tokens.bin --lr -1", "--lr");
  wrong("train mlp.pt2 --data rows.pt --loss mse", "--targets");
  wrong("train lm.pt2 --data tokens.bin --stages 2 --at layers.0,layers.1", "--stages");
  EXPECT_EQ(plumb("train lm.pt2 --data missing.bin --stages 2").code, 1);
}

TEST_F(Command, WrongUseNamesTheOptionAndTheFix) {
  wrong("", "subcommand");
  wrong("nope", "nope");
  wrong("show", "FILE");
  wrong("show mlp.pt2 --as film", "--as");
  wrong("opt mlp.pt2 --pass=foo -o a.pt2", "--pass=foo");
  wrong("opt mlp.pt2 --pass=dead_code,a=1 -o a.pt2", "no option 'a'");
  wrong("opt mlp.pt2 --pass=dead_code", "-o");
  wrong("opt mlp.pt2 --pass=dead_code -o a.txt", "-o a.txt");
  wrong("run mlp.pt2", "input 'x'");
  wrong("run mlp.pt2 --input y=x.pt", "y=");
  wrong("split lm.pt2 -o q", "--stages");
  wrong("split lm.pt2 --stages 2", "-o");
  EXPECT_FALSE(fs::exists(folder() / "a.pt2"));
  EXPECT_FALSE(fs::exists(folder() / "q"));
}

TEST_F(Command, FailsCleanlyOnMissingAndCorruptFiles) {
  for (const char* arguments : {"show missing.pt2", "show missing.txt", "show corrupt.pt2", "show x.pt", "show /tmp",
                                "run mlp.pt2 --input missing.pt", "run mlp.pt2 --input ids.pt",
                                "split lm.pt2 --at nope -o q", "show mlp.pt2 -o /no/such/folder/a.txt"}) {
    const Ended run = plumb(arguments);
    EXPECT_EQ(run.code, 1) << arguments << "\n" << run.err;
    EXPECT_EQ(run.err.rfind("plumb: ", 0), 0u) << run.err;
    EXPECT_EQ(run.err.find("frame #"), std::string::npos) << run.err;
  }
}

}  // namespace
