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
  // Answers whether it changed anything. Notes for the user (what was changed, what was left alone and why) go to
  // `report` if it is not null.
  std::function<bool(GraphModule&, const PassOptions&, std::vector<std::string>* report)> run;
};

// Every registered pass by name. find_ throws, naming near misses.
std::vector<const Pass*> all_passes();
const Pass& find_pass(std::string_view name);

// Runs a pass; `check` (on in tests and debug builds) lints afterwards ("after pass X: ...") and compares the graph's
// hash with the pass's answer.
#ifdef NDEBUG
inline constexpr bool kCheckPasses = false;
#else
inline constexpr bool kCheckPasses = true;
#endif
bool run_pass(const Pass& pass, GraphModule& module, const PassOptions& options = {},
              std::vector<std::string>* report = nullptr, bool check = kCheckPasses);

// Adds a pass to the table at start-up: `static RegisterPass reg({...});` at namespace scope of the pass's source.
struct RegisterPass {
  explicit RegisterPass(Pass pass);
};

}  // namespace plumb
