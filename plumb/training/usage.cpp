#include "plumb/training/usage.h"

#include "plumb/core/output_file.h"
#include "plumb/graph/summary.h"

namespace plumb {

bool is_tensor_file(const std::string& path) {
  return path.ends_with(".pt") || path.ends_with(".pth") || path.ends_with(".npy");
}

void check_writable(const std::string& option, const std::string& path) {
  if (path.empty() || path == "-") return;
  try {
    const OutputFile probe(path);
  } catch (const Error& e) {
    throw Error(e.kind(), option + " " + e.message(), "", e.remedy());
  }
}

std::string type_text(const std::optional<TensorMeta>& meta) { return meta ? type_text(*meta) : "?"; }

std::string type_text(const at::Tensor& tensor) { return type_text(TensorMeta::of(tensor)); }

}  // namespace plumb
