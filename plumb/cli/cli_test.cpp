// Runs the real program on files that Python wrote.
#include "plumb/cli/command_testing.h"

namespace {

TEST_F(Command, SaysItsVersionAndAnExampleForEverySubcommand) {
  EXPECT_EQ(plumb("--version").out.rfind("plumb ", 0), 0u);
  for (const char* name : {"show", "opt", "run", "plan", "train", "scale", "track", "split", "eval", "sample"}) {
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
  const Ended page = plumb("show lm.pt2 --html lm.html");
  EXPECT_EQ(page.out, "") << page.err;
  EXPECT_NE(read(folder() / "lm.html").find("class=\"graph-view\""), std::string::npos);
}

TEST_F(Command, RunsPassesFromFileToFile) {
  ASSERT_EQ(plumb("opt mlp.pt2 --pass=simulate_format,fwd=E4M3 --pass=dead_code -o fp8.pt2").code, 0);
  EXPECT_NE(plumb("show fp8.pt2").out.find("E4M3"), std::string::npos);
  ASSERT_EQ(plumb("show mlp.pt2 -o mlp.txt").code, 0);
  EXPECT_EQ(plumb("opt mlp.txt --pass=dead_code").out, read(folder() / "mlp.txt"));
  const Json list = Json::parse(plumb("opt --list --json").out);
  EXPECT_GT(list.size(), 4u);
}

TEST_F(Command, SaysHowLongPassesTakeAndWritesTheGraphAfterEach) {
  ASSERT_EQ(plumb("show mlp.pt2 -o mlp.txt").code, 0);
  const auto ran = plumb("opt mlp.txt --pass=dead_code --pass=simulate_format,fwd=E4M3 --time --dump steps -o out.txt");
  ASSERT_EQ(ran.code, 0) << ran.err;
  const std::string said = "dead_code: nothing to change (";
  ASSERT_NE(ran.err.find(said), std::string::npos) << ran.err;
  EXPECT_EQ(ran.err.find(" s)", ran.err.find(said)), ran.err.find(')', ran.err.find(said)) - 2) << ran.err;
  EXPECT_EQ(read(folder() / "steps" / "00-input.txt"), read(folder() / "mlp.txt"));
  EXPECT_EQ(read(folder() / "steps" / "01-dead_code.txt"), read(folder() / "mlp.txt"));
  EXPECT_EQ(read(folder() / "steps" / "02-simulate_format.txt"), read(folder() / "out.txt"));
  const Json json = Json::parse(plumb("opt mlp.txt --pass=dead_code --json -o out.txt").out);
  EXPECT_GE(json[0]["seconds"].get<double>(), 0);
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
  std::map<std::string, int> kinds, made;
  const Json report = Json::parse(run.out);
  for (const Json& e : report["entries"]) {
    ++kinds[e["kind"].get<std::string>()];
    if (e["kind"] == "replaced") ++made[e["to"].get<std::string>()];
  }
  EXPECT_EQ(made, (std::map<std::string, int>{
                      {"plumb::embedding", 1}, {"plumb::layer_norm", 2}, {"plumb::linear", 5}, {"plumb::gelu", 2}}));
  EXPECT_EQ(kinds["residual"], 2);
  ASSERT_EQ(plumb("opt lm.pt2 --pass=unit_scale -o passed.pt2").code, 0);
  for (const char* file : {"lm", "scaled", "passed"}) {
    const Ended ran = plumb("run " + std::string(file) + ".pt2 --input ids.pt -o " + file + ".out.pt");
    ASSERT_EQ(ran.code, 0) << ran.err;
  }
  python(
      "lm, scaled, passed = (torch.load(f'{n}.out.pt') for n in ('lm', 'scaled', 'passed'))\n"
      "lm, scaled, passed = (y if torch.is_tensor(y) else y['outputs'] for y in (lm, scaled, passed))\n"
      "lm, scaled, passed = (y if torch.is_tensor(y) else y[0] for y in (lm, scaled, passed))\n"
      "assert torch.equal(scaled, passed) and scaled.shape == lm.shape\n"
      "assert 0.8 < scaled.std() < 1.2 and not 0.8 < lm.std() < 1.2, (scaled.std(), lm.std())");
}

TEST_F(Command, FoldsAUnitScaledFileBackIntoAPlainOne) {
  for (const char* file : {"lm.pt2", "dynamic.pt2"}) {
    ASSERT_EQ(plumb(std::string("scale ") + file + " -o scaled.pt2").code, 0);
    const Ended run = plumb("scale --fold scaled.pt2 -o plain.pt2");
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_NE(run.out.find("parameters divided, 0 factors left as multiplications"), std::string::npos) << run.out;
    EXPECT_EQ(plumb("show plain.pt2").out.find("plumb::linear"), std::string::npos);
    ASSERT_EQ(plumb("run scaled.pt2 --input ids.pt -o scaled.pt").code, 0);
    ASSERT_EQ(plumb("run plain.pt2 --input ids.pt -o plain.pt").code, 0);
    python(
        "a, b = (torch.load(n) for n in ('scaled.pt', 'plain.pt'))\n"
        "torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)\n"
        "torch.export.load('plain.pt2')");
  }
  wrong("scale --fold --depth-rule lm.pt2 -o plain.pt2", "--depth-rule");
}

TEST_F(Command, SaysWhatFormatsWouldDo) {
  const Ended run = plumb("track mlp.pt2 --input x.pt --backward --formats e4m3fn,e2m1fn");
  EXPECT_NE(run.out.find("e2m1fn to 0"), std::string::npos) << run.err;
  EXPECT_NE(run.out.find("gradient"), std::string::npos);
  const Json json = Json::parse(plumb("track mlp.pt2 --input x.pt --formats e5m2 --json").out);
  const Json& share = json["formats"][0]["e5m2 loses digits"];
  EXPECT_TRUE(share.is_number() && share >= 0 && share <= 1) << json["formats"][0];
  EXPECT_TRUE(json["formats"][0]["operator"].is_string());
  ASSERT_EQ(plumb("track mlp.pt2 --input x.pt --backward --svg scales.svg").code, 0);
  EXPECT_EQ(read(folder() / "scales.svg").rfind("<svg", 0), 0u);
  wrong("track mlp.pt2 --input x.pt --formats e4m3fn,e9m9", "--formats e9m9");
}

TEST_F(Command, TracksScales) {
  EXPECT_NE(plumb("track mlp.pt2 --input x.pt --backward").out.find("a.weight"), std::string::npos);
  const Json json = Json::parse(plumb("track mlp.pt2 --input x.pt --backward --json").out);
  EXPECT_TRUE(
      std::ranges::any_of(json["nodes"], [](const Json& node) { return node.value("bwd", Json()).is_object(); }));
}

TEST_F(Command, TakesDictsNumbersAndBuffers) {
  const char* arguments = "dict.pt2 --input a.pt --input b.pt --input 2.0 --input shift=0.5 --backward --json";
  const Ended run = plumb(std::string("run ") + arguments);
  ASSERT_EQ(run.code, 0) << run.err;
  const Json outputs = Json::parse(run.out)["outputs"];
  EXPECT_EQ(outputs[0]["name"], "logits");
  EXPECT_EQ(outputs[1]["name"], "loss");
  EXPECT_FALSE(Json::parse(run.out)["gradients"].empty());
  EXPECT_EQ(plumb(std::string("track ") + arguments).code, 0);
  wrong("run dict.pt2 --input a.pt --input b.pt --input 2.0", "input 'shift'");
  wrong("run dict.pt2 --input a.pt --input b.pt --input 2.0 --input 3.0 --input shift=1", "given twice, by --input 3");
}

TEST_F(Command, WritesPagesThatNeedNothingElse) {
  ASSERT_EQ(plumb("track mlp.pt2 --input x.pt --backward --html track.html").code, 0);
  ASSERT_EQ(plumb("scale lm.pt2 -o scaled.pt2 --html scale.html").code, 0);
  for (const char* name : {"track.html", "scale.html"}) {
    const std::string page = read(folder() / name);
    EXPECT_NE(page.find("linear"), std::string::npos) << name;
    for (const char* outside : {"src=\"http", "href=\"http", "@import"}) {
      EXPECT_EQ(page.find(outside), std::string::npos) << name;
    }
  }
  EXPECT_NE(read(folder() / "track.html").find("E5M2"), std::string::npos);
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
  EXPECT_EQ(ended.code, 0) << ended.err;
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

// A step of Adam moves every value by its learning rate.
const char* const kSteps = R"py(
import json, zipfile
def weights(path):
    with zipfile.ZipFile(path) as z:
        of = {n.partition("/")[2]: n for n in z.namelist()}
        config = json.loads(z.read(of["data/weights/model_weights_config.json"]))["config"]
        return {k: torch.frombuffer(bytearray(z.read(of["data/weights/" + v["path_name"]])), dtype=torch.float32)
                for k, v in config.items()}
before, after = weights("scaled.pt2"), weights("stepped.pt2")
step = {n: (after[n] - before[n]).abs().max().item() for n in before}
near = lambda a, b: abs(a - b) < 1e-3 * b
assert near(step["layers.0.up.weight"], 0.1 / 16**0.5) and near(step["layers.0.down.weight"], 0.1 / 32**0.5), step
assert near(step["layers.0.up.bias"], 0.1) and near(step["head.bias"], 0.1), step
)py";

TEST_F(Command, TrainsAUnitScaledFileWithItsOwnLearningRates) {
  ASSERT_EQ(plumb("scale lm.pt2 -o scaled.pt2").code, 0);
  const std::string train =
      "train scaled.pt2 --data tokens.bin --steps 1 --lr 0.1 --threads 1 --seed 3 --save stepped.pt2 ";
  for (const char* optimizer : {"--optimizer adam", "--optimizer adamw", "--stages 2"}) {
    const Ended run = plumb(train + optimizer);
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_NE(run.out.find("learning rates: u-muP's"), std::string::npos) << run.out;
    python(kSteps);
  }
  // The trained file is tagged as well; a plain one is not.
  EXPECT_NE(plumb("train stepped.pt2 --data tokens.bin --steps 1").out.find("u-muP"), std::string::npos);
  EXPECT_EQ(plumb("train lm.pt2 --data tokens.bin --steps 1").out.find("u-muP"), std::string::npos);
}

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
        "assert list(a) == list(b) == list(c) and list(a)[0] == 'wte.weight'\n"
        "assert all(torch.equal(a[n], b[n]) and not torch.equal(a[n], c[n]) for n in a)");
  }
}

