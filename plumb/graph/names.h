// The names of dtypes: in the text form of graphs (f32, bf16, i64), torch's own (float32), and those in files.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace plumb {

struct DtypeNames {
  at::ScalarType dtype;
  std::string_view brief, torch;
  std::string_view storage;  // the class in torch.save's pickles, "FloatStorage"; "" where newer torch has none
  std::string_view npy;      // "<f4"; "" where numpy has no such type
  int64_t pt2;               // the number in `.pt2` files
};

std::span<const DtypeNames> all_dtype_names();
// Returns null for a dtype of another kind (quantized, bits).
const DtypeNames* dtype_names(at::ScalarType dtype);

std::string short_name(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_from_short_name(std::string_view name);
std::string torch_name(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_from_torch_name(std::string_view name);

}  // namespace plumb
