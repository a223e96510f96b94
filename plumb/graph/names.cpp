#include "plumb/graph/names.h"

namespace plumb {
namespace {

struct Names {
  at::ScalarType dtype;
  std::string_view brief, torch;
};
constexpr Names kNames[] = {
    {at::kFloat, "f32", "float32"},
    {at::kDouble, "f64", "float64"},
    {at::kHalf, "f16", "float16"},
    {at::kBFloat16, "bf16", "bfloat16"},
    {at::kLong, "i64", "int64"},
    {at::kInt, "i32", "int32"},
    {at::kShort, "i16", "int16"},
    {at::kChar, "i8", "int8"},
    {at::kByte, "u8", "uint8"},
    {at::kUInt16, "u16", "uint16"},
    {at::kUInt32, "u32", "uint32"},
    {at::kUInt64, "u64", "uint64"},
    {at::kBool, "b8", "bool"},
    {at::kComplexHalf, "c32", "complex32"},
    {at::kComplexFloat, "c64", "complex64"},
    {at::kComplexDouble, "c128", "complex128"},
    {at::kFloat8_e4m3fn, "f8e4m3fn", "float8_e4m3fn"},
    {at::kFloat8_e5m2, "f8e5m2", "float8_e5m2"},
    {at::kFloat8_e4m3fnuz, "f8e4m3fnuz", "float8_e4m3fnuz"},
    {at::kFloat8_e5m2fnuz, "f8e5m2fnuz", "float8_e5m2fnuz"},
    {at::kFloat8_e8m0fnu, "f8e8m0fnu", "float8_e8m0fnu"},
};

}  // namespace

std::string short_name(at::ScalarType dtype) {
  for (const auto& n : kNames) {
    if (n.dtype == dtype) return std::string(n.brief);
  }
  return "dtype" + std::to_string(static_cast<int>(dtype));
}

std::string torch_name(at::ScalarType dtype) {
  for (const auto& n : kNames) {
    if (n.dtype == dtype) return std::string(n.torch);
  }
  return "dtype" + std::to_string(static_cast<int>(dtype));
}

namespace {
std::optional<at::ScalarType> numbered(std::string_view name) {
  if (!name.starts_with("dtype") || name.size() > 8) return std::nullopt;
  int number = 0;
  for (char c : name.substr(5)) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + (c - '0');
  }
  if (name.size() == 5 || number >= static_cast<int>(at::ScalarType::NumOptions)) return std::nullopt;
  return static_cast<at::ScalarType>(number);
}
}  // namespace

std::optional<at::ScalarType> dtype_from_short_name(std::string_view name) {
  for (const auto& n : kNames) {
    if (n.brief == name) return n.dtype;
  }
  return numbered(name);
}

std::optional<at::ScalarType> dtype_from_torch_name(std::string_view name) {
  for (const auto& n : kNames) {
    if (n.torch == name) return n.dtype;
  }
  return numbered(name);
}

}  // namespace plumb
