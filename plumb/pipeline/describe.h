// Short descriptions for error messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// "float[4, 16]", "half[2] on cuda:0", "none" for an undefined tensor.
std::string describe(const at::Tensor& tensor);
// "(float[4, 16], none)"
std::string describe(const std::vector<at::Tensor>& tensors);
// Up to the first line break: torch appends stack traces.
std::string first_line(std::string_view text);

}  // namespace plumb
