// The cut of a program into stages, as the options ask for it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plumb/partition/pipe.h"
#include "plumb/partition/split.h"
#include "plumb/partition/wire.h"

namespace plumb {

struct CutOptions {
  std::vector<std::string> at;        // "layers.2": cut before that module, "layers.2:end": after it
  std::vector<std::string> transmit;  // parameters of several stages that their first stage sends; "all": every one
  WireOptions wire;                   // formats between stages
  std::vector<std::string> before;    // values of a plan: cut before the operators that make them, and nowhere else
};

// Sets what `transmit` says of the parameters of several stages. Throws UsageError for an unknown name.
void choose_multi_use(const GraphModule& module, const std::vector<std::string>& transmit, SplitOptions& options);

// Cuts at the modules of `options`; without names at the graph's own marks, and without marks so that the slowest stage
// is as fast as can be. `stages` 0: as many as the cuts give; 1: not cut at all. Throws UsageError if that is not
// `stages`, which is what `needed_by` ("--stages 2") asks for.
std::shared_ptr<Pipe> cut(const GraphModule& module, int stages, const CutOptions& options,
                          const std::string& needed_by);

}  // namespace plumb
