// Options: what they mean, take and refuse.
#include "plumb/cli/command_testing.h"

namespace {

using Options = Command;

TEST_F(Options, SaysWhatItWrote) {
  EXPECT_NE(plumb("run mlp.pt2 --input x.pt -o said.pt").err.find("wrote said.pt\n"), std::string::npos);
  EXPECT_NE(
      without_times(plumb("scale lm.pt2 -o said.pt2 --html said.html").err).find("wrote said.pt2\nwrote said.html\n"),
      std::string::npos);
  EXPECT_NE(plumb("opt lm.pt2 --pass=dead_code -o said.pt2").err.find("wrote said.pt2\n"), std::string::npos);
}

TEST_F(Options, SaysRangesOfNumbersInWords) {
  wrong("train lm.pt2 --data tokens.bin --steps 0", "--steps: 0 is no whole number of 1 or more");
  wrong("train lm.pt2 --data tokens.bin --stages 5000", "5000 is no whole number from 1 to 1024");
  wrong("train lm.pt2 --data tokens.bin --steps 99999999999", "is more than the largest possible, 2147483647");
  wrong("train lm.pt2 --data tokens.bin --microbatches some", "some is no whole number from 1 to 65536");
  wrong("plan --ranks 2 --microbatches 2 --costs 1,-1,1", "-1 is no finite number from 0 to 1e+100");
  wrong("plan --ranks 2 --microbatches 2 --costs 1,1,1 --held-for-weight 200", "200 is no finite number from 0 to 100");
  wrong("train lm.pt2 --data tokens.bin --beta1 1", "1 is no finite number from 0 to 0.9999999");
  wrong("train lm.pt2 --data tokens.bin --clip -1", "-1 is no finite number of 0 or more");
}

TEST_F(Options, RefuseATableThatCannotRun) {
  std::ofstream(folder() / "stuck.csv") << "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n";
  wrong("train lm.pt2 --data tokens.bin --stages 2 --microbatches 2 --schedule stuck.csv",
        "--schedule stuck.csv: the schedule cannot run: deadlock: rank 0 stops at 0B0");
}

TEST_F(Options, ScalesWithTheTausAndReplacementsThatItIsGiven) {
  const Ended run = plumb(
      "scale lm.pt2 -o taus.pt2 --tau-mlp 0.25 --replace aten::gelu=aten::silu --replace aten::relu=aten::tanh "
      "--report");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.out.find("tau=0.25"), std::string::npos) << run.out;
  const std::string graph = plumb("show taus.pt2").out;
  EXPECT_NE(graph.find("silu"), std::string::npos);
  EXPECT_EQ(graph.find("gelu("), std::string::npos);
  wrong("scale lm.pt2 -o taus.pt2 --tau-mlp 0", "--tau-mlp: 0 is no positive, finite number");
  wrong("scale lm.pt2 -o taus.pt2 --replace gelu", "is not OLD=NEW");
}

TEST_F(Options, LeavesOutWhatItIsToldToPrune) {
  const auto targets = [](const std::string& options) {
    std::set<std::string> found;
    const Json scales = Json::parse(plumb("track flat.pt2 --input x.pt --json " + options).out);
    for (const Json& node : scales["nodes"]) found.insert(node["target"].get<std::string>().substr(0, 11));
    return found;
  };
  EXPECT_EQ(targets("").count("aten::relu"), 1u);
  EXPECT_EQ(targets("--prune aten::relu,0.weight").count("aten::relu"), 0u);
  EXPECT_EQ(targets("--prune aten::relu,0.weight").count("0.weight"), 0u);
  const Ended unknown = plumb("track flat.pt2 --input x.pt --prune aten::relu,aten::rleu");
  EXPECT_EQ(unknown.code, 0);
  EXPECT_NE(unknown.err.find("--prune aten::rleu: no node is one"), std::string::npos) << unknown.err;
  EXPECT_EQ(unknown.err.find("--prune aten::relu:"), std::string::npos) << unknown.err;
  EXPECT_EQ(targets("").count("aten::flatt"), 1u);
  EXPECT_EQ(targets("--prune-same-scale").count("aten::flatt"), 0u);
  EXPECT_EQ(targets("--prune-same-scale").count("aten::relu"), 1u);
}

