#include "plumb/graph/names.h"

#include <charconv>

namespace plumb {
namespace {

constexpr DtypeNames kNames[] = {
    {at::kFloat, "f32", "float32", "FloatStorage", "<f4", 7},
    {at::kDouble, "f64", "float64", "DoubleStorage", "<f8", 8},
    {at::kHalf, "f16", "float16", "HalfStorage", "<f2", 6},
    {at::kBFloat16, "bf16", "bfloat16", "BFloat16Storage", "", 13},
    {at::kLong, "i64", "int64", "LongStorage", "<i8", 5},
    {at::kInt, "i32", "int32", "IntStorage", "<i4", 4},
    {at::kShort, "i16", "int16", "ShortStorage", "<i2", 3},
    {at::kChar, "i8", "int8", "CharStorage", "|i1", 2},
    {at::kByte, "u8", "uint8", "ByteStorage", "|u1", 1},
    {at::kUInt16, "u16", "uint16", "", "<u2", 28},
    {at::kUInt32, "u32", "uint32", "", "<u4", 34},
    {at::kUInt64, "u64", "uint64", "", "<u8", 35},
    {at::kBool, "b8", "bool", "BoolStorage", "|b1", 12},
    {at::kComplexHalf, "c32", "complex32", "", "", 9},
    {at::kComplexFloat, "c64", "complex64", "ComplexFloatStorage", "<c8", 10},
    {at::kComplexDouble, "c128", "complex128", "ComplexDoubleStorage", "<c16", 11},
    {at::kFloat8_e4m3fn, "f8e4m3fn", "float8_e4m3fn", "", "", 29},
    {at::kFloat8_e5m2, "f8e5m2", "float8_e5m2", "", "", 30},
    {at::kFloat8_e4m3fnuz, "f8e4m3fnuz", "float8_e4m3fnuz", "", "", 31},
    {at::kFloat8_e5m2fnuz, "f8e5m2fnuz", "float8_e5m2fnuz", "", "", 32},
    {at::kFloat8_e8m0fnu, "f8e8m0fnu", "float8_e8m0fnu", "", "", 33},
};

template <class T>
const DtypeNames* find(T DtypeNames::*column, const T& wanted) {
  for (const DtypeNames& n : kNames) {
    if (n.*column == wanted) return &n;
  }
  return nullptr;
}

// A dtype that the table has not goes by its number.
std::optional<at::ScalarType> numbered(std::string_view name) {
  constexpr std::string_view kPrefix = "dtype";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  unsigned number = 0;
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), number);
  if (error != std::errc() || end != name.data() + name.size() ||
      number >= static_cast<unsigned>(at::ScalarType::NumOptions))
    return std::nullopt;
  return static_cast<at::ScalarType>(number);
}

std::string name_of(at::ScalarType dtype, std::string_view DtypeNames::*column) {
  const DtypeNames* names = dtype_names(dtype);
  return names ? std::string(names->*column) : "dtype" + std::to_string(static_cast<int>(dtype));
}

std::optional<at::ScalarType> dtype_of(std::string_view name, std::string_view DtypeNames::*column) {
  const DtypeNames* names = find(column, name);
  return names ? names->dtype : numbered(name);
}

}  // namespace

std::span<const DtypeNames> all_dtype_names() { return kNames; }
const DtypeNames* dtype_names(at::ScalarType dtype) { return find(&DtypeNames::dtype, dtype); }
std::string short_name(at::ScalarType dtype) { return name_of(dtype, &DtypeNames::brief); }
std::string torch_name(at::ScalarType dtype) { return name_of(dtype, &DtypeNames::torch); }
std::optional<at::ScalarType> dtype_from_short_name(std::string_view name) {
  return dtype_of(name, &DtypeNames::brief);
}
std::optional<at::ScalarType> dtype_from_torch_name(std::string_view name) {
  return dtype_of(name, &DtypeNames::torch);
}

}  // namespace plumb
