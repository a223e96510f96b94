// Facts about a value or node beside the arithmetic: shapes, module path, source line.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace plumb {

// Returns the product of the sizes, at most 2^43: sizes from files may be absurd, and sums of bytes must be numbers.
int64_t element_count(at::IntArrayRef sizes);

// Shape and type of a tensor value as it was seen at capture or stated in a file.
struct TensorMeta {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;    // a hint where `symbols` has an expression
  std::vector<int64_t> strides;  // in elements; empty for layouts without strides
  at::Device device = at::kCPU;
  bool requires_grad = false;
  // One expression a dimension ("s0", "2*s0 + 1"); "" for a static one. Empty when every dimension is static.
  std::vector<std::string> symbols;

  static TensorMeta of(const at::Tensor& tensor);
  int64_t numel() const { return element_count(sizes); }
  bool is_floating_point() const { return at::isFloatingType(dtype); }
  bool is_contiguous() const;
  bool operator==(const TensorMeta&) const = default;
};

// Strides of a dense row-major tensor of these sizes.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);

// Returns the dimensions from the largest stride to the smallest; none if the strides are not those of dense memory.
std::optional<std::vector<int64_t>> memory_order(const TensorMeta& type);

// One level of the path of modules that a node was called in, outermost first.
struct ModuleFrame {
  std::string path;  // fully qualified name, "" for the root
  std::string type;  // class name, "Linear"
  bool operator==(const ModuleFrame&) const = default;
};
using ModuleStack = std::vector<ModuleFrame>;

struct SourceLocation {
  std::string file;
  int line = 0;
  std::string function;
  bool operator==(const SourceLocation&) const = default;
};

// Metadata of a node. Stacks and locations are shared: thousands of nodes come from one line.
struct NodeMeta {
  bool grad_enabled = true;  // effective grad mode in execution = the caller's and this
  std::shared_ptr<const ModuleStack> modules;
  std::shared_ptr<const SourceLocation> source;

  // Path of the innermost module ("layers.0.attn"), "" when unknown or the root.
  std::string module_path() const;
  // "layers.0.attn (model.py:12)": for messages. "" when nothing is known.
  std::string where() const;
};

}  // namespace plumb
