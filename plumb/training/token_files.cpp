#include "plumb/training/token_files.h"

#include <ATen/ATen.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "plumb/core/crc32.h"
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
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

TokenFiles::TokenFiles(const std::string& path, const std::string& pattern, at::ScalarType dtype,
                       const std::string& option)
    : dtype_(dtype) {
  std::error_code failed;
  if (fs::is_directory(path, failed)) {
    for (const std::string& name : files_below(path, pattern)) add((fs::path(path) / name).string(), name);
    if (files_.empty()) {
      throw UsageError(option + " " + path + ": has no file" + (pattern.empty() ? "" : " that fits '" + pattern + "'"),
                       "a folder with files of tokens or text");
    }
  } else {
    add(path, fs::path(path).filename().string());
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

void TokenFiles::add(const std::string& path, const std::string& name) {
  const int64_t begin = size();
  const TokenFile file(path, dtype_);  // says what is wrong with it
  files_.push_back({path, name, stamp_of(path), begin, begin + file.size()});
}

void TokenFiles::check_unchanged(const File& of) {
  const Stamp now = stamp_of(of.path);
  if (now != of.stamp) {
    throw Error(ErrorKind::BadFile,
                of.path + ": has changed since the training began: " + std::to_string(of.stamp.size) + " bytes then, " +
                    std::to_string(now.size) + " now" + (now.size == of.stamp.size ? ", written again" : ""),
                "", "leave the data as it is while a training runs, or train on a copy");
  }
}

const TokenFile& TokenFiles::open(size_t file) {
  const File& of = files_[file];
  check_unchanged(of);
  const auto found = std::find_if(open_.begin(), open_.end(), [&](const auto& entry) { return entry.first == file; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
  } else {
    open_.emplace_front(file, std::make_unique<TokenFile>(of.path, dtype_));
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
  for (const File& file : files_) list += file.name + " " + std::to_string(file.stamp.size) + "\n";
  return std::to_string(files_.size()) + " files, " + std::to_string(size()) + " tokens, " + at::toString(dtype_) +
         ", list " + std::to_string(crc32(list.data(), list.size()));
}

at::Tensor TensorTokens::read(int64_t start, int64_t count) { return tokens_.narrow(0, start, count).to(at::kLong); }

std::string TensorTokens::identity() const { return name_ + " " + type_text(tokens_); }

}  // namespace plumb
