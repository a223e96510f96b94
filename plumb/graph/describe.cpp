#include "plumb/graph/describe.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include "plumb/core/join.h"

namespace plumb {

std::string describe(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::string name = c10::toString(options.dtype().toScalarType());
  for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return c10::str(name, sizes, options.device().is_cpu() ? "" : " on " + options.device().str());
}

std::string describe(const at::Tensor& tensor) {
  return tensor.defined() ? describe(tensor.sizes(), tensor.options()) : "none";
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  return "(" + join(tensors, [](const at::Tensor& t) { return describe(t); }) + ")";
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

std::string error_text(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error == nullptr) return error.what();
  const std::string text = torch_error->what_without_backtrace();
  // `CONDITION INTERNAL ASSERT FAILED at "FILE":LINE, please report a bug to PyTorch. WHY`: of arguments that no model
  // has, but a file may.
  const size_t at = text.find(" INTERNAL ASSERT FAILED at "), why = text.find("PyTorch. ", at);
  if (at == text.npos) return text;
  const bool says = why != text.npos && text.find_first_not_of(" \n", why + 9) != text.npos;
  return "torch's kernel does not take these arguments: " +
         (says ? text.substr(why + 9) : "'" + text.substr(0, at) + "' does not hold");
}

}  // namespace plumb
