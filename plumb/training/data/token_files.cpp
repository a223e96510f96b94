#include "plumb/training/data/token_files.h"

#include <ATen/ATen.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/core/checksum.h"
#include "plumb/core/text.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
constexpr size_t kOpenFiles = 32;

// Paths of the regular files below a folder, relative to it, sorted.
std::vector<std::string> files_below(const std::string& folder, const std::string& pattern) {
  std::vector<std::string> names;
  std::error_code failed;
  auto it = fs::recursive_directory_iterator(folder, failed);
  for (; !failed && it != fs::recursive_directory_iterator(); it.increment(failed)) {
    const bool hidden = it->path().filename().string().starts_with('.');
    if (hidden && it->is_directory(failed)) it.disable_recursion_pending();
    if (hidden || !it->is_regular_file(failed)) continue;
    const std::string name = it->path().lexically_relative(folder).string();
    if (pattern.empty() || matches_pattern(pattern, name)) names.push_back(name);
  }
  if (failed) throw Error(ErrorKind::BadFile, folder + ": cannot be read: " + failed.message());
  std::ranges::sort(names);
  return names;
}

struct TokenPlace {
  at::ScalarType dtype;
  uint64_t offset;
  int64_t count;
};

// Returns the tokens' place in such a file; nothing if it holds other tensors.
std::optional<TokenPlace> find_tokens(const std::string& path) {
  const auto fits = [](at::ScalarType dtype, const std::vector<int64_t>& sizes) {
    return sizes.size() == 1 && at::isIntegralType(dtype, /*includeBool=*/false);
  };
  if (path.ends_with(".npy")) {
    const NpyHeader header = read_npy_header(path);
    if (!fits(header.dtype, header.sizes)) return std::nullopt;
    return TokenPlace{header.dtype, header.offset, header.sizes[0]};
  }
  const SafetensorsFile file(path);
  const SafetensorsEntry* entry = file.entries().size() == 1 ? &file.entries()[0] : file.find("tokens");
  if (entry == nullptr || !fits(entry->dtype, entry->sizes)) return std::nullopt;
  return TokenPlace{entry->dtype, entry->offset, entry->sizes[0]};
}

// Returns the kind of a file whose first bytes show that it is neither text nor numbers; "" for others. Random numbers
// begin as one of these once in 100 million files.
std::string what_else_it_is(const std::string& path) {
  using namespace std::string_view_literals;
  static constexpr std::pair<std::string_view, const char*> kBeginnings[] = {
      {"PK\3\4"sv, "a zip archive, as .pt2, .pt and .npz files are"},
      {"PK\5\6"sv, "a zip archive"},
      {"\x80\2\x8a\x0al\xfc\x9c\x46\xf9"sv, "a file of torch.save"},
      {"\x80\4\x95"sv, "a pickle"},
      {"\x80\5\x95"sv, "a pickle"},
      {"\x93NUMPY"sv, "a NumPy array, whose name ends in .npy"},
      {"\x89HDF\r\n\x1a\n"sv, "an HDF5 file"},
      {"GGUF\2\0\0\0"sv, "a GGUF model"},
      {"GGUF\3\0\0\0"sv, "a GGUF model"},
      {"ARROW1\0\0"sv, "an Arrow file"},
      {"PAR1\x15"sv, "a Parquet file"},
      {"\x28\xb5\x2f\xfd"sv, "compressed by zstd"},
      {"\xfd\x37zXZ\0"sv, "compressed by xz"},
      {"BZh91AY&SY"sv, "compressed by bzip2"},
      {"7z\xbc\xaf\x27\x1c"sv, "a 7-Zip archive"},
  };
  constexpr size_t kTar = 257;  // where a tar file says that it is one
  const InputFile file(path);
  std::string begin(std::min<uint64_t>(file.size(), 512), '\0');
  file.read_at(0, begin.data(), begin.size());
  for (const auto& [bytes, what] : kBeginnings) {
    if (begin.starts_with(bytes)) return what;
  }
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(begin[at]); };
  const bool has_header = begin.size() >= 10;
  if (has_header && begin.starts_with("\x1f\x8b\x08") && byte(3) < 32 && byte(8) <= 4 &&
      (byte(9) <= 13 || byte(9) == 255))
    return "compressed by gzip";
  if (begin.size() >= kTar + 5 && std::string_view(begin).substr(kTar, 5) == "ustar") return "a tar archive";
  uint64_t header = 0;
  for (size_t i = 0; has_header && i < 8; ++i) header |= uint64_t{byte(i)} << (8 * i);
  if (has_header && begin.substr(8, 2) == "{\"" && header <= file.size() - 8)
    return "tensors, whose file's name ends in .safetensors";
  return "";
}

