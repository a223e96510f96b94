// The table of passes: every pass has a name, a summary and options, and can be run alone on a file.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

// Options as given on a command line: name -> text. A pass refuses names it does not know.
using PassOptions = std::map<std::string, std::string>;

struct PassOption {
  std::string name, default_value, summary;
};

struct Pass {
  std::string name;     // "dead_code"
  std::string summary;  // one sentence
  std::vector<PassOption> options;
  // Returns whether it changed anything. Notes for the user (what was changed, what was left alone and why) go to
  // `report` if it is not null.
  std::function<bool(GraphModule&, const PassOptions&, std::vector<std::string>* report)> run;
};

// Returns every registered pass by name. find_pass() throws for an unknown name, with near misses; it knows `raise`,
// the former name of `fuse_patterns`.
std::vector<const Pass*> all_passes();
const Pass& find_pass(std::string_view name);

#ifdef NDEBUG
inline constexpr bool kCheckPasses = false;
#else
inline constexpr bool kCheckPasses = true;
#endif

// Runs a function that changes a module; every rewrite of a user's graph goes through here. Lints the graph before and
// afterwards: then an error begins "after pass NAME". With `check` (on in tests and debug builds) state and specs are
// linted too, and the graph's hash is compared with the returned value. Returns whether anything changed.
bool run_checked(const std::string& name, const std::function<bool()>& run, GraphModule& module,
                 bool check = kCheckPasses);

// Runs a pass of the table by run_checked().
bool run_pass(const Pass& pass, GraphModule& module, const PassOptions& options = {},
              std::vector<std::string>* report = nullptr, bool check = kCheckPasses);

// One step of a sequence of passes.
struct PassStep {
  const Pass* pass = nullptr;
  PassOptions options;
};

// Parses "NAME[,option=value]..."; a part without "=", or with "::" first, belongs to the value before ("exclude=a,b").
// Throws Error(InvalidArgument) for an unknown pass or option, naming the known ones.
PassStep parse_pass_step(const std::string& text);

// The outcome of a step.
struct PassResult {
  std::string pass;
  bool changed = false;
  double seconds = 0;
  std::vector<std::string> notes;
};

struct RunPassesOptions {
  bool check = kCheckPasses;
  // Folder for the graph's text before the first step and after each: 00-input.txt, 01-dead_code.txt, ... Empty: none.
  std::string dump;
  std::function<void(const PassStep&)> before;   // called before a step
  std::function<void(const PassResult&)> after;  // and after it
};

// Runs steps in order. The module may be changed half-way if one fails.
std::vector<PassResult> run_passes(const std::vector<PassStep>& steps, GraphModule& module,
                                   const RunPassesOptions& options = {});

// Adds a pass to the table at start-up: `static RegisterPass reg({...});` at namespace scope of the pass's source.
struct RegisterPass {
  explicit RegisterPass(Pass pass);
};

// Options as given; the default where they are not. Throw an Error that names option and pass.
bool flag_option(const PassOptions& options, std::string_view name, bool fallback);
int64_t number_option(const PassOptions& options, std::string_view name, int64_t fallback);
double real_option(const PassOptions& options, std::string_view name, double fallback);

// Returns whether any of the node's results is used.
bool is_used(const Node& node);

}  // namespace plumb
