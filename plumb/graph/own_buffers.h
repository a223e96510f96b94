// A module's buffers as it holds them: torch lets a module add one, and take out or exchange none.
#pragma once

#include <torch/nn/module.h>

namespace plumb {

// Returns the module's own buffers, without those of its children.
torch::OrderedDict<std::string, at::Tensor>& buffers_of(torch::nn::Module& module);

}  // namespace plumb
