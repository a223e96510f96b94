#include "plumb/graph/meta.h"

#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

namespace plumb {

TensorMeta TensorMeta::of(const at::Tensor& tensor) {
  TensorMeta meta;
  meta.dtype = tensor.scalar_type();
  meta.sizes = tensor.sizes().vec();
  if (tensor.layout() == at::kStrided && !tensor.is_nested()) meta.strides = tensor.strides().vec();
  meta.device = tensor.device();
  meta.requires_grad = tensor.requires_grad();
  return meta;
}

int64_t TensorMeta::numel() const { return c10::multiply_integers(sizes); }

bool TensorMeta::is_contiguous() const { return strides == contiguous_strides(sizes); }

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    // As in torch, a dimension of size 0 counts as 1. Sizes from files may be absurd: wrap around, do not overflow.
    const auto step = static_cast<uint64_t>(std::max<int64_t>(sizes[i], 1));
    strides[i - 1] = static_cast<int64_t>(static_cast<uint64_t>(strides[i]) * step);
  }
  return strides;
}

std::string NodeMeta::module_path() const { return modules && !modules->empty() ? modules->back().path : ""; }

std::string NodeMeta::where() const {
  std::string text = module_path();
  if (source && !source->file.empty()) {
    std::string line = source->file + ":" + std::to_string(source->line);
    text = text.empty() ? line : text + " (" + line + ")";
  }
  return text;
}

}  // namespace plumb