TEST_F(Options, CutsAfterAModuleToo) {
  ASSERT_EQ(plumb("split lm.pt2 --at layers.0:end -o after").code, 0);
  ASSERT_EQ(plumb("split lm.pt2 --at layers.1 -o before").code, 0);
  const Json after = Json::parse(read(folder() / "after" / "manifest.json"));
  EXPECT_EQ(after["stages"], Json::parse(read(folder() / "before" / "manifest.json"))["stages"]);
}

TEST_F(Options, DrawsABarOnATerminalOnly) {
  python(
      "import os, pty, subprocess\n"
      "read, write = pty.openpty()\n"
      "subprocess.run(['" PLUMB_COMMAND
      "', 'opt', 'lm.pt2', '--pass=dead_code', '-o', 'bar.pt2'], stderr=write, check=True)\n" +
      std::string(kReadTerminal) +
      "assert '[' + '#' * 10 + ' ' * 20 + '] 1/3  dead_code' in said, said\n"
      "assert said.endswith('\\r\\x1b[K'), said");
  EXPECT_EQ(without_times(plumb("opt lm.pt2 --pass=dead_code -o bar.pt2").err),
            "dead_code: nothing to change\nwrote bar.pt2\n");
  EXPECT_EQ(without_times(plumb("show lm.pt2").err), "");
}

TEST_F(Options, AnInputThatTheFileFixesMayBeLeftOut) {
  const std::string given = "run dict.pt2 --json --input a.pt --input b.pt --input shift=0.5";
  const Ended without = plumb(given), with = plumb(given + " --input scale=2.0");
  ASSERT_EQ(without.code, 0) << without.err;
  EXPECT_EQ(Json::parse(without.out)["outputs"], Json::parse(with.out)["outputs"]);
  const Ended other = plumb(given + " --input scale=3.0");
  EXPECT_EQ(other.code, 1);
  EXPECT_NE(other.err.find("input 'scale' is fixed to 2"), std::string::npos) << other.err;
  python(R"py(
class Named(torch.nn.Module):
    def forward(self, x, mode, scale=None):
        return x * 2 if mode == "double" else x
torch.export.save(torch.export.export(Named(), (torch.ones(6, 8), "double")), "named.pt2")
)py");
  EXPECT_EQ(plumb("run named.pt2 --input x.pt").code, 0);
}

TEST_F(Options, AFileThatIsNoProgramAndNoGraphsTextIsNamedAsSuch) {
  std::ofstream(folder() / "note.txt") << "hi\n";
  const Ended shown = plumb("show note.txt");
  EXPECT_EQ(shown.code, 1);
  EXPECT_NE(shown.err.find("note.txt: is neither a .pt2 file by its name nor a graph's text"), std::string::npos)
      << shown.err;
}

TEST_F(Options, WrongUseNamesTheOptionAndTheFix) {
  ASSERT_EQ(plumb("show lm.pt2 -o lm.txt").code, 0);
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
  wrong("run mlp.pt2 --input ids.pt", "--input ids.pt: is i64[2, 12], input 'x' takes f32[6, 8]");
  wrong("run mlp.pt2 --input x=double.pt", "x.to(torch.float32)");
  wrong("run mlp.pt2 --input 3", "--input 3: is no tensor");
  wrong("run mlp.pt2 --input 99999999999999999999", "64-bit");
  wrong("run mlp.pt2 --input x.pt --input x.pt", "more values");
  wrong("run mlp.pt2 --input x.pt -o y.txt", "-o y.txt");
  wrong("run lm.txt --input x.pt", "FILE lm.txt");
  wrong("track mlp.pt2 --input x.pt --html a.html --fwd E9000", "--fwd E9000");
  wrong("scale lm.pt2 -o scaled.txt", "-o scaled.txt");
  wrong("split lm.pt2 --stages 1 --at layers.1 -o q", "--at");
  wrong("split lm.pt2 --stages -2 -o q", "--stages");
  wrong("split lm.pt2 --stages 99999999999 -o q", "--stages");
  wrong("opt lm.txt --pass=dead_code --json", "--json");
  EXPECT_FALSE(fs::exists(folder() / "a.pt2"));
  EXPECT_FALSE(fs::exists(folder() / "q"));
}

TEST_F(Options, APathThatTheSystemRefusesIsNamed) {
  fs::create_symlink("loop", folder() / "loop");
  const std::string said = plumb("track --history loop").err;
  EXPECT_TRUE(said.starts_with("plumb: loop: ")) << said;
}

