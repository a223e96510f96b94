#include "plumb/checkpoint/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "plumb/core/error.h"

namespace plumb {
namespace {

struct DtypeOfFormat {
  at::ScalarType dtype;
  std::string_view name;
};
constexpr DtypeOfFormat kDtypesOfFormat[] = {
    {at::kDouble, "F64"},
    {at::kFloat, "F32"},
    {at::kHalf, "F16"},
    {at::kBFloat16, "BF16"},
    {at::kLong, "I64"},
    {at::kInt, "I32"},
    {at::kShort, "I16"},
    {at::kChar, "I8"},
    {at::kByte, "U8"},
    {at::kBool, "BOOL"},
    {at::kUInt16, "U16"},
    {at::kUInt32, "U32"},
    {at::kUInt64, "U64"},
    {at::kComplexFloat, "C64"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e5m2, "F8_E5M2"},
    {at::kFloat8_e8m0fnu, "F8_E8M0"},
    {at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
    {at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
};

constexpr size_t kMostDimensions = 64;

[[noreturn]] void refuse(const std::string& file, const std::string& what,
                         const std::string& remedy = "get the file again; it is damaged, or was written wrongly") {
  throw Error(ErrorKind::BadFile, file + ": " + what, "", remedy);
}

// The only texts that are headers: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...,
// "__metadata__": {"KEY": "VALUE", ...}}. Called by the parser, which does not recurse, piece by piece: nothing but the
// entries is kept, and names that come twice are seen.
class HeaderGrammar : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderGrammar(const std::string& file) : file_(file) {}

  SafetensorsHeader header;

  bool start_object(size_t) override {
    if (depth_ == 2) misplaced("an object");
    ++depth_;
    return true;
  }
  bool key(string_t& key) override {
    if (depth_ == 1) {
      name_ = key;
      in_metadata_ = key == "__metadata__";
      if (!names_.insert(key).second) fail("the name comes twice");
      if (!in_metadata_) header.entries.push_back({key, at::kFloat, {}});
      fields_.clear();
    } else {
      field_ = key;
      if (!fields_.insert(key).second) fail("'" + key + "' comes twice");
    }
    return true;
  }
  bool end_object() override {
    if (depth_ == 2 && !in_metadata_) {
      if (fields_.size() < 3) fail("has no dtype, shape or data_offsets");
      check_bytes(header.entries.back());
    }
    --depth_;
    return true;
  }
  bool string(string_t& text) override {
    if (depth_ != 2 || in_list_ || (!in_metadata_ && field_ != "dtype")) misplaced("a text");
    if (in_metadata_) {
      header.metadata.emplace(field_, text);
      return true;
    }
    const auto dtype = dtype_of_safetensors(text);
    if (!dtype)
      fail("its dtype '" + text + "' is none that torch has", "convert the file with the library that wrote it");
    header.entries.back().dtype = *dtype;
    return true;
  }
  bool start_array(size_t) override {
    const bool has_list = !in_metadata_ && (field_ == "shape" || field_ == "data_offsets");
    if (depth_ != 2 || in_list_ || !has_list) misplaced("a list");
    in_list_ = true;
    offsets_seen_ = field_ == "shape" ? -1 : 0;
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (!in_list_) misplaced("a number");
    SafetensorsEntry& entry = header.entries.back();
    if (value > static_cast<uint64_t>(INT64_MAX)) fail("a number of it does not fit 63 bits");
    if (offsets_seen_ < 0) {
      if (entry.sizes.size() == kMostDimensions) fail(c10::str("has more than ", kMostDimensions, " dimensions"));
      entry.sizes.push_back(static_cast<int64_t>(value));
    } else if (offsets_seen_++ == 0) {
      entry.offset = value;
    } else if (offsets_seen_ > 2 || value < entry.offset) {
      fail("its data_offsets are no begin and end");
    } else {
      entry.bytes = value - entry.offset;
    }
    return true;
  }
  bool end_array() override {
    if (offsets_seen_ >= 0 && offsets_seen_ != 2) fail("its data_offsets are no begin and end");
    in_list_ = false;
    return true;
  }
  bool null() override { return misplaced("null"); }
  bool boolean(bool) override { return misplaced("true or false"); }
  bool number_integer(number_integer_t) override { return misplaced("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return misplaced("a fraction"); }
  bool binary(binary_t&) override { return misplaced("bytes"); }
  bool parse_error(size_t at, const std::string&, const nlohmann::json::exception&) override {
    refuse(file_, c10::str("its header is no JSON at byte ", 8 + at),
           "get the file again; it is damaged, or no safetensors file");
  }

  template <class... Remedy>
  [[noreturn]] void fail(const std::string& what, const Remedy&... remedy) const {
    refuse(file_, "tensor '" + name_ + "': " + what, remedy...);
  }

 private:
  [[noreturn]] bool misplaced(const std::string& what) const {
    if (depth_ == 0) throw Error(ErrorKind::BadFile, file_ + ": its header is no object");
    fail(what + " stands where the format has none" + (field_.empty() ? "" : " ('" + field_ + "')"));
  }
  void check_bytes(const SafetensorsEntry& entry) const {
    // A size of 0 does not save the others: strides are products of them.
    int64_t most = static_cast<int64_t>(at::elementSize(entry.dtype)), bytes = most;
    for (const int64_t size : entry.sizes) {
      if (__builtin_mul_overflow(most, std::max<int64_t>(size, 1), &most) ||
          __builtin_mul_overflow(bytes, size, &bytes))
        fail("its shape has more elements than fit 63 bits");
    }
    if (static_cast<uint64_t>(bytes) != entry.bytes)
      fail(c10::str("its shape and dtype are ", bytes, " bytes, its data_offsets ", entry.bytes));
  }

  const std::string& file_;
  int depth_ = 0;
  int offsets_seen_ = -1;  // count of numbers read from the current data_offsets; -1: the list is a shape
  bool in_metadata_ = false, in_list_ = false;
  std::string name_, field_;
  std::unordered_set<std::string> names_, fields_;  // so far: of the header, of the entry
};

}  // namespace

std::string_view safetensors_dtype(at::ScalarType dtype) {
  for (const auto& d : kDtypesOfFormat) {
    if (d.dtype == dtype) return d.name;
  }
  return "";
}

std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name) {
  for (const auto& d : kDtypesOfFormat) {
    if (d.name == name) return d.dtype;
  }
  return std::nullopt;
}

SafetensorsHeader parse_safetensors_header(const std::string& file, std::string_view text, uint64_t data_bytes) {
  HeaderGrammar grammar(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &grammar);
  auto& entries = grammar.header.entries;
  std::ranges::sort(entries, {}, [](const SafetensorsEntry& e) { return std::tie(e.offset, e.bytes, e.name); });
  const auto bad = [&](const SafetensorsEntry& entry, const char* what) {
    refuse(file, "tensor '" + entry.name + "': " + what);
  };
  uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.offset < end) bad(entry, "its bytes overlap those of another tensor");
    if (entry.offset > end) bad(entry, "bytes before its own belong to no tensor");
    end += entry.bytes;
    if (end > data_bytes) bad(entry, "the file ends before its last byte");
  }
  if (end != data_bytes) refuse(file, c10::str(data_bytes - end, " bytes at its end belong to no tensor"));
  return std::move(grammar.header);
}

}  // namespace plumb
