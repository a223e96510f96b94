// Files and output of the program: whole, in the given place, or a named error; never lost, never in another's place.
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "plumb/cli/command_testing.h"

namespace {

class Outputs : public Command {
 protected:
  static size_t parts() {
    size_t found = 0;
    for (const auto& entry : fs::directory_iterator(folder())) found += entry.path().extension() == ".part";
    return found;
  }
};

TEST_F(Outputs, GoToAFifoAndLeaveItOne) {
  const Ended run = shell("mkfifo pipe; timeout 300 cat pipe > got.txt & " PLUMB_COMMAND
                          " show mlp.pt2 -o pipe; code=$?; wait; (exit $code)");
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(read(folder() / "got.txt"), plumb("show mlp.pt2").out);
  EXPECT_TRUE(fs::is_fifo(folder() / "pipe"));
}

TEST_F(Outputs, GoToADeviceAndLeaveItOne) {
  const fs::path device = folder() / "null";
  if (::mknod(device.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0) GTEST_SKIP() << "only root makes devices";
  EXPECT_EQ(plumb("show mlp.pt2 -o null").code, 0);
  EXPECT_TRUE(fs::is_character_file(device));
}

TEST_F(Outputs, FollowALinkAlsoToWhatIsNotThereYet) {
  fs::create_directory(folder() / "other");
  fs::create_symlink("other/new.txt", folder() / "link.txt");
  ASSERT_EQ(plumb("show mlp.pt2 -o link.txt").code, 0);
  EXPECT_TRUE(fs::is_symlink(folder() / "link.txt"));
  EXPECT_EQ(read(folder() / "other/new.txt"), plumb("show mlp.pt2").out);
}

TEST_F(Outputs, LeaveLinksThatLeadToNoFile) {
  fs::create_symlink("circle.txt", folder() / "circle.txt");
  fs::create_symlink("no/such/file.pt2", folder() / "nowhere.pt2");
  fs::create_directory_symlink(".", folder() / "dot.pt2");
  for (const char* arguments :
       {"show mlp.pt2 -o circle.txt", "scale mlp.pt2 -o nowhere.pt2", "scale mlp.pt2 -o dot.pt2",
        "train lm.pt2 --data tokens.bin --steps 1 --save nowhere.pt2"}) {
    const Ended run = plumb(arguments);
    EXPECT_EQ(run.code, 1) << arguments;
    EXPECT_NE(run.err.find("cannot be written: "), std::string::npos) << run.err;
  }
  for (const char* link : {"circle.txt", "nowhere.pt2", "dot.pt2"})
    EXPECT_TRUE(fs::is_symlink(folder() / link)) << link;
}

TEST_F(Outputs, AreNotMixedWithWhatIsPrintedWhereStandardStreamsAreClosed) {
  const Ended run = shell(PLUMB_COMMAND " train lm.pt2 --data tokens.bin --steps 2 --save closed.pt2 <&- >&- 2>&-");
  EXPECT_EQ(run.code, 1);  // there is nobody to print to
  EXPECT_EQ(plumb("show closed.pt2").code, 0);
  EXPECT_EQ(shell(PLUMB_COMMAND " scale lm.pt2 -o closed.pt2 2>&-").code, 0);
  EXPECT_EQ(plumb("show closed.pt2").code, 0);
}

TEST_F(Outputs, ThatCannotBeWrittenAreErrors) {
  for (const char* arguments : {"show lm.pt2", "--help", "run mlp.pt2 --input x.pt", "show lm.pt2 --json"}) {
    const Ended run = shell(std::string(PLUMB_COMMAND " ") + arguments + " > /dev/full");
    EXPECT_EQ(run.code, 1) << arguments;
    EXPECT_NE(run.err.find("cannot"), std::string::npos) << run.err;
  }
}

TEST_F(Outputs, ThatNobodyReadsToTheEndFailNoTraining) {
  std::ofstream(folder() / "unread.py") << "import os, subprocess\n"
                                           "read, write = os.pipe()\n"
                                           "os.close(read)\n"
                                           "p = subprocess.run(['" PLUMB_COMMAND
                                           "', *'train lm.pt2 --data tokens.bin --steps 2 --save read.pt2'.split()], "
                                           "stdout=write, stderr=subprocess.PIPE, "
                                           "text=True)\n"
                                           "print(p.returncode, p.stderr, sep='\\n')\n";
  const std::string said = shell(PLUMB_TEST_PYTHON " unread.py").out;
  EXPECT_EQ(said.rfind("0\nplumb: standard output cannot be written: nobody reads it any more", 0), 0u) << said;
  EXPECT_EQ(plumb("show read.pt2").code, 0);
}

TEST_F(Outputs, BeyondALimitOfFileSizesAreErrors) {
  for (const char* arguments :
       {"scale lm.pt2 -o big.pt2", "run mlp.pt2 --input x=x.pt --backward -o big.pt", "show lm.pt2 -o big.txt"}) {
    const Ended run = shell(std::string("ulimit -f 1; " PLUMB_COMMAND " ") + arguments);
    EXPECT_EQ(run.code, 1) << arguments << "\n" << run.err;
    EXPECT_NE(run.err.find("cannot be written: File too large"), std::string::npos) << run.err;
  }
  EXPECT_EQ(parts(), 0u);
}

TEST_F(Outputs, WithoutDescriptorsAreErrorsThatSaySo) {
  const std::string train =
      "train mlp.pt2 --data rows.pt --targets targets.pt --loss mse --steps 2 --stages 2 --save few.pt2";
  ASSERT_EQ(plumb(train).code, 0) << plumb(train).err;
  int failed = 0;
  const std::string lasting = train + " --max-restarts 1";
  for (const std::string& arguments :
       {std::string("scale mlp.pt2 -o few.pt2"), std::string("run mlp.pt2 --input x=x.pt -o few.pt"), train, lasting}) {
    for (int most = 4; most < 24; most += arguments.starts_with("train") ? 6 : 4) {
      const Ended run =
          shell("ulimit -n " + std::to_string(most) + "; exec timeout 300 " PLUMB_COMMAND " " + arguments);
      if (run.code == 0) continue;
      if (run.err.find("while loading shared libraries") != std::string::npos) continue;  // no program starts
      failed++;
      EXPECT_LT(run.code, 124) << "ended by a signal, or too late: " << most << ", " << arguments << "\n" << run.err;
      EXPECT_NE(run.err.find("Too many open files"), std::string::npos) << most << ", " << arguments << "\n" << run.err;
    }
  }
  EXPECT_GT(failed, 3);
  EXPECT_EQ(parts(), 0u);
}

TEST_F(Outputs, AreNeverTheInputUnderWhateverName) {
  shell(
      "cp lm.pt2 in.pt2; ln -s in.pt2 soft.pt2; ln in.pt2 hard.pt2; cp x.pt in.pt; cp tokens.bin in.bin; mkdir -p cut; "
      "cp lm.pt2 cut/stage0.pt2; " PLUMB_COMMAND " show lm.pt2 -o in.txt");
  const std::string train = "train in.pt2 --data in.bin --steps 1 ";
  const std::vector<std::string> commands = {"scale in.pt2 -o in.pt2",
                                             "scale in.pt2 -o ./cut/../in.pt2",
                                             "scale in.pt2 -o soft.pt2",
                                             "scale soft.pt2 -o in.pt2",
                                             "scale in.pt2 -o hard.pt2",
                                             "scale in.pt2 -o new.pt2 --html in.pt2",
                                             "opt in.pt2 --pass=dead_code -o in.pt2",
                                             "opt in.txt --pass=dead_code -o in.txt",
                                             "show in.txt -o in.txt",
                                             "show in.pt2 --html in.pt2",
                                             "run mlp.pt2 --input in.pt -o in.pt",
                                             "run mlp.pt2 --input x=in.pt -o ./in.pt",
                                             "track mlp.pt2 --input in.pt --svg in.pt",
                                             "split cut/stage0.pt2 --stages 2 -o cut",
                                             "plan in.pt2 --ranks 2 --csv in.pt2",
                                             train + "--save in.pt2",
                                             train + "--csv in.bin",
                                             train + "--page hard.pt2",
                                             train + "--eval-data tokens.bin --timeline in.svg --csv tokens.bin"};
  const auto contents = [] {
    std::string all;
    for (const char* name : {"in.pt2", "hard.pt2", "in.pt", "in.bin", "in.txt", "cut/stage0.pt2", "tokens.bin"})
      all += read(folder() / name);
    return all;
  };
  const std::string before = contents();
  for (const std::string& command : commands) {
    wrong(command, "is the same file as the input");
    EXPECT_EQ(contents(), before) << command;
  }
  EXPECT_TRUE(fs::is_symlink(folder() / "soft.pt2"));
}

TEST_F(Outputs, OfOneCommandAreFilesOfTheirOwn) {
  for (const char* command :
       {"show mlp.pt2 -o two --html two", "show mlp.pt2 -o two --html ./two", "scale mlp.pt2 -o two.pt2 --html two.pt2",
        "track mlp.pt2 --input in.pt --svg two -o two", "track --history h.bin --svg two --html two",
        "plan mlp.pt2 --ranks 2 --csv two --svg two",
        "train lm.pt2 --data tokens.bin --timeline two.svg --page two.svg",
        "train lm.pt2 --data tokens.bin --stages 2 --hashes two --csv two.rank1",
        "verdict lm.pt2 --data tokens.bin --html two -o two"}) {
    wrong(command, "is the same file as that of");
    EXPECT_FALSE(fs::exists(folder() / "two")) << command;
  }
}

TEST_F(Outputs, ThatNobodyReadsAnyMoreEndACommandQuietly) {
  // Python's programs, the installed command among them, have what they start ignore the signal.
  for (const char* ignored : {"", "trap '' PIPE; "}) {
    const Ended run = shell("sh -c \"" + std::string(ignored) + PLUMB_COMMAND " show lm.pt2\" | head -c 1");
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(run.err.find("plumb: "), std::string::npos) << run.err;
  }
}

TEST_F(Outputs, OfATrainingAreMadeBesideFoldersOfAnyName) {
  shell("mkdir -p beside/x");
  for (const char* option : {"--checkpoints", "--tensorboard", "--dump"}) {
    const Ended run = plumb("train lm.pt2 --data tokens.bin --steps 1 " + std::string(option) + " beside/" + option);
    EXPECT_EQ(run.code, 0) << run.err;
  }
}

TEST_F(Outputs, SayThatARunWasFinishedAndThatADeviceIsNotThere) {
  const std::string run = "train lm.pt2 --data tokens.bin --steps 2 --checkpoints finished";
  ASSERT_EQ(plumb(run).code, 0);
  for (const char* steps : {" --steps 2", " --steps 1"}) {
    const Ended again = plumb(run + steps);
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_NE(again.out.find("all 2 steps were done before, in finished: nothing is trained"), std::string::npos)
        << again.out;
  }
  const Ended left = plumb(run + " --page left.html --timeline left.svg --eval-data tokens.bin --eval-batches 1");
  EXPECT_EQ(left.code, 0) << left.err;
  EXPECT_NE(left.err.find("nothing is made for --page left.html, --timeline left.svg: all steps were done before"),
            std::string::npos)
      << left.err;
  EXPECT_NE(left.out.find("evaluation after step 2: loss "), std::string::npos) << left.out;
  wrong("train lm.pt2 --data tokens.bin --steps 1 --device vulkan",
        "--device vulkan: this torch was built without VULKAN");
}

TEST_F(Outputs, AreTriedBeforeTraining) {
  for (const char* wrong : {"--timeline step.png", "--timeline no/such/step.svg", "--save no/such/a.pt2",
                            "--tensorboard mlp.pt2/tb", "--checkpoints mlp.pt2/ck", "--dump mlp.pt2/d --stages 2"}) {
    const Ended run = plumb("train lm.pt2 --data tokens.bin --steps 2 --save tried.pt2 " + std::string(wrong));
    EXPECT_NE(run.code, 0) << wrong;
    EXPECT_EQ(run.out, "") << wrong;
    EXPECT_EQ(run.err.find("[rank"), std::string::npos) << run.err;
  }
}

TEST_F(Outputs, HoldTheWeightsBeforeAnythingIsDrawn) {
  const Ended run = plumb("train lm.pt2 --data tokens.bin --steps 2 --json --save drawn.pt2 --timeline step.json");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_LT(run.out.find("\"saved\""), run.out.find("\"drew\"")) << run.out;
}

TEST_F(Outputs, AreNotWeightsThatAreNoNumbers) {
  for (const char* stages : {"1", "2"}) {
    const Ended run =
        plumb(std::string("train lm.pt2 --data tokens.bin --steps 50 --optimizer sgd --lr 1e30 --save nan.pt2 ") +
              "--stages " + stages);
    EXPECT_EQ(run.code, 1) << run.err;
    EXPECT_NE(run.err.find("the loss of step "), std::string::npos) << run.err;
    EXPECT_FALSE(fs::exists(folder() / "nan.pt2"));
  }
}

// An infinity that a mask makes ends in a softmax. What the data holds no rate can mend.
TEST_F(Outputs, NameTheNodeThatWritesAValueWhichABackwardNeeds) {
  python(R"py(
class Written(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
    def forward(self, x):
        y = torch.exp(self.fc(x))
        z = y * 2
        return y.add_(1) + z
torch.export.save(torch.export.export(Written(), (torch.randn(6, 8),)), "written.pt2")
)py");
  const std::string data = " --data rows.pt --targets targets.pt --loss mse --batch 6";
  for (const std::string& command : {std::string("run written.pt2 --backward --input x.pt"),
                                     std::string("track written.pt2 --backward --input x.pt"),
                                     "verdict written.pt2" + data, "train written.pt2 --steps 1" + data}) {
    const Ended ended = plumb(command);
    EXPECT_EQ(ended.code, 1) << command;
    const std::regex named("Written in place: %exp[a-z_]* by node %add_ .*check\\.py:10");
    EXPECT_TRUE(std::regex_search(ended.err, named)) << command << "\n" << ended.err;
  }
}

TEST_F(Outputs, NameTheFirstValueThatIsNotFinite) {
  python(
      "from torch import nn\n"
      "class Masked(nn.Module):\n"
      "    def __init__(self):\n"
      "        super().__init__()\n"
      "        self.table, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)\n"
      "        self.register_buffer('mask', torch.full((8, 8), -torch.inf).triu(1))\n"
      "    def forward(self, x):\n"
      "        h = self.table(x)\n"
      "        weights = ((h @ h.mT).masked_fill(self.mask < 0, -torch.inf) + self.mask).softmax(-1)\n"
      "        return self.head((1e4 * (weights @ h)).exp())\n"
      "torch.export.save(torch.export.export(Masked(), (torch.zeros(4, 8, dtype=torch.long),)), 'masked.pt2')\n"
      "torch.export.save(torch.export.export(nn.Linear(4, 1), (torch.zeros(8, 4),)), 'line.pt2')\n"
      "x, y = torch.ones(8, 4), torch.ones(8, 1)\n"
      "torch.save(x, 'ones.pt'), torch.save(y, 'targets.pt')\n"
      "x[3, 1], y[5] = torch.nan, -torch.inf\n"
      "torch.save(x, 'nan.pt'), torch.save(y, 'infinite.pt'), torch.save(torch.full((8, 4), 1e6), 'large.pt')\n");
  const auto ends = [&](const std::string& arguments, const std::string& first, const std::string& remedy) {
    const Ended run = plumb("train " + arguments + " --steps 1 --save ended.pt2");
    EXPECT_EQ(run.code, 1);
    EXPECT_NE(run.err.find("first was " + first), std::string::npos) << run.err;
    EXPECT_NE(run.err.find("try: " + remedy), std::string::npos) << run.err;
  };
  ends("masked.pt2 --data tokens.bin --batch 4", "the value of %exp ", "a smaller --lr");
  ends("line.pt2 --data nan.pt --targets targets.pt --loss mse --batch 8", "the value of input: 1 nan",
       "data without NaN");
  ends("line.pt2 --data ones.pt --targets infinite.pt --loss mse --batch 8", "a value of the targets",
       "data without NaN");
  ends("line.pt2 --data large.pt --targets targets.pt --loss mse --batch 8 --formats fp16 --dump rounded",
       "the value of %input_fwd (plumb::simulate_format)", "plumb verdict, which says which products need a wider");
  EXPECT_NE(plumb("run rounded/model.pt2 --input rounded/inputs.pt").out.find("nan"), std::string::npos);
}

TEST_F(Outputs, AreNotOfATrainingOnTheBytesOfAnArchive) {
  python(
      "import gzip, io, json, numpy, os, pickle, tarfile\n"
      "text = open('tokens.bin', 'rb').read()\n"
      "torch.save(torch.zeros(300), 'old.bin', _use_new_zipfile_serialization=False)\n"
      "torch.save(torch.zeros(300), 'new.bin')\n"
      "open('gz.bin', 'wb').write(gzip.compress(os.urandom(900)))\n"
      "open('pickle.bin', 'wb').write(pickle.dumps(text))\n"
      "numpy.save(open('array.bin', 'wb'), numpy.zeros(300))\n"
      "tarfile.open('tar.bin', 'w').add('tokens.bin')\n"
      "header = json.dumps({'w': {'dtype': 'U8', 'shape': [4000], 'data_offsets': [0, 4000]}}).encode()\n"
      "open('tensors.bin', 'wb').write(len(header).to_bytes(8, 'little') + header + text)\n"
      "os.makedirs('corpus/sub')\n"
      "open('corpus/a.txt', 'wb').write(text)\n"
      "open('corpus/sub/m.pt2', 'wb').write(open('lm.pt2', 'rb').read())\n");
  const std::pair<const char*, const char*> files[] = {{"lm.pt2", "a zip archive, as .pt2"},
                                                       {"old.bin", "a file of torch.save"},
                                                       {"new.bin", "a zip archive"},
                                                       {"gz.bin", "compressed by gzip"},
                                                       {"pickle.bin", "a pickle"},
                                                       {"array.bin", "a NumPy array"},
                                                       {"tar.bin", "a tar archive"},
                                                       {"tensors.bin", "tensors, whose"},
                                                       {"corpus", "corpus/sub/m.pt2: is no text"}};
  for (const auto& [file, what] : files) {
    wrong("train lm.pt2 --steps 1 --data " + std::string(file), what);
    wrong("train lm.pt2 --steps 1 --data tokens.bin --eval-every 1 --eval-data " + std::string(file), what);
  }
  wrong("eval lm.pt2 --data lm.pt2", "--data lm.pt2: is no text and no tokens");
  EXPECT_EQ(plumb("train lm.pt2 --steps 1 --data corpus --data-pattern '*.txt'").code, 0);
}

TEST_F(Outputs, NameATokenThatTheModelDoesNotKnow) {
  std::ofstream(folder() / "large.bin") << std::string(4000, '\xFF');
  wrong("train lm.pt2 --data large.bin --token-type u16 --steps 1", "has token 65535, the model knows 0 to");
}

TEST_F(Outputs, NameAStepThatAHistoryDoesNotHave) {
  std::ofstream(folder() / "rules.toml") << "every = 1\n[[rule]]\n";
  ASSERT_EQ(plumb("train lm.pt2 --data tokens.bin --steps 3 --record rules.toml --history run.history").code, 0);
  wrong("track --history run.history --step 99", "ends at step 3");
  EXPECT_EQ(plumb("track --history run.history --step 3").code, 0);
}

TEST_F(Outputs, AreReadFromRegularFilesAlone) {
  ASSERT_EQ(shell("mkfifo fifo.txt fifo.pt2 fifo.bin").code, 0);  // other tests of this folder have an in.pt2
  for (const char* arguments : {"show fifo.txt", "show fifo.pt2", "show /dev/zero", "train lm.pt2 --data fifo.bin"}) {
    const Ended run = shell(std::string("timeout 300 " PLUMB_COMMAND " ") + arguments);
    EXPECT_EQ(run.code, 1) << arguments << "\n" << run.err;
    EXPECT_NE(run.err.find("not a regular file"), std::string::npos) << run.err;
  }
}

constexpr const char* kInterrupt = R"py(
import os, signal, subprocess, sys, time
stages, who, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
p = subprocess.Popen([COMMAND, "train", "lm.pt2", "--data", "tokens.bin", "--steps", "100000", "--batch", "4",
                      "--microbatches", "2", "--stages", stages, "--save", "stopped.pt2"],
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
while True:
    line = p.stdout.readline()
    assert line, p.stderr.read()
    if line.startswith("step 3/"):
        break
for _ in range(times):
    os.killpg(p.pid, signal.SIGINT) if who == "all" else p.send_signal(getattr(signal, who))
out, err = p.communicate(timeout=300)
print(p.returncode)
print(out[-300:])
print(err)
print("parts:", [f for f in os.listdir() if f.endswith(".part")])
)py";

TEST_F(Outputs, HoldWhatWasReachedWhenTrainingIsInterrupted) {
  std::ofstream(folder() / "interrupt.py") << "COMMAND = '" PLUMB_COMMAND "'\n" << kInterrupt;
  for (const char* how : {"1 SIGINT 1", "2 SIGINT 1", "2 all 1"}) {
    fs::remove(folder() / "stopped.pt2");
    const Ended run = shell(PLUMB_TEST_PYTHON " interrupt.py " + std::string(how));
    EXPECT_EQ(run.out.rfind("-2\n", 0), 0u) << run.out << run.err;
    EXPECT_NE(run.out.find("interrupted: step "), std::string::npos) << run.out;
    EXPECT_NE(run.out.find("saved stopped.pt2"), std::string::npos) << run.out;
    EXPECT_EQ(run.out.find("nothing was saved"), std::string::npos) << run.out;
    EXPECT_EQ(plumb("show stopped.pt2").code, 0);
  }
}

TEST_F(Outputs, LeaveNoHalfFilesWhenTrainingIsEndedAtOnce) {
  std::ofstream(folder() / "interrupt.py") << "COMMAND = '" PLUMB_COMMAND "'\n" << kInterrupt;
  for (const char* how : {"2 SIGTERM 1", "2 SIGHUP 1", "2 SIGQUIT 1", "1 SIGTERM 1", "1 SIGQUIT 1", "1 SIGINT 2"}) {
    fs::remove(folder() / "stopped.pt2");
    const Ended run = shell(PLUMB_TEST_PYTHON " interrupt.py " + std::string(how));
    EXPECT_EQ(run.out.rfind("-", 0), 0u) << run.out << run.err;
    EXPECT_NE(run.out.find("parts: []"), std::string::npos) << run.out;
  }
}

// The launcher's handler ends it; that its ranks have saved, it knows from what they print.
TEST_F(Outputs, ThatRanksSavedAreNotDeniedWhenASecondSignalEndsTheirLauncher) {
  std::ofstream(folder() / "saved.py")
      << "import os, signal, subprocess, sys\n"
         "p = subprocess.Popen(['" PLUMB_COMMAND
         "', *'train lm.pt2 --data tokens.bin --steps 100000 --batch 4 "
         "--microbatches 2 --stages 2 --checkpoints twice --checkpoint-every 2'.split()],\n"
         "    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)\n"
         "while not p.stdout.readline().startswith('wrote twice'): pass\n"
         "p.send_signal(signal.SIGINT); p.send_signal(signal.SIGINT)\n"
         "out, err = p.communicate(timeout=300)\n"
         "print(p.returncode, err)\n";
  const Ended run = shell(PLUMB_TEST_PYTHON " saved.py");
  EXPECT_EQ(run.out.rfind("-2 ", 0), 0u) << run.out << run.err;
  EXPECT_NE(run.out.find("interrupted"), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("nothing was saved"), std::string::npos) << run.out;
}

TEST_F(Outputs, AndInputsThatAreMissingOrCorruptFailCleanly) {
  fs::create_directories(folder() / "folder.pt2");
  for (const char* arguments :
       {"show missing.pt2", "show missing.txt", "show corrupt.pt2", "show x.pt", "show /tmp",
        "run mlp.pt2 --input missing.pt", "run mlp.pt2 --input /tmp", "split lm.pt2 --at nope -o q",
        "show mlp.pt2 -o /no/such/folder/a.txt", "show folder.pt2", "run mlp.pt2 --input x.pt -o /no/such/y.pt",
        "opt mlp.pt2 --pass=dead_code -o folder.pt2", "scale lm.pt2 -o /no/such/a.pt2",
        "split lm.pt2 --stages 2 -o mlp.pt2", "track mlp.pt2 --input x.pt --html /no/such/a.html",
        "train lm.pt2 --data tokens.bin --save folder.pt2"}) {
    const Ended run = plumb(arguments);
    EXPECT_EQ(run.code, 1) << arguments << "\n" << run.err;
    EXPECT_EQ(run.err.rfind("plumb: ", 0), 0u) << run.err;
    EXPECT_EQ(run.err.find("frame #"), std::string::npos) << run.err;
  }
}

}  // namespace
