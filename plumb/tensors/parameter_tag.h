// Parameters tagged with what u-muP's learning-rate rules need to know (arXiv 2407.17465, table 2).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace plumb {

enum class MupType { Weight, Bias, Norm, Output };
std::string_view to_string(MupType type);      // "weight", "bias", "norm", "output"
MupType mup_type_from(std::string_view name);  // Throws Error(UnknownName)

struct ParameterData {
  MupType type = MupType::Weight;
  // How many layers the parameter's stack has, where depth scales the learning rate.
  std::optional<int64_t> scaling_depth;
  // Values that one output sums over, where the shape does not say so: in for a weight stored as in x out.
  std::optional<int64_t> fan_in;
  bool operator==(const ParameterData&) const = default;
};

// Values that one output of a weight of these sizes sums over, stored as torch's layers do, outputs first; for an
// embedding, the size of a row. At least 1.
int64_t shape_fan_in(at::IntArrayRef sizes);

// Returns `data` as a leaf that requires grad, tagged.
at::Tensor make_parameter(at::Tensor data, MupType type, std::optional<int64_t> scaling_depth = std::nullopt);

// A tag belongs to the tensor object (not to its memory): handles share it, and it goes with the last of them. clone(),
// detach() and to() give none: copy_tag() does. Safe from several threads. Throws Error(InvalidArgument) for a depth or
// a fan-in below 1.
void tag(const at::Tensor& parameter, ParameterData data);
std::optional<ParameterData> parameter_data(const at::Tensor& parameter);
void untag(const at::Tensor& parameter);
// Gives `to` the tag of `from`, if that has one.
void copy_tag(const at::Tensor& from, const at::Tensor& to);

}  // namespace plumb
