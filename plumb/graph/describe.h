// Short descriptions of tensors and errors, for messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

// "float[4, 16]", "half[2] on cuda:0", "none" for an undefined tensor.
std::string describe(const at::Tensor& tensor);
std::string describe(at::IntArrayRef sizes, const at::TensorOptions& options);
// "(float[4, 16], none)"
std::string describe(const std::vector<at::Tensor>& tensors);
// Returns the text up to the first line break: torch appends stack traces.
std::string first_line(std::string_view text);
// Returns the exception's text without torch's stack trace.
std::string error_text(const std::exception& error);

}  // namespace plumb