bool is_array_file(const std::string& path) { return path.ends_with(".npy") || path.ends_with(".safetensors"); }

}  // namespace

bool is_token_tensor(const std::string& path) { return is_array_file(path) && find_tokens(path).has_value(); }

TokenFiles::TokenFiles(const std::string& path, const std::string& pattern, at::ScalarType dtype,
                       const std::string& option)
    : dtype_(dtype) {
  std::error_code failed;
  if (fs::is_directory(path, failed)) {
    for (const std::string& name : files_below(path, pattern)) add((fs::path(path) / name).string(), name, option);
    if (files_.empty()) {
      throw UsageError(option + " " + path + ": has no file" + (pattern.empty() ? "" : " that fits '" + pattern + "'"),
                       "a folder with files of tokens or text");
    }
  } else {
    add(path, fs::path(path).filename().string(), option);
  }
}

TokenFiles::Stamp TokenFiles::stamp_of(const std::string& path) {
  struct stat now {};
  if (::stat(path.c_str(), &now) != 0) {
    throw Error(ErrorKind::BadFile, path + ": cannot be read: " + std::strerror(errno), "",
                "leave the data as it is while a training runs");
  }
  return {now.st_size, now.st_mtim.tv_sec, now.st_mtim.tv_nsec, now.st_ino};
}

void TokenFiles::add(const std::string& path, const std::string& name, const std::string& option) {
  const int64_t begin = size();
  if (const std::string what = is_array_file(path) ? "" : what_else_it_is(path); !what.empty()) {
    throw UsageError(
        option + " " + path + ": is no text and no tokens: by its first bytes it is " + what,
        "a file of text or of the tokens' numbers; of a folder, the files that fit --data-pattern '*.txt'");
  }
  at::ScalarType dtype = dtype_;
  const auto file = open_new(path, dtype);  // says what is wrong with it
  files_.push_back({path, name, stamp_of(path), begin, begin + file->size(), dtype});
}

std::unique_ptr<TokenFile> TokenFiles::open_new(const std::string& path, at::ScalarType& dtype) const {
  if (!is_array_file(path)) return std::make_unique<TokenFile>(path, dtype);
  const auto place = find_tokens(path);
  if (!place) {
    throw Error(ErrorKind::BadFile, path + ": holds no tokens: one whole-number tensor of one dimension", "",
                "such a tensor, alone or with the name 'tokens'");
  }
  dtype = place->dtype;
  return std::make_unique<TokenFile>(path, place->dtype, place->offset, place->count);
}

void TokenFiles::check_unchanged(const File& of) {
  const Stamp now = stamp_of(of.path);
  if (now != of.stamp) {
    throw Error(ErrorKind::BadFile,
                c10::str(of.path, ": has changed since the training began: ", of.stamp.size, " bytes then, ", now.size,
                         " now", now.size == of.stamp.size ? ", written again" : ""),
                "", "leave the data as it is while a training runs, or train on a copy");
  }
}

const TokenFile& TokenFiles::open(size_t file) {
  const File& of = files_[file];
  check_unchanged(of);
  const auto found = std::ranges::find_if(open_, [&](const auto& entry) { return entry.first == file; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
  } else {
    at::ScalarType dtype = dtype_;
    open_.emplace_front(file, open_new(of.path, dtype));
    if (open_.size() > kOpenFiles) open_.pop_back();
  }
  return *open_.front().second;
}

at::Tensor TokenFiles::read(int64_t start, int64_t count) {
  std::vector<at::Tensor> parts;
  auto it = std::upper_bound(files_.begin(), files_.end(), start,
                             [](int64_t position, const File& file) { return position < file.end; });
  for (int64_t at = start; at < start + count; ++it) {
    if (it->begin == it->end) continue;
    const int64_t here = std::min(it->end, start + count) - at;
    try {
      parts.push_back(open(static_cast<size_t>(it - files_.begin())).read(at - it->begin, here));
    } catch (const Error&) {
      check_unchanged(*it);  // it may have become shorter since it was opened
      throw;
    }
    at += here;
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

std::string TokenFiles::identity() const {
  std::string list;
  for (const File& file : files_) list += c10::str(file.name, " ", file.stamp.size, "\n");
  return c10::str(files_.size(), " files, ", size(), " tokens, ", at::toString(files_.front().dtype), ", list ",
                  crc32(list.data(), list.size()));
}

at::Tensor TensorTokens::read(int64_t start, int64_t count) {
  return as_long_tokens(tokens_.narrow(0, start, count), name_, start);
}

std::string TensorTokens::identity() const { return name_ + " " + type_text(tokens_); }

}  // namespace plumb
