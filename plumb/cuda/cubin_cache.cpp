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

// Owned by this user, and writable by no other.
bool is_private(const std::string& path, mode_t kind) {
  struct stat found {};
  return lstat(path.c_str(), &found) == 0 && (found.st_mode & S_IFMT) == kind && found.st_uid == geteuid() &&
         (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
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
  return folder_ + "/" + name;
}

std::optional<std::vector<char>> CubinCache::read(std::string_view key) const {
  if (folder_.empty() || !is_private(folder_, S_IFDIR) || !is_private(file(key), S_IFREG)) return std::nullopt;
  std::ifstream in(file(key), std::ios::binary);
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
    std::error_code none;
    if (fs::create_directories(folder_, none)) chmod(folder_.c_str(), S_IRWXU);
    if (!is_private(folder_, S_IFDIR)) return;
    Prefix prefix{{}, key.size(), binary.size(), hash({binary.data(), binary.size()})};
    std::memcpy(prefix.magic, kMagic, sizeof kMagic);
    OutputFile out(file(key));
    out.write(&prefix, sizeof prefix);
    out.write(key.data(), key.size());
    out.write(binary.data(), binary.size());
    out.commit();
    // A umask may let others write: then it would not be read again.
    chmod(file(key).c_str(), S_IRUSR | S_IWUSR);
  } catch (const Error&) {
    // A full disk, or no permission: the next process compiles again.
  }
}

}  // namespace plumb::cuda