TEST_F(Command, SendsParametersThatItIsToldToTransmit) {
  const auto stage_parameters = [](const std::string& options) {
    EXPECT_EQ(plumb("split tied.pt2 --at head -o tied " + options).code, 0);
    return Json::parse(read(folder() / "tied" / "manifest.json"))["stages"][1]["parameters"].dump();
  };
  EXPECT_NE(stage_parameters("").find("weight"), std::string::npos) << "a copy";
  for (const std::string name : {"all", "wte.weight", "head.weight"})  // tied: one parameter by two names
    EXPECT_EQ(stage_parameters("--transmit " + name).find("weight"), std::string::npos) << "an input with " << name;
  wrong("split tied.pt2 --at head -o tied --transmit no.such", "--transmit no.such");
  wrong("split dict.pt2 --at fc -o tied --transmit norm.running_mean", "no parameter of that name");
  const std::string train = "train tied.pt2 --data tokens.bin --steps 3 --microbatches 2 --threads 1 --json ";
  const auto whole = training(plumb(train)).losses;
  ASSERT_EQ(whole.size(), 3u);
  EXPECT_EQ(training(plumb(train + "--stages 2 --at head --transmit all")).losses, whole);
}

TEST_F(Command, PlansAndTrainsByTheTableItWrites) {
  const Ended plan = plumb("plan lm.pt2 --ranks 2 --microbatches 4 --json --csv best.csv --svg best.svg");
  ASSERT_EQ(plan.code, 0) << plan.err;
  const Json table = Json::parse(plan.out);
  EXPECT_GE(table["schedules"].size(), 12u);
  EXPECT_EQ(table["schedules"][0]["schedule"], table["taken"]);
  EXPECT_GT(table["schedules"][0]["step"].get<double>(), 0);
  EXPECT_NE(read(folder() / "best.svg").find("<svg"), std::string::npos);
  const Ended planned = plumb(std::string(kTrain) + "--stages 2 --schedule best.csv --timeline step.svg");
  ASSERT_EQ(planned.code, 0) << planned.err;
  EXPECT_EQ(training(planned).losses, training(plumb(kTrain)).losses) << "a schedule changes no bit";
  EXPECT_NE(read(folder() / "step.svg").find("all stages equal"), std::string::npos);
  const Ended traced = plumb(std::string(kTrain) + "--stages 2 --timeline step.json --timeline-steps 2");
  ASSERT_EQ(traced.code, 0) << traced.err;
  std::set<std::string> names;
  const Json trace = Json::parse(read(folder() / "step.json"));
  for (const Json& e : trace["traceEvents"]) {
    names.insert((e["name"] == "process_name" ? e["args"]["name"] : e["name"]).get<std::string>());
  }
  for (const char* name : {"rank 0, stage 0", "rank 1, stage 1", "step 5", "step 6"})
    EXPECT_TRUE(names.count(name)) << name;
  wrong("train lm.pt2 --data tokens.bin --stages 2 --microbatches 3 --schedule best.csv", "--microbatches 4");
}

