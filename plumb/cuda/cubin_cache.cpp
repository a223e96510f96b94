#include "plumb/cuda/cubin_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "plumb/core/error.h"
#include "plumb/core/output_file.h"

namespace plumb::cuda {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'p', 'l', 'm', 'b', 'c', 'u', 'b', '1'};
constexpr uint64_t kMostBytes = uint64_t(64) << 20;

// FNV-1a: against damage, not against people, who cannot write here.
uint64_t hash(std::string_view bytes) {
  uint64_t value = 0xcbf29ce484222325u;
  for (const char c : bytes) value = (value ^ uint8_t(c)) * 0x100000001b3u;
  return value;
}

struct Prefix {
  char magic[8];
  uint64_t key_bytes, binary_bytes, binary_hash;
};

constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

// Owned by this user, and writable by no other.
bool is_private(const fs::path& path, mode_t kind) {
  struct stat found {};
  return lstat(path.c_str(), &found) == 0 && (found.st_mode & S_IFMT) == kind && found.st_uid == geteuid() &&
         (found.st_mode & kOthersWrite) == 0;
}

// Nobody but this user and root can put another folder in the place of one in it. In a sticky folder (/tmp) only the
// owner of an entry can.
bool keeps_entries(const fs::path& folder) {
  struct stat found {};
  return lstat(folder.c_str(), &found) == 0 && S_ISDIR(found.st_mode) &&
         (found.st_uid == geteuid() || found.st_uid == 0) &&
         ((found.st_mode & kOthersWrite) == 0 || (found.st_mode & S_ISVTX) != 0);
}

// Makes the folders that are missing, for this user alone.
void make_folders(const fs::path& folder) {
  std::vector<fs::path> missing;
  std::error_code none;
  for (fs::path at = folder; !at.empty() && at != at.root_path() && !fs::exists(at, none); at = at.parent_path())
    missing.push_back(at);
  for (auto at = missing.rbegin(); at != missing.rend(); ++at) mkdir(at->c_str(), S_IRWXU);
}

}  // namespace

CubinCache CubinCache::of_user() {
  if (const char* named = std::getenv("PLUMB_KERNEL_CACHE")) return CubinCache(named);
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg == '/')
    return CubinCache(std::string(xdg) + "/plumb/kernels");
  if (const char* home = std::getenv("HOME"); home && *home == '/')
    return CubinCache(std::string(home) + "/.cache/plumb/kernels");
  return CubinCache("");
}

std::string CubinCache::file(std::string_view key) const {
  char name[32];
  std::snprintf(name, sizeof name, "%016llx.cubin", static_cast<unsigned long long>(hash(key)));
  std::error_code none;
  const fs::path folder =
      folder_.empty() ? fs::path() : fs::canonical(folder_, none);  // no link in it may change later
  if (folder.empty() || !is_private(folder, S_IFDIR)) return "";
  for (fs::path at = folder; at != at.root_path();) {
    at = at.parent_path();
    if (!keeps_entries(at)) return "";
  }
  return (folder / name).string();
}

std::optional<std::vector<char>> CubinCache::read(std::string_view key) const {
  const std::string path = file(key);
  if (path.empty() || !is_private(path, S_IFREG)) return std::nullopt;
  std::ifstream in(path, std::ios::binary);
  Prefix prefix;
  if (!in.read(reinterpret_cast<char*>(&prefix), sizeof prefix) ||
      std::memcmp(prefix.magic, kMagic, sizeof kMagic) != 0 || prefix.key_bytes != key.size() ||
      prefix.binary_bytes == 0 || prefix.binary_bytes > kMostBytes)
    return std::nullopt;
  std::string kept(key.size(), 0);
  if (!in.read(kept.data(), std::streamsize(kept.size())) || kept != key) return std::nullopt;
  // The size is a claim of the file: it must be what is left of it.
  const auto here = in.tellg();
  const auto left = in.seekg(0, std::ios::end).tellg() - here;
  if (left != std::streamoff(prefix.binary_bytes)) return std::nullopt;
  in.seekg(here);
  std::vector<char> binary(prefix.binary_bytes);
  if (!in.read(binary.data(), std::streamsize(binary.size())) ||
      hash({binary.data(), binary.size()}) != prefix.binary_hash)
    return std::nullopt;
  return binary;
}

void CubinCache::write(std::string_view key, const std::vector<char>& binary) const {
  if (folder_.empty()) return;
  try {
    make_folders(folder_);
    const std::string path = file(key);
    if (path.empty()) return;
    Prefix prefix{{}, key.size(), binary.size(), hash({binary.data(), binary.size()})};
    std::memcpy(prefix.magic, kMagic, sizeof kMagic);
    OutputFile out(path);
    out.write(&prefix, sizeof prefix);
    out.write(key.data(), key.size());
    out.write(binary.data(), binary.size());
    out.commit();
    // A umask may let others write: then it would not be read again.
    chmod(path.c_str(), S_IRUSR | S_IWUSR);
  } catch (const Error&) {
    // A full disk, or no permission: the next process compiles again.
  }
}

}  // namespace plumb::cuda
