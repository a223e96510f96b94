// Exported programs: `.pt2` files of torch.export, read and written without Python.
//
//   ExportedProgram program = load_pt2("model.pt2");
//   torch::optim::AdamW optimizer(program.module->parameters(), 1e-3);
//   ... program.module->forward({x}) ...
//   save_pt2(program, "trained.pt2");     // the same names, the new weights
//
// Reading changes a program as follows:
// - parameters, buffers and constants are get_attr nodes under their names; two names of one tensor stay one tensor;
// - lists and tuples that operators return are flat results (torch's getitem nodes vanish);
// - no_grad regions are a flag on their nodes; autocast regions become the casts that autocast would have made;
// - sizes are `aten::sym_size.int` and `plumb::sym_*` nodes; the dynamic dimensions of the inputs and their ranges are
//   checked by one `plumb::check_sizes` node, constant inputs by `plumb::check_input` nodes;
// - what the program returns as mutated is written (`aten::copy_`) at its end; functional batch norms are in place;
// - `_assert_tensor_metadata` nodes are dropped: a graph's dtypes are fixed by its inputs, which are checked.
// Writing turns each of these back into what torch.export.load accepts.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

// Bounds of a size symbol; nothing: unbounded.
struct SizeRange {
  std::optional<int64_t> min, max;
  bool operator==(const SizeRange&) const = default;
};

// A module together with what only a file knows about it.
struct ExportedProgram {
  std::shared_ptr<GraphModule> module;

  std::map<std::string, SizeRange> ranges;               // by symbol or expression: {"s0", {2, 64}}
  std::vector<std::string> guards;                       // conditions on inputs, as Python text
  std::map<std::string, std::string> symbol_spelling;    // by symbol: as sympy has it in the file
  std::map<std::string, std::string> value_expressions;  // by name of an Int, Float or Bool value: its expression
  std::vector<std::string> argument_names;               // argument names of the original forward
  std::vector<std::string> submodules;                   // names of the modules that were called, in order
  std::map<std::string, std::vector<std::string>> namedtuple_fields;
  std::map<std::string, int64_t> opset_versions;
  std::string sample_inputs;  // bytes of a torch.save'd (args, kwargs); may be empty
  std::string torch_version;  // that wrote the file
  // JSON (plumb/checkpoint/pretrained.h): the folder of `transformers` that the program was imported from, and what its
  // tensors are called there. Parameters without values, on the meta device, come from there. May be empty.
  std::string pretrained;
  // Its tagged parameters (plumb/tensors/parameter_tag.h) are those of a model that was written with unit-scaled
  // layers, so they fit into that model. Else a transform made them, and a plain model cannot take them (load_pt2 marks
  // them).
  bool unit_scaled_layers = false;
  int64_t schema_major = 8, schema_minor = 0;
};

struct LoadOptions {
  std::string model;                 // which program of the archive; "" for the only one, or "model"
  std::optional<at::Device> device;  // where tensors and device arguments go; nothing: as in the file
  // Most bytes that compressed entries inflate to and JSON takes as documents; 0: 128 MiB and 16 times the file.
  uint64_t max_memory_bytes = 0;
};

// Throws Error(BadFile) naming file, place and remedy: files that are damaged, inconsistent, of another schema than
// 8.x, or that use unregistered operators, custom objects, effect tokens, or control flow (torch.cond and its like).
ExportedProgram load_pt2(const std::string& path, const LoadOptions& options = {});

// Writes a program beside `path` and renames the file, so that a reader never sees half of one. Python opens it with
// torch.export.load, after `import plumb` if the graph has plumb's operators. A GraphModule need not come from a file.
// Throws Error(InvalidArgument) naming a node that no file can hold, Error(BadFile) if the file cannot be written.
void save_pt2(const ExportedProgram& program, const std::string& path);
void save_pt2(const GraphModule& module, const std::string& path);

}  // namespace plumb