TEST_F(Command, TrainsOverFourProcessesByATableWrittenByHand) {
  const Ended four = plumb(std::string(kTrain) + "--stages 4 --schedule " PLUMB_EXAMPLES "/hand_written.csv");
  ASSERT_EQ(four.code, 0) << four.err;
  EXPECT_EQ(training(four).losses, training(plumb(kTrain)).losses);
}

TEST_F(Command, PrintsJsonLinesAsItsHelpSays) {
  const Ended run = plumb(std::string(kTrain) + "--save lines.pt2 --timeline lines.json");
  ASSERT_EQ(run.code, 0) << run.err;
  const std::string help = plumb("train --help").out;
  const std::string about = help.substr(help.find("--json"));
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) {
    const Json event = Json::parse(line);
    for (const auto& item : event.items()) EXPECT_NE(about.find(item.key()), std::string::npos) << line << about;
  }
}

TEST_F(Command, TrainsSeveralPipelinesBesideEachOther) {
  const char* job = "train lm.pt2 --data tokens.bin --steps 6 --lr 0.01 --threads 1 --seed 3 --json ";
  const Ended one = plumb(std::string(job) + "--microbatches 4 --save one.pt2");
  const Ended four = plumb(std::string(job) + "--microbatches 2 --stages 2 --data-parallel 2 --save four.pt2");
  ASSERT_EQ(four.code, 0) << four.err;
  const Training a = training(one), b = training(four);
  ASSERT_EQ(b.losses.size(), 6u) << "printed once, not by every replica";
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(a.losses[i], b.losses[i], 1e-4);
  EXPECT_EQ(b.saved, "four.pt2");
  const Ended again = plumb(std::string(job) + "--microbatches 2 --data-parallel 2");
  EXPECT_EQ(training(again).losses, b.losses) << "cut or whole";
}

