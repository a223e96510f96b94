// plumb import: a folder of transformers as a .pt2 file without its weights.
#include "plumb/cli/import.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "plumb/cli/commands.h"
#include "plumb/cli/common.h"
#include "plumb/cli/progress.h"
#include "plumb/core/error.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/launch/launch.h"

namespace plumb::cli {
namespace fs = std::filesystem;

// Does the same as python -m plumb.hf, but imports nothing from the current folder: a downloaded one may hold a
// torch.py.
constexpr const char* kReadFolder = R"(
import importlib.util, sys
sys.path[:] = [p for p in sys.path if p]
if importlib.util.find_spec("plumb") is None:
    sys.exit(3)
from plumb.hf.__main__ import main
sys.exit(main())
)";
constexpr int kHasNoPlumb = 3;

namespace {
std::atomic<const char*> temporary_folder = nullptr, temporary_file = nullptr;
}  // namespace

TemporaryFile::TemporaryFile(const std::string& name) {
  std::error_code error;
  folder_ = (fs::temp_directory_path(error) / "plumb-XXXXXX").string();
  // A signal that came between the folder and its name here would leave the folder behind.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  const bool made = !error && ::mkdtemp(folder_.data()) != nullptr;
  const int why = errno;
  path_ = folder_ + "/" + name;
  if (made) {
    temporary_file = path_.c_str();
    temporary_folder = folder_.c_str();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!made) {
    throw Error(ErrorKind::CannotWrite, "no temporary folder can be made: " + std::string(std::strerror(why)), "",
                "set TMPDIR to a folder that can be written");
  }
}

TemporaryFile::~TemporaryFile() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
  temporary_folder = temporary_file = nullptr;
}

void TemporaryFile::remove() noexcept {
  if (const char* file = temporary_file) ::unlink(file);
  if (const char* folder = temporary_folder) ::rmdir(folder);
}

void import_folder(const ImportOptions& o) {
  nlohmann::json asked = {
      {"folder", o.folder}, {"path", o.output}, {"batch", o.batch}, {"dtype", o.dtype}, {"training", o.training}};
  if (o.length > 0) asked["length"] = o.length;
  if (o.fresh) asked["fresh"] = *o.fresh;
  LaunchOptions launch;
  launch.program = process_variable("PLUMB_PYTHON").value_or("python3");
  std::string text;
  try {
    text = asked.dump();
  } catch (const nlohmann::json::exception&) {
    throw UsageError("FOLDER: its name is no UTF-8", "another name");
  }
  launch.arguments = {"-c", kReadFolder, text};
  launch.on_line = [](int, bool is_stderr, const std::string& line) {
    (is_stderr ? std::cerr : std::cout) << line << std::endl;
  };
  const LaunchResult result = launch_local(launch);
  if (result.exit_code() == 0) return;
  if (result.exit_code() == kHasNoPlumb) {
    throw Error(ErrorKind::ExecutionFailed, "the Python '" + launch.program + "' has no plumb, which reads the folder",
                "", "PLUMB_PYTHON=/path/to/python of the environment that plumb is installed in");
  }
  throw ExitCode{1};
}

void add_import(CLI::App& app) {
  auto o = std::make_shared<ImportOptions>();
  CLI::App* sub = app.add_subcommand(
      "import", "Makes a .pt2 file of a folder of transformers (Python's package), without loading its weights");
  sub->add_option("FOLDER", o->folder, "With config.json, and safetensors or the config alone. No code in it is run")
      ->required();
  sub->add_option("-o,--out,--output", o->output, "The .pt2 file")->required();
  sub->add_option("--batch", o->batch, "Rows of the inputs")->check(whole_number(1, 1 << 20))->capture_default_str();
  sub->add_option("--length", o->length, "Tokens of a row (default: the config's longest, at most 2048)")
      ->check(whole_number(1, 1 << 24));
  sub->add_option("--dtype", o->dtype, "Type of the weights: auto (the config's), float32, bfloat16 or float16")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16"}))
      ->capture_default_str();
  sub->add_flag_callback("--eval", [o] { o->training = false; }, "For inference: without dropout and the like");
  sub->add_option(
      "--fresh", o->fresh,
      "Weights as the model's class makes them anew from this seed, written into the file (default: they stay "
      "in FOLDER, and plumb train --weights FOLDER reads them)");
  sub->footer(
      "Example:\n  plumb import Llama-3.2-1B -o llama.pt2 --length 512\n  plumb train llama.pt2 --weights Llama-3.2-1B "
      "--data tokens.bin --token-type i32 --stages 2 --microbatches 4 --save-hf tuned");
  sub->callback([o] {
    if (!is_pt2(o->output)) throw UsageError("-o " + o->output + ": is no .pt2 name", "-o OUT.pt2");
    check_writable({{"-o", o->output}});
    if (!fs::is_directory(o->folder))
      throw UsageError("FOLDER " + o->folder + ": is no folder", "a folder with config.json");
    import_folder(*o);
    Progress progress(0);
    say_wrote(progress, o->output);
  });
}

}  // namespace plumb::cli
