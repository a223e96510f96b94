// Cuts by the bytes of parameters and buffers. A tensor counts once, in the first stage that uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/partition/pipe.h"

namespace plumb {

// Cuts into `stages` stages of about the same size. Returns the values whose operators come after the cuts: fewer if
// the graph has fewer operators with parameters. Throws Error(InvalidArgument) for less than one stage.
std::vector<std::string> cuts_of_equal_size(const GraphModule& module, int stages);
// Cuts into stages of at most `bytes` bytes; one operator's own may be more.
std::vector<std::string> cuts_at_size(const GraphModule& module, int64_t bytes);

// The remedy where a plan's cut does not fit a graph.
inline constexpr const char* kPlanAgain = "the model that the plan was made for, or a plan of this one: plumb plan -o";

// Returns the module with marks (plumb::pipe_split) before the operators that make these values, and no others: what
// pipeline() cuts. Throws Error(UnknownName) for a value that the graph does not have. Throws Error(InvalidArgument)
// for one whose operator does not come after that of the value before it.
std::shared_ptr<GraphModule> mark_before(const GraphModule& module, const std::vector<std::string>& values);

// Returns for each stage but the first a value before which mark_before() cuts there again.
std::vector<std::string> cut_values(const GraphModule& module, const Pipe& pipe);

// Returns the number of operators of a graph, marks left out.
int count_operators(const GraphModule& module);
// Throws Error(StructureMismatch) if a plan for a graph of so many operators is for another one; 0: unknown.
void check_plan_fits(int operators, const GraphModule& module);

}  // namespace plumb