TEST_F(Command, TrainsUnderTorchrun) {
  const Ended run = shell(PLUMB_TEST_PYTHON
                          " -m torch.distributed.run --standalone --nproc-per-node 2 --no-python " PLUMB_COMMAND " " +
                          std::string(kTrain) + "--stages 2 --save run.pt2");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(training(run).losses, training(plumb(kTrain)).losses);
}

TEST_F(Command, TrainsUnderTheVariablesOfOtherLaunchers) {
  const auto alone = training(plumb(kTrain)).losses;
  for (const std::string variables :
       {"SLURM_PROCID=$r SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_JOB_ID=",
        "OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-",
        "PMI_RANK=$r PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_JOBID="}) {
    Ended run;
    // The port is made of the job's number, and may be another program's by chance.
    for (int job = 0; job == 0 || (job < 5 && run.err.find("cannot listen at") != std::string::npos); ++job) {
      run = shell("for r in 0 1; do " + variables + std::to_string(::getpid()) + std::to_string(job) +
                  " " PLUMB_COMMAND " " + kTrain + "--stages 2 & done; wait");
    }
    EXPECT_EQ(training(run).losses, alone) << variables << run.err;
  }
}

TEST_F(Command, TrainsOnTensorFilesAndPrintsPlainLines) {
  const Ended run =
      plumb("train mlp.pt2 --data rows.pt --targets targets.pt --loss mse --optimizer sgd --lr 0.1 --steps 3");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.out.rfind("step 1/3  loss ", 0), 0u) << run.out;
  EXPECT_NE(run.out.find("step 3/3"), std::string::npos);
  EXPECT_NE(run.out.find(" s a step, "), std::string::npos) << run.out;
  EXPECT_NE(run.out.find(" s left\n"), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find('\r'), std::string::npos);
}

