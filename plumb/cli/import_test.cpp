// plumb import, and plumb plan of a folder.
#include <cmath>
#include <vector>

#include "plumb/cli/command_testing.h"

namespace {

class Importing : public Command {
 protected:
  void SetUp() override {
    Command::SetUp();
    setenv("PLUMB_PYTHON", PLUMB_TEST_PYTHON, 1);
    if (fs::exists(folder() / "llama")) return;
    python(
        "import os; os.environ['HF_HUB_OFFLINE'] = '1'\n"
        "import plumb.hf, transformers\n"
        "torch.manual_seed(0)\n"
        "config = transformers.LlamaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=4, "
        "num_attention_heads=4,\n"
        "    intermediate_size=32, max_position_embeddings=64, num_key_value_heads=2)\n"
        "model = transformers.LlamaForCausalLM(config).eval()\n"
        "model.save_pretrained('llama')\n"
        "torch.save(model(torch.load('ids.pt')).logits, 'logits.pt')\n"
        "os.makedirs('bare')\n"
        "config.save_pretrained('bare')\n"
        // As the command does, but transformers, which takes seconds to load, is loaded once.
        "plumb.hf.import_folder('llama', 'given.pt2', batch=2, length=12, training=False)\n"
        "plumb.hf.import_folder('llama', 'plain.pt2', batch=2, length=8)\n"
        "plumb.hf.import_folder('bare', 'without.pt2', batch=2, length=12)\n"
        "plumb.hf.import_folder('bare', 'bare.pt2', length=16)\n");
  }
};

TEST_F(Importing, WritesAProgramThatSaysWhereItsWeightsAre) {
  std::ofstream(folder() / "json.py") << "raise SystemExit('code of the folder that the command runs in')";
  const Ended made = plumb("import llama -o llama.pt2 --batch 2 --length 8");
  fs::remove(folder() / "json.py");
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_NE(made.err.find("wrote llama.pt2"), std::string::npos);
  EXPECT_NE(plumb("show llama.pt2").out.find("model.layers.3.mlp.down_proj"), std::string::npos);
  EXPECT_EQ(plumb("import bare -o fresh.pt2 --batch 2 --length 12 --fresh 3 --eval").code, 0);
  EXPECT_EQ(plumb("run fresh.pt2 -o y.pt --input ids.pt").code, 0);
  wrong("run without.pt2 -o y.pt --input ids.pt", "--weights is missing: the program has no weights");
}

TEST_F(Importing, EveryCommandThatNeedsWeightsCanBeGivenThem) {
  fs::rename(folder() / "llama", folder() / "moved");
  const std::string held = " --data tokens.bin --json", text = " --prompt ab --tokens 3 --seed 1 --json";
  const std::vector<std::string> commands = {"run given.pt2 --input ids.pt", "track given.pt2 --input ids.pt",
                                             "scale given.pt2 -o by_command.pt2", "eval given.pt2" + held,
                                             "sample given.pt2" + text};
  for (const std::string& command : commands) {
    wrong(command, "--weights is missing: the program has no weights, and ");
    wrong(command + " --weights nowhere", "--weights nowhere: is not there");
    wrong(command + " --weights moved/model.safetensors", "--weights moved/model.safetensors: is no folder");
    const Ended done = plumb(command + " --weights moved");
    EXPECT_EQ(done.code, 0) << command << "\n" << done.err;
  }
  ASSERT_EQ(plumb("run given.pt2 --weights moved -o y.pt --input ids.pt").code, 0);
  fs::rename(folder() / "moved", folder() / "llama");
  EXPECT_EQ(plumb("run given.pt2 --input ids.pt").code, 0) << "the folder that was imported is there again";
  wrong("run mlp.pt2 --weights llama --input x.pt", "--weights llama: the program was not imported from a folder");
  python("assert torch.equal(torch.load('y.pt')[0], torch.load('logits.pt'))");
  // The model evaluated before the training is the one that the training starts from.
  const auto loss = Json::parse(plumb("eval given.pt2" + held).out)["loss"].get<double>();
  EXPECT_NEAR(loss, std::log(256), 0.5);
}

TEST_F(Importing, AFolderIsNoProgramForOtherCommands) {
  for (const char* command : {"train llama --data tokens.bin --steps 1", "show llama", "eval llama --data tokens.bin"})
    EXPECT_NE(plumb(command).err.find("llama: is a folder, and no program"), std::string::npos) << command;
}

TEST_F(Importing, ATrainingThatCouldNotSaveItsFolderIsRefusedBeforeItsFirstStep) {
  ASSERT_EQ(plumb("scale plain.pt2 -o scaled.pt2").code, 0);
  const std::string why = "--save-hf tuned: 'lm_head.weight' is a unit-scaled weight";
  wrong("train scaled.pt2 --data tokens.bin --steps 1 --save-hf tuned", why);
}

TEST_F(Importing, SaysWhatIsWrong) {
  wrong("import nowhere -o x.pt2", "is no folder");
  wrong("import llama -o x.txt", "is no .pt2 name");
  wrong("import llama -o x.pt2 --dtype int8", "--dtype");
  wrong("import llama -o x.pt2 --length 0", "--length: 0 is no whole number");
  fs::create_directory(folder() / "empty");
  const Ended empty = plumb("import empty -o x.pt2");
  EXPECT_EQ(empty.code, 1);
  EXPECT_NE(empty.err.find("holds no config.json"), std::string::npos) << empty.err;
  EXPECT_FALSE(fs::exists(folder() / "x.pt2"));
  setenv("PLUMB_PYTHON", "/nowhere/python", 1);
  EXPECT_NE(plumb("import llama -o x.pt2").err.find("cannot start '/nowhere/python'"), std::string::npos);
  std::ofstream(folder() / "isolated") << "#!/bin/sh\nexec " PLUMB_TEST_PYTHON " -S -E \"$@\"\n";
  fs::permissions(folder() / "isolated", fs::perms::owner_all);
  setenv("PLUMB_PYTHON", (folder() / "isolated").c_str(), 1);
  const std::string without = plumb("import llama -o x.pt2").err;
  EXPECT_NE(without.find("has no plumb, which reads the folder"), std::string::npos) << without;
  EXPECT_EQ(without.find("Traceback"), std::string::npos) << without;
}

TEST_F(Importing, LeavesNoTemporaryFolderWhenAPlanIsInterrupted) {
  fs::create_directory(folder() / "tmp");
  for (const char* seconds : {"0.2", "1"}) {
    const Ended run = shell("TMPDIR=$PWD/tmp timeout -s INT " + std::string(seconds) +
                            " " PLUMB_COMMAND " plan bare --ranks 2 --length 16");
    EXPECT_NE(run.code, 0);
    for (const auto& entry : fs::directory_iterator(folder() / "tmp"))
      EXPECT_NE(entry.path().filename().string().rfind("plumb-", 0), 0u) << entry.path();
  }
}

TEST_F(Importing, PlansForAFolderWithoutItsWeights) {
  const Ended text = plumb("plan bare --ranks 2 --memory 1GiB --length 16");
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("that keep 1GiB a rank"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("model.embed_tokens"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("estimated from shapes"), std::string::npos) << text.out;
  const auto step = [](const std::string& options) {
    return Json::parse(plumb("plan bare.pt2 --ranks 2 --json " + options).out)["schedules"][0]["step"].get<double>();
  };
  EXPECT_GT(step("--machine 1e6,1e6,1e6"), 2 * step("--machine 1e8,1e8,1e8"));
  wrong("plan bare --ranks 2 --machine 1,2", "--machine");
  wrong("plan bare --ranks 2 --machine 1,2,0", "--machine");
  const Ended little = plumb("plan bare.pt2 --ranks 1 --memory 60kB --schedules 1F1B,GPipe");
  EXPECT_EQ(little.code, 1);
  EXPECT_NE(little.err.find("the least that a rank needs is"), std::string::npos) << little.err;
  EXPECT_NE(little.err.find("--memory-limit of"), std::string::npos) << little.err;
}

}  // namespace
