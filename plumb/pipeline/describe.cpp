#include "plumb/pipeline/describe.h"

#include <ATen/ATen.h>

#include <sstream>

namespace plumb {

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  std::string name = c10::toString(tensor.scalar_type());
  for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::ostringstream out;
  out << name << '[';
  for (int64_t i = 0; i < tensor.dim(); i++) out << (i ? ", " : "") << tensor.size(i);
  out << ']';
  if (!tensor.device().is_cpu()) out << " on " << tensor.device();
  return out.str();
}

std::string describe(const std::vector<at::Tensor>& tensors) {
  std::string out = "(";
  for (size_t i = 0; i < tensors.size(); i++) out += (i ? ", " : "") + describe(tensors[i]);
  return out + ")";
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

}  // namespace plumb