TEST_F(Command, ALongStepSaysHowFarItIs) {
  const char* train =
      "train mlp.pt2 --data rows.pt --targets targets.pt --loss mse --optimizer sgd --lr 0.1 --steps 1 "
      "--microbatches 40000 ";
  const Ended run = plumb(train);
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.err.find("step 1: "), std::string::npos) << run.err;
  EXPECT_NE(run.err.find(" of 80000 actions after "), std::string::npos) << run.err;
  const Ended quick =
      plumb("train mlp.pt2 --data rows.pt --targets targets.pt --loss mse --optimizer sgd --lr 0.1 --steps 1");
  EXPECT_EQ(quick.err.find("actions after"), std::string::npos) << quick.err;
}

TEST_F(Command, WrongTrainingNamesTheOption) {
  wrong("train lm.pt2", "--data");
  wrong("train lm.pt2 --data tokens.bin --schedule nope", "--schedule");
  wrong("train lm.pt2 --data tokens.bin --batch 8", "try: --microbatches 4, or --batch 2 with --microbatches 1");
  wrong("train lm.pt2 --data tokens.bin --loss output", "--data");
  for (const char* rate : {"-1", "0", "nan", "1e400", "fast"}) {
    wrong(std::string("train lm.pt2 --data tokens.bin --lr ") + rate, "--lr");
  }
  wrong("train lm.pt2 --data tokens.bin --stages 900", "--stages 900");
  wrong("train mlp.pt2 --data rows.pt --loss mse", "--targets");
  wrong("train mlp.pt2 --data rows.pt --targets rows.pt --loss mse", "--targets rows.pt");
  wrong("train mlp.pt2 --data rows.pt --targets targets.pt --loss cross_entropy", "--targets targets.pt");
  wrong("train lm.pt2 --data tokens.bin --stages 2 --at layers.0,layers.1", "--stages");
  wrong("train lm.pt2 --data tokens.bin --at layers.1", "--at");
  wrong("train lm.pt2 --data tokens.bin --steps 0", "--steps");
  wrong("train lm.pt2 --data tokens.bin --threads 1000000", "--threads");
  wrong("train lm.pt2 --data tokens.bin --save weights.bin", "--save weights.bin");
  wrong("train dynamic.pt2 --data tokens.bin --batch 99999999999999", "--batch");
  EXPECT_EQ(plumb("train lm.pt2 --data missing.bin --stages 2").code, 1);
}

