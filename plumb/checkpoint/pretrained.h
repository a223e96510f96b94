// Weights in folders of the Python package transformers: read into an imported program, stage by stage, and written
// back under the folder's names.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/graph/graph_module.h"

namespace plumb {

// Files of a folder that an imported program takes along, beside what it knows of the weights.
inline constexpr std::array<const char*, 2> kKeptFiles = {"config.json", "generation_config.json"};

// An imported program's knowledge of its folder (ExportedProgram::pretrained).
struct Pretrained {
  // Tensors that the folder has in another form, experts one by one where the program has them stacked, say. A graph
  // computes one form from the other; transformers' own conversion was captured for it.
  struct Conversion {
    std::vector<std::string> state, stored;   // names in the program, in the folder
    std::shared_ptr<GraphModule> load, save;  // stored -> state, state -> stored; tensors in the order of the names
  };
  std::string folder;                        // where the weights were at the import; may be empty
  std::map<std::string, std::string> files;  // contents of kKeptFiles, written back unchanged: {"config.json": bytes}
  std::map<std::string, std::string> names;  // tensor names in the program -> in the folder; each name of a tied tensor
  std::vector<Conversion> conversions;

  // Parses {"folder", "files", "names", "conversions": [{"state", "stored", "graphs": index}], "graphs": [{"load",
  // "save"}]}. The text is untrusted: throws Error(BadFile) that names the place.
  static Pretrained parse(const std::string& json);
};

// Throws Error(InvalidState) for weights of a unit-scaled model: they mean something else in the folder's own.
void refuse_unit_scaled(const TensorFolder& folder);

// Returns the folder's value of a tensor in the dtype and layout of `as`, as a leaf. Throws Error(TensorMismatch) if it
// has another shape.
at::Tensor value_for(const std::string& name, const at::Tensor& as, const at::Tensor& value);

// Returns a conversion's results, in the order of `to`. Throws Error(BadFile) if its graph does not fit the tensors.
std::vector<at::Tensor> run_conversion(GraphModule& graph, const std::vector<std::string>& from,
                                       const std::vector<std::string>& to, const std::vector<at::Tensor>& tensors);

// Gives values to those tensors of the state that have none (those on the meta device), on the CPU, in the program's
// dtypes; reads these alone. A module without any is left as it is. Throws Error(UnknownName) for a tensor that the
// folder does not have, Error(TensorMismatch) for one of another shape, Error(InvalidState) for unit-scaled weights on
// either side, Error(BadFile).
void load_weights(GraphModule& module, const Pretrained& from, const TensorFolder& folder);

// The parts of a program, a state each: its stages in order, then the whole, for what no stage uses. Every part may be
// written by another process, but each knows the names and shapes of all.
using StateParts = std::vector<const State*>;

// Writes the tensors of one part into the folder `out`, which is made if it does not exist: each tensor once, with the
// first part that has it. Tensors without values are copied from the folder `source`. Throws
// - Error(InvalidArgument) for unit-scaled weights, which mean something else in a plain model, and for a conversion
//   whose tensors are in several parts,
// - Error(InvalidState) for values that are nowhere,
// - Error(CannotWrite).
void write_weights(const std::string& out, const StateParts& parts, size_t part, const Pretrained& as,
                   const std::string& source);
// When all parts are written: the index, the files of `as` and, from the folder `source` ("": none), what belongs to
// the tokenizer. After it `from_pretrained` of transformers reads the folder. Throws Error(BadFile), after everything
// else is written, for a file of the tokenizer that is a link out of `source`.
void finish_weights_folder(const std::string& out, const StateParts& parts, const Pretrained& as,
                           const std::string& source);

// Makes the folder before work that takes long. Throws Error(CannotWrite) if that fails or something is in it.
void check_new_folder(const std::string& out);
// Throws what finish_weights_folder() would throw for the files of the folder `source`. For the same moment.
void check_files_to_copy(const std::string& source);
// Throws Error(InvalidArgument) as write_weights() would for one of the parts. For the same moment.
void check_weights_to_write(const StateParts& parts, const Pretrained& as);

}  // namespace plumb