// Returns names of options that --help of a command lists.
std::set<std::string> options_of(const std::string& help) {
  std::set<std::string> out;
  std::stringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  -")) continue;
    std::stringstream names(line.substr(2, line.find(' ', 2) - 2));
    for (std::string name; std::getline(names, name, ',');) out.insert(name);
  }
  return out;
}

TEST_F(Options, HelpOfACommandIsItsHelp) {
  EXPECT_EQ(plumb("help").out, plumb("--help").out);
  for (const char* command : {"train", "show", "completion"}) {
    const std::string name = command;
    EXPECT_EQ(plumb("help " + name).out, plumb(name + " --help").out);
  }
  wrong("help trian", "no command 'trian'");
}

TEST_F(Options, EveryCommandThatWritesAResultTakesItsNameAlike) {
  for (const std::string command : {"import", "opt", "plan", "run", "scale", "show", "split", "track", "verdict"})
    EXPECT_NE(plumb("help " + command).out.find("\n  -o,--out"), std::string::npos) << command;
  EXPECT_NE(plumb("help import").out.find("--output"), std::string::npos);  // its first spelling
}

TEST_F(Options, HelpOfDataSaysHowAnEvaluationReadsIt) {
  EXPECT_NE(plumb("help eval").out.find("an evaluation takes each once, in order"), std::string::npos);
}

TEST_F(Options, SaysWhichCommandOrOptionWasMeant) {
  wrong("trian lm.pt2", "no command 'trian'\n  try: plumb train, or plumb --help");
  wrong("xyzzy", "no command 'xyzzy'\n  try: plumb --help");
  wrong("train lm.pt2 --data tokens.bin --stpes 3",
        "train has no option --stpes\n  try: --steps, or plumb train --help");
  wrong("train lm.pt2 --micro=3", "train has no option --micro\n  try: --microbatches, or plumb train --help");
  wrong("show lm.pt2 --xyzzy", "show has no option --xyzzy\n  try: plumb show --help");
}

TEST_F(Options, ShellsCompleteEveryCommandAndOption) {
  std::set<std::string> commands;
  std::stringstream lines(plumb("--help").out.substr(plumb("--help").out.find("Subcommands:\n")));
  for (std::string line; std::getline(lines, line) && !line.empty();) {
    if (line.starts_with("  ")) commands.insert(line.substr(2, line.find(' ', 2) - 2));
  }
  ASSERT_GT(commands.size(), 11u);
  for (const char* shell_name : {"bash", "zsh", "fish"}) {
    const Ended script = plumb(std::string("completion ") + shell_name + " > completion." + shell_name +
                               "; cat completion." + shell_name);
    ASSERT_EQ(script.code, 0) << script.err;
    for (const std::string& command : commands) {
      EXPECT_NE(script.out.find(command), std::string::npos);
      for (const std::string& option : options_of(plumb(command + " --help").out)) {
        const std::string bare = option.substr(option.find_first_not_of('-'));
        const bool found =
            std::string(shell_name) == "fish"
                ? script.out.find((option.starts_with("--") ? " -l " : " -s ") + bare) != std::string::npos
                : script.out.find(option) != std::string::npos;
        EXPECT_TRUE(found) << shell_name << ": " << command << " " << option;
      }
    }
    if (shell("command -v " + std::string(shell_name)).code == 0) {
      EXPECT_EQ(shell(std::string(shell_name) + " -n completion." + shell_name).code, 0);
    }
  }
  wrong("completion tcsh", "SHELL");
  const auto completed = [](const std::string& words) {
    return shell("printf '%s\\n' 'source completion.bash' 'COMP_WORDS=(" + words +
                 ")' 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1))' _plumb 'echo \"${COMPREPLY[*]}\"' | bash")
        .out;
  };
  EXPECT_EQ(completed("plumb tr"), "train track\n");
  EXPECT_EQ(completed("plumb train --microb"), "--microbatches\n");
  EXPECT_EQ(completed("plumb train --token-type u"), "u8 u16\n");
  EXPECT_EQ(completed("plumb help spl"), "split\n");
  EXPECT_EQ(completed("plumb completion z"), "zsh\n");
  EXPECT_EQ(completed("plumb train lm"), "\n");  // the shell's own names of files
}

}  // namespace