TEST_F(Command, ChecksWhereItSavesBeforeItTrains) {
  for (const char* stages : {"1", "2"}) {
    const Ended run = plumb(std::string("train lm.pt2 --data tokens.bin --save no/such/a.pt2 --stages ") + stages);
    EXPECT_EQ(run.code, 1);
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(run.err.rfind("plumb: --save no/such/a.pt2", 0), 0u) << run.err;
  }
}

TEST_F(Command, TrainsUnderEverySchedule) {
  const Training alone = training(plumb(kTrain));
  for (const char* schedule : {"ZBH1", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B", "VHalf"}) {
    const Ended run = plumb(std::string(kTrain) + "--stages 2 --save s.pt2 --schedule " + schedule);
    ASSERT_EQ(run.code, 0) << schedule << run.err;
    EXPECT_EQ(training(run).losses, alone.losses) << schedule;
  }
  // Every stage is on two ranks, so gradients are summed in another order.
  const Ended run = plumb(std::string(kTrain) + "--stages 2 --save s.pt2 --schedule DualPipe");
  ASSERT_EQ(run.code, 0) << run.err;
  const Training two_way = training(run);
  ASSERT_EQ(two_way.losses.size(), alone.losses.size());
  for (size_t i = 0; i < alone.losses.size(); ++i) EXPECT_NEAR(two_way.losses[i], alone.losses[i], 1e-4);
}

// Ends a training in the middle; says the exit code, what it printed, and what it left behind.
const char* const kStop = R"py(
import glob, os, signal, subprocess, sys, time
who, number, stages = sys.argv[1], getattr(signal, sys.argv[2]), sys.argv[3]
p = subprocess.Popen([COMMAND, "train", "lm.pt2", "--data", "tokens.bin", "--steps", "1000000", "--lr", "1e-6", "--stages", stages,
                      "--threads", "1", "--save", "stopped.pt2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
p.stdout.readline()
def parent(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
children = sorted(int(d) for d in os.listdir("/proc") if d.isdigit() and parent(d) == p.pid)
assert len(children) == (int(stages) if stages != "1" else 0), children
os.kill(p.pid if who == "parent" else children[-1], number)
out, err = p.communicate(timeout=300)
end = time.time() + 60
while any(os.path.exists(f"/proc/{c}") for c in children) and time.time() < end:
    time.sleep(0.05)
assert not any(os.path.exists(f"/proc/{c}") for c in children), "orphans"
assert not glob.glob("stopped.pt2*"), glob.glob("stopped.pt2*")
print(p.returncode)
print(err)
)py";

TEST_F(Command, LeavesNothingBehindWhenItIsStopped) {
  std::ofstream(folder() / "stop.py") << "COMMAND = '" PLUMB_COMMAND "'\n" << kStop;
  auto stopped = [](const std::string& arguments) {
    const Ended run = shell(PLUMB_TEST_PYTHON " stop.py " + arguments);
    EXPECT_EQ(run.code, 0) << run.err;
    return run.out;
  };
  EXPECT_EQ(stopped("parent SIGTERM 1").rfind("-15\n", 0), 0u);
  const std::string ended = stopped("parent SIGTERM 2");
  EXPECT_EQ(ended.rfind("-15\n", 0), 0u) << ended;
  EXPECT_NE(ended.find("\nplumb: interrupted, nothing was saved"), std::string::npos) << ended;
  EXPECT_EQ(stopped("parent SIGKILL 2").rfind("-9\n", 0), 0u);
  const std::string killed = stopped("child SIGKILL 2");
  EXPECT_EQ(killed.rfind("137\n", 0), 0u) << killed;
  EXPECT_NE(killed.find("rank 1 was killed by signal 9"), std::string::npos) << killed;
}

TEST_F(Command, RecordsATrainingAndShowsItsHistory) {
  const std::string train = "train lm.pt2 --data tokens.bin --steps 6 --microbatches 4 --threads 1 --seed 3 ";
  std::ofstream(folder() / "rules.toml") << "every = 2\n[[rule]]\n";
  const Ended one = plumb(train + "--json --record rules.toml --history one.history --save recorded.pt2");
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_EQ(training(one).losses, training(plumb(train + "--json")).losses);
  python("assert 'track' not in str(torch.export.load('recorded.pt2'))");
  const Ended table = plumb("track --history one.history --formats e5m2 --step 3");
  EXPECT_NE(table.out.find("e5m2 to 0"), std::string::npos) << table.err;
  ASSERT_EQ(plumb(train + "--lr 0.02 --record rules.toml --history two.history").code, 0);
  ASSERT_EQ(plumb("track --history one.history --compare two.history --html both.html --svg both.svg").code, 0);
  EXPECT_NE(read(folder() / "both.html").find("two.history"), std::string::npos);
  EXPECT_NE(read(folder() / "both.svg").find("two.history"), std::string::npos);
  const Json rows = Json::parse(plumb("track --history one.history --json").out);
  // A row is held against its role's format.
  for (const Json& row : rows) EXPECT_EQ(row.at("format"), row.at("of") == "value" ? "E4M3" : "E5M2");
  EXPECT_FALSE(rows[0].contains("e4m3fn to 0"));
  ASSERT_EQ(
      plumb("track --history first=one.history --compare again=two.history --compare one.history --html named.html")
          .code,
      0);
  for (const char* name :
       {"<span class=\"dot\"></span>first<", "<span class=\"dot\"></span>again<", "What loses 1 % or more"})
    EXPECT_NE(read(folder() / "named.html").find(name), std::string::npos) << name;
  wrong("track --history one.history --compare one.history", "--compare NAME=one.history");
  // A pipeline's ranks write their own.
  ASSERT_EQ(plumb(train + "--stages 2 --record rules.toml --history three.history").code, 0);
  for (const char* name : {"three.history.rank0", "three.history.rank1"}) {
    EXPECT_NE(plumb(std::string("track --history ") + name).out.find("gradient"), std::string::npos) << name;
  }
  // And are shown as one.
  const Ended whole = plumb("track --history three.history --html three.html");
  EXPECT_EQ(whole.code, 0) << whole.err;
  EXPECT_NE(read(folder() / "three.html").find("stage 1, rank 1"), std::string::npos);
  const Ended parts = plumb("track --history three.history --json");
  std::set<std::string> seen;
  for (const Json& row : Json::parse(parts.out)) seen.insert(row.at("part").get<std::string>());
  EXPECT_EQ(seen, (std::set<std::string>{"stage 0, rank 0", "stage 1, rank 1"}));
  wrong("train lm.pt2 --data tokens.bin --record rules.toml", "--record");
  wrong("track --compare two.history", "--compare");
  wrong("track mlp.pt2 --history one.history", "--history");
  wrong("track", "FILE");
  std::ofstream(folder() / "bad.toml") << "[[rule]]\nevry = 2\n";
  const Ended bad = plumb("train lm.pt2 --data tokens.bin --record bad.toml --history bad.history");
  EXPECT_EQ(bad.code, 1);
  EXPECT_NE(bad.err.find("bad.toml:2: \"evry\""), std::string::npos) << bad.err;
  EXPECT_EQ(plumb("track --history tokens.bin").code, 1);
  std::ofstream(folder() / "empty.history");
  EXPECT_NE(plumb("track --history empty.history").err.find("has no recorded step"), std::string::npos);
}

}  // namespace
