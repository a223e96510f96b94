// Short names of dtypes in the text form: f32, bf16, i64, ...; and torch's own: float32, bfloat16, int64.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace plumb {

std::string short_name(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_from_short_name(std::string_view name);
std::string torch_name(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_from_torch_name(std::string_view name);

}  // namespace plumb
