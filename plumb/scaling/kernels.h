// Arithmetic that the operators share: products with a free scale factor, sums with two.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace plumb {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<std::string_view>;
using OptionalScales = std::optional<at::ArrayRef<double>>;

inline bool present(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// Returns the scales an operator was given, checked to be as many as `rule` makes, or else those of the rule, of which
// the first `constrained` are tied by the constraint. `op` names the operator in errors.
std::vector<double> choose_scales(const char* op, const OptionalScales& given, const OptionalName& constraint,
                                  size_t constrained, std::vector<double> rule);

// Returns alpha * a @ b, for matrices and for equal batches of them. The factor is part of the product.
at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, double alpha);
at::Tensor batched_gemm(const at::Tensor& a, const at::Tensor& b, double alpha);

// Returns a * x + b * y with broadcasting; one pass where x and y are dense CPU tensors of one shape and type.
at::Tensor weighted_sum(const at::Tensor& x, double a, const at::Tensor& y, double b);

// Returns whether the tensor is an ordinary one, outside of tracing and other modes, that autograd does not watch: the
// kernel may use its memory.
bool plain(const at::Tensor& tensor);

// "[8, 16]", for errors.
std::string shape_text(const at::Tensor& tensor);

[[noreturn]] void bad_shape(const char* op, const std::string& why);

// Checks the gradient of a result, which has the result's shape; `like` is a tensor of that shape.
void check_gradient(const char* op, const at::Tensor& grad, at::IntArrayRef like);

// Throws Error(InvalidArgument) for a dtype that torch does not have: schemas let every integer through as one.
void check_dtype(const char* op, std::optional<at::ScalarType> dtype);

// Returns the number of elements before the last dimension.
int64_t leading(at::IntArrayRef sizes, size_t trailing = 1);

}  // namespace plumb
