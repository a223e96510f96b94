// Cuts a graph into pipeline stages: at `pipe_split` marks, at modules, or by a policy.
//
// Every split equals the whole bit for bit: outputs, gradients, buffers. To that end
//   - a value goes straight from the stage that makes it to each stage that uses it, an input of the graph straight to
//     each stage that uses it; outputs of earlier stages pass through the last stage;
//   - parameters, buffers and constants are taken by each stage that uses them (see MultiUse); cheap deterministic
//     nodes that depend on no input and no parameter (arange, full, masks made of them) are copied instead of sent;
//   - a view of a parameter is taken in the stage that uses it;
//   - memory that is written is cut only where every stage still sees the values of the whole; otherwise the cut moves
//     to the nearest such place or, if a stage would vanish, an Error names both nodes.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/partition/pipe.h"
#include "plumb/partition/wire.h"

namespace plumb {

// The side of a module to cut at: before its first node or after its last one, at every call of it.
enum class SplitPoint { Beginning, End };

// How stages share a parameter that several of them use.
enum class MultiUse {
  Replicate,  // each stage has a copy; gradients are summed before the optimizer's step
  Transmit,   // the first stage that uses it owns it and sends it with every microbatch
};

enum class AtConflict {
  MoveCut,  // to the nearest place that is right; said in Pipe::notes()
  Refuse,
};

struct SplitOptions {
  // Module paths ("layers.3"), added to the graph's marks. A graph without module stacks is cut by its parameters'
  // names: before the first node that uses a parameter under that path, or after the last.
  std::vector<std::pair<std::string, SplitPoint>> points;
  // Cuts before these operators, counted among the graph's calls without marks and without nodes that are copied to
  // every stage (as balance() counts them). The graph's marks are not looked at then.
  std::vector<size_t> cut_before;
  // Instead of marks and points: the stage of every operator, from 0. Values may only go to the same or a later stage.
  // Numbers that no node has are closed up. If the stages are not runs of neighboring nodes, outputs are still equal
  // bit for bit, gradients up to the order in which the uses of one value are summed.
  std::function<int(const Node&)> policy;

  MultiUse multi_use = MultiUse::Replicate;
  // By full parameter name; stronger than multi_use. A tied parameter's name counts for its others, unless they are
  // given.
  std::map<std::string, MultiUse> multi_use_by_name;

  AtConflict at_conflict = AtConflict::MoveCut;

  // Formats on the way between stages. Integers, values without a gradient and what is excluded travel as they are.
  WireOptions wire;

  // Which output is the loss: the structure of the outputs with `true` in its place and `false` elsewhere (a bool, or
  // tuples, lists and dicts of them). Puts a symbolic backward into the pipe. None: no backward.
  std::optional<c10::IValue> loss_spec;
};

// Leaves the module as it is. The stages share its tensors, but for copies of replicated parameters.
// Cuts before the first or after the last operator and cuts next to each other make no empty stages.
// Throws Error(UnknownName) for module and parameter names, Error(Partition) for a policy that sends values back and
// for memory conflicts, Error(StructureMismatch) for a loss spec that fits no output.
std::shared_ptr<Pipe> pipeline(const GraphModule& module, const SplitOptions& options = {});

// The flat output that a loss spec marks. Throws Error(StructureMismatch) if the structures differ or none is marked.
size_t find_loss_output(const TreeSpec& outputs, const c10::IValue& loss_spec);
// Returns the output under the key "loss", if the outputs are a dict with one.
std::optional<size_t> find_loss_by_name(const TreeSpec& outputs);

}  // namespace plumb
