// The real program, run on files that Python wrote.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>

#include "tests/command/request.h"

namespace command_testing {

namespace fs = std::filesystem;

inline fs::path new_folder() {
  char name[] = "/tmp/plumb_cli_XXXXXX";
  return ::mkdtemp(name);
}

inline constexpr const char* kWrite = R"py(
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
class Tied(Lm):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 256, bias=False)
        self.head.weight = self.wte.weight
torch.export.save(torch.export.export(Tied(), (torch.randint(256, (2, 12)),)), "tied.pt2")
flat = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Flatten(0))
torch.export.save(torch.export.export(flat, (x,)), "flat.pt2")
torch.save(x, "x.pt")
torch.save(torch.randint(256, (2, 12)), "ids.pt")
ids = torch.randint(256, (2, 12))
torch.export.save(torch.export.export(Lm(), (ids,), dynamic_shapes=({0: torch.export.Dim("b", min=1)},)), "dynamic.pt2")
y = m(x)
y.sum().backward()
torch.save({"y": y.detach(), "a": m.a.weight.grad}, "want.pt")
torch.save(torch.randn(60, 8), "rows.pt")
torch.save(torch.randn(60, 4), "targets.pt")
open("tokens.bin", "wb").write(bytes(random.Random(0).choices(b"abcdefgh", k=4000)))
class Dict(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
    def forward(self, parts, scale: float, *, shift=None):
        self.calls += 1
        y = self.fc(self.norm(parts["a"]) * scale + parts["b"])
        return {"logits": y, "loss": y.pow(2).mean(), "first": y[0] if shift is None else y[0] + shift}
parts = {"a": torch.randn(5, 4), "b": torch.randn(4)}
torch.export.save(torch.export.export(Dict(), (parts, 2.0), {"shift": torch.tensor(0.5)}), "dict.pt2")
torch.save(parts["a"], "a.pt")
torch.save(parts["b"], "b.pt")
torch.save(torch.randn(6, 8).double(), "double.pt")
open("corrupt.pt2", "wb").write(open("mlp.pt2", "rb").read()[:1500])
)py";

// Returns the folder of the files that Python writes, made once for all suites: that takes seconds.
inline const fs::path& written_by_python() {
  struct Written {
    Written() {
      std::ofstream(path / "write.py") << kWrite;
      const std::string run = "cd " + path.string() + " && " PLUMB_TEST_PYTHON " write.py";
      EXPECT_EQ(std::system(run.c_str()), 0);
    }
    ~Written() { fs::remove_all(path); }
    fs::path path = new_folder();
  };
  static const Written written;
  return written.path;
}

// Returns the words that start what `program` runs in a fork of a process that has loaded libtorch, for that takes 0.2
// s, or 1.5 s in Python (tests/command). `end`: of the name of its socket.
inline std::string loaded(const std::string& end, const std::function<void(const std::string& socket)>& program) {
  const std::string name = std::to_string(::getpid()) + end;
  const sockaddr_un address = address_of(name);
  const int listening = ::socket(AF_UNIX, SOCK_STREAM, 0);
  EXPECT_EQ(::bind(listening, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(listening, 64), 0);
  if (::fork() == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    program(std::to_string(listening));
    ::_exit(127);
  }
  ::close(listening);
  return PLUMB_ASK " " + name;
}

inline std::string command() {
#ifdef PLUMB_LOADED_COMMAND
  static const std::string words = loaded("", [](const std::string& socket) {
    ::setenv("LD_PRELOAD", PLUMB_LOADED_COMMAND, 1);
    ::setenv("PLUMB_COMMANDS_FROM", socket.c_str(), 1);
    ::execl(PLUMB_COMMAND, PLUMB_COMMAND, nullptr);
  });
  return words;
#else
  return PLUMB_COMMAND;  // a sanitizer must be the first library
#endif
}

inline std::string python() {
  static const std::string words = loaded("_python", [](const std::string& socket) {
    ::execl(PLUMB_TEST_PYTHON, PLUMB_TEST_PYTHON, PLUMB_LOADED_PYTHON, socket.c_str(), nullptr);
  });
  return words;
}

}  // namespace command_testing

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

// Python's `said`: all that was written to the terminal `write`, which comes to `read` piece by piece.
[[maybe_unused]] const char* const kReadTerminal = R"py(
os.close(write)
said = b""
try:
    while piece := os.read(read, 65536):
        said += piece
except OSError:  # so a terminal ends
    pass
said = said.decode()
)py";

class Command : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    // A shell's background jobs, and what they start, ignore these.
    for (const int key : {SIGINT, SIGQUIT}) std::signal(key, SIG_DFL);
    folder() = command_testing::new_folder();
    fs::copy(command_testing::written_by_python(), folder());
  }
  static void TearDownTestSuite() { fs::remove_all(folder()); }
  static fs::path& folder() {
    static fs::path path;
    return path;
  }
  static Ended shell(const std::string& command) {
    Ended run;
    const int status = std::system(("cd " + folder().string() + " && { " + command + "; } > .out 2> .err").c_str());
    run.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    run.out = read(folder() / ".out");
    run.err = read(folder() / ".err");
    return run;
  }
  static Ended plumb(const std::string& arguments) { return shell(command_testing::command() + " " + arguments); }
  // Runs Python on the folder's files; fails the test if it does.
  static void python(const std::string& text) {
    std::ofstream(folder() / "check.py") << "import torch\n" << text << "\n";
    const Ended run = shell(command_testing::python() + " check.py");
    EXPECT_EQ(run.code, 0) << run.err;
  }
  // Returns the lines of standard error but for those that say how long a part took, which slow machines have.
  static std::string without_times(const std::string& err) {
    static const std::regex times("[^\n]*: [0-9]+\\.[0-9] s\n");
    return std::regex_replace(err, times, "");
  }
  // Returns a port that this process alone asks for: below those that systems give to connections.
  static std::string own_port() { return std::to_string(20000 + ::getpid() % 9000); }
  static void wrong(const std::string& arguments, const std::string& says) {
    const Ended run = plumb(arguments);
    EXPECT_EQ(run.code, 2) << arguments << "\n" << run.err;
    EXPECT_NE(run.err.find(says), std::string::npos) << arguments << "\n" << run.err;
    EXPECT_NE(run.err.find("try: "), std::string::npos) << run.err;
  }
};

}  // namespace
