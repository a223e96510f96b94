// A model's inputs from files and numbers.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"

namespace plumb {

// Reads "--input [NAME=]x.pt" texts as the module's flat inputs. Files without a name fill the inputs in order (a dict
// by its keys, a tuple as several); a number, true, false or none may stand instead of a file. Inputs that the program
// fixes to a value have it if no text gives them one. `option` is for messages. With `any_rows` the first dimension of
// tensors may have any size. Throws UsageError naming the text that is missing, too many, or does not fit. `beside`:
// names in a dict that are no inputs.
std::vector<c10::IValue> read_inputs(const GraphModule& module, const std::vector<std::string>& texts,
                                     const std::string& option, bool any_rows,
                                     const std::vector<std::string>& beside = {});

}  // namespace plumb
