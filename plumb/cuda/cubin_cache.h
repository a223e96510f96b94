// Compiled kernels on disk, so that a process need not compile what an earlier one did.
//
// The folder is PLUMB_KERNEL_CACHE, else $XDG_CACHE_HOME/plumb/kernels, else ~/.cache/plumb/kernels; PLUMB_KERNEL_CACHE
// set to nothing means none. An entry holds all that its binary was made of, byte for byte, and a hash of the binary; a
// file that does not fit in any of this counts as absent and is written anew. A folder that belongs to another user or
// that others may write to is not used, nor one that they could replace, through any folder above it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace plumb::cuda {

class CubinCache {
 public:
  // An empty folder: nothing is kept.
  explicit CubinCache(std::string folder) : folder_(std::move(folder)) {}
  static CubinCache of_user();

  // `key`: compiler's version, options and texts. Neither throws: a cache that cannot be read or written is none.
  std::optional<std::vector<char>> read(std::string_view key) const;
  void write(std::string_view key, const std::vector<char>& binary) const;

  // Returns the file of an entry, "" if the folder is not there or not this user's alone.
  std::string file(std::string_view key) const;

 private:
  std::string folder_;
};

}  // namespace plumb::cuda
