// torch.export's numbers and structures for dtypes, layouts, devices and tensor types, both ways.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "plumb/exported/json_doc.h"
#include "plumb/graph/meta.h"

namespace plumb::pt2 {

at::ScalarType read_dtype(const JsonDoc& doc, const Json& j);
int64_t write_dtype(at::ScalarType dtype);               // throws for dtypes the format has no number for
int64_t read_layout(const JsonDoc& doc, const Json& j);  // c10::Layout as an integer
int64_t write_layout(int64_t layout);
int64_t read_memory_format(const JsonDoc& doc, const Json& j);  // c10::MemoryFormat as an integer
int64_t write_memory_format(int64_t format);
at::Device read_device(const JsonDoc& doc, const Json& j);
Json write_device(at::Device device);

// How symbols are spelled in this file, by name.
using Spelling = std::map<std::string, std::string>;

// The layout that the format has for "unknown": stated with a type that is no more than a guess.
inline constexpr int64_t kUnknownLayout = 0;

// Reads a value's type. Sizes may be expressions: their hints go to `sizes`, the expressions to `symbols`.
TensorMeta read_meta(const JsonDoc& doc, const Json& j, Spelling* spelling);
Json write_meta(const TensorMeta& meta, const Spelling& spelling);

// A stored tensor's type: no expressions, and a place in its storage.
struct StoredMeta {
  TensorMeta meta;
  int64_t storage_offset = 0;
};
StoredMeta read_stored_meta(const JsonDoc& doc, const Json& j);
Json write_stored_meta(const at::Tensor& tensor, int64_t storage_offset);

}  // namespace plumb::pt2
