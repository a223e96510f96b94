#include "plumb/exported/pt2_types.h"

#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <numeric>

#include "plumb/core/error.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/graph/names.h"

namespace plumb::pt2 {
namespace {

struct Row {
  int64_t number, torch;
};
constexpr Row kLayouts[] = {
    {1, static_cast<int64_t>(at::kSparse)},    {2, static_cast<int64_t>(at::kSparseCsr)},
    {3, static_cast<int64_t>(at::kSparseCsc)}, {4, static_cast<int64_t>(at::kSparseBsr)},
    {5, static_cast<int64_t>(at::kSparseBsc)}, {6, static_cast<int64_t>(at::kMkldnn)},
    {7, static_cast<int64_t>(at::kStrided)},
};
constexpr Row kFormats[] = {
    {1, static_cast<int64_t>(at::MemoryFormat::Contiguous)},
    {2, static_cast<int64_t>(at::MemoryFormat::ChannelsLast)},
    {3, static_cast<int64_t>(at::MemoryFormat::ChannelsLast3d)},
    {4, static_cast<int64_t>(at::MemoryFormat::Preserve)},
};

template <size_t N>
int64_t to_torch(const Row (&rows)[N], const JsonDoc& doc, const Json& j, const char* what) {
  const int64_t number = doc.integer(j);
  for (const Row& row : rows) {
    if (row.number == number) return row.torch;
  }
  doc.fail(j, std::string("unknown ") + what + " " + std::to_string(number));
}
template <size_t N>
int64_t from_torch(const Row (&rows)[N], int64_t torch, const char* what) {
  for (const Row& row : rows) {
    if (row.torch == torch) return row.number;
  }
  throw Error(ErrorKind::Unsupported,
              std::string("a .pt2 file has no number for ") + what + " " + std::to_string(torch));
}

// Reads a size or stride: {"as_int": n} or {"as_expr": {"expr_str": ..., "hint": {"as_int": n}}}.
int64_t read_size(const JsonDoc& doc, const Json& j, std::string* symbol, Spelling* spelling) {
  const auto [tag, value] = doc.tagged(j);
  if (tag == "as_int") return doc.integer(value);
  if (tag != "as_expr") doc.fail(j, "unknown kind of size '" + tag + "'");
  if (!symbol) doc.fail(j, "a stored tensor's sizes are numbers, not expressions");
  const Json& text = doc.at(value, "expr_str");
  auto e = SymExpr::parse(doc.string(text), spelling);
  if (!e) doc.fail(text, "is no size expression");
  *symbol = e->to_infix();
  const Json* hint = doc.find(value, "hint");
  if (!hint) return 1;
  const auto [kind, number] = doc.tagged(*hint);
  return kind == "as_int" ? doc.integer(number) : 1;
}

Json write_size(int64_t hint, const std::string& symbol, const Spelling& spelling) {
  if (symbol.empty()) return {{"as_int", hint}};
  auto e = SymExpr::parse(symbol);
  if (!e) throw Error(ErrorKind::InvalidGraph, "'" + symbol + "' is no size expression");
  // Sizes that depend on data (u0) have no hint.
  const std::string text = e->to_sympy(spelling);
  Json as_expr = {{"expr_str", text}, {"hint", {{"as_int", hint}}}};
  if (text.find("Symbol('u") != text.npos) as_expr["hint"] = nullptr;
  return {{"as_expr", std::move(as_expr)}};
}

}  // namespace

at::ScalarType read_dtype(const JsonDoc& doc, const Json& j) {
  const int64_t number = doc.integer(j);
  for (const DtypeNames& names : all_dtype_names()) {
    if (names.pt2 == number) return names.dtype;
  }
  doc.fail(j, "unknown dtype " + std::to_string(number));
}

int64_t write_dtype(at::ScalarType dtype) {
  if (const DtypeNames* names = dtype_names(dtype)) return names->pt2;
  throw Error(ErrorKind::Unsupported, std::string("a .pt2 file has no number for dtype ") + at::toString(dtype));
}

int64_t read_layout(const JsonDoc& doc, const Json& j) { return to_torch(kLayouts, doc, j, "layout"); }
int64_t write_layout(int64_t layout) { return from_torch(kLayouts, layout, "layout"); }
int64_t read_memory_format(const JsonDoc& doc, const Json& j) { return to_torch(kFormats, doc, j, "memory format"); }
int64_t write_memory_format(int64_t format) { return from_torch(kFormats, format, "memory format"); }

at::Device read_device(const JsonDoc& doc, const Json& j) {
  std::string text = doc.string(doc.at(j, "type"));
  if (const Json* index = doc.find(j, "index")) text += ":" + std::to_string(doc.integer(*index));
  try {
    return at::Device(text);
  } catch (const c10::Error&) {
    doc.fail(j, "unknown device '" + text + "'");
  }
}

Json write_device(at::Device device) {
  Json index = nullptr;
  if (device.has_index()) index = device.index();
  return {{"type", c10::DeviceTypeName(device.type(), /*lower_case=*/true)}, {"index", index}};
}

TensorMeta read_meta(const JsonDoc& doc, const Json& j, Spelling* spelling) {
  TensorMeta meta;
  meta.dtype = read_dtype(doc, doc.at(j, "dtype"));
  meta.device = read_device(doc, doc.at(j, "device"));
  if (const Json* grad = doc.find(j, "requires_grad")) meta.requires_grad = doc.boolean(*grad);
  const Json& sizes = doc.array(doc.at(j, "sizes"));
  const Json& strides = doc.array(doc.at(j, "strides"));
  if (sizes.size() > 64) doc.fail(sizes, "a tensor of " + std::to_string(sizes.size()) + " dimensions");
  if (strides.size() != sizes.size() && !strides.empty()) doc.fail(strides, "as many strides as sizes are needed");
  auto read = [&](const Json& j, const char* what, std::string& symbol) {
    const int64_t number = read_size(doc, j, spelling ? &symbol : nullptr, spelling);
    if (number < 0) doc.fail(j, std::string("a negative ") + what);
    return number;
  };
  bool dynamic = false;
  for (const Json& size : sizes) {
    meta.sizes.push_back(read(size, "size", meta.symbols.emplace_back()));
    dynamic = dynamic || !meta.symbols.back().empty();
  }
  if (!dynamic) meta.symbols.clear();
  std::string unused;
  for (const Json& stride : strides) meta.strides.push_back(read(stride, "stride", unused));
  return meta;
}

Json write_meta(const TensorMeta& meta, const Spelling& spelling) {
  Json sizes = Json::array(), strides = Json::array();
  const bool dynamic = !meta.symbols.empty();
  for (size_t i = 0; i < meta.sizes.size(); ++i) {
    sizes.push_back(write_size(meta.sizes[i], dynamic ? meta.symbols[i] : "", spelling));
  }
  // A dense tensor's stride is the product of the sizes inside of it: as an expression where one of them is one.
  std::vector<size_t> order(meta.strides.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return meta.strides[a] > meta.strides[b]; });
  std::vector<std::string> symbols(meta.strides.size());
  if (dynamic && meta.strides.size() == meta.sizes.size()) {
    int64_t expected = 1;
    std::string product;
    for (auto it = order.rbegin(); it != order.rend(); ++it) {
      if (meta.strides[*it] == expected) symbols[*it] = product;
      const int64_t inside = expected;
      if (__builtin_mul_overflow(expected, meta.sizes[*it], &expected)) break;
      const std::string factor =
          meta.symbols[*it].empty() ? std::to_string(meta.sizes[*it]) : "(" + meta.symbols[*it] + ")";
      if (!product.empty()) {
        product += "*" + factor;
      } else if (!meta.symbols[*it].empty()) {
        product = inside == 1 ? factor : std::to_string(inside) + "*" + factor;
      }
    }
  }
  for (size_t i = 0; i < meta.strides.size(); ++i) strides.push_back(write_size(meta.strides[i], symbols[i], spelling));
  return {{"dtype", write_dtype(meta.dtype)},
          {"sizes", std::move(sizes)},
          {"requires_grad", meta.requires_grad},
          {"device", write_device(meta.device)},
          {"strides", std::move(strides)},
          {"storage_offset", {{"as_int", 0}}},
          {"layout", write_layout(static_cast<int64_t>(at::kStrided))}};
}

StoredMeta read_stored_meta(const JsonDoc& doc, const Json& j) {
  StoredMeta stored;
  stored.meta = read_meta(doc, j, nullptr);
  stored.storage_offset = read_size(doc, doc.at(j, "storage_offset"), nullptr, nullptr);
  if (stored.storage_offset < 0) doc.fail(j, "a negative storage offset");
  if (stored.meta.strides.size() != stored.meta.sizes.size()) doc.fail(j, "as many strides as sizes are needed");
  if (const Json* layout = doc.find(j, "layout")) {
    if (read_layout(doc, *layout) != static_cast<int64_t>(at::kStrided))
      doc.fail(*layout, "stored tensors are strided");
  }
  return stored;
}

Json write_stored_meta(const at::Tensor& tensor, int64_t storage_offset) {
  Json j = write_meta(TensorMeta::of(tensor), {});
  j["storage_offset"] = {{"as_int", storage_offset}};
  return j;
}

}  // namespace plumb::pt2
