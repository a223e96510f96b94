// Tokens by position, from files of nothing but numbers or from a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "plumb/exported/tensor_files/tensor_file.h"

namespace plumb {

class Tokens {
 public:
  virtual ~Tokens() = default;
  virtual int64_t size() const = 0;
  // Reads `count` tokens from `start` on, 1-d, kLong.
  virtual at::Tensor read(int64_t start, int64_t count) = 0;
  virtual std::string identity() const = 0;
};

// Returns whether a .npy or .safetensors file's tokens are one whole-number tensor of one dimension, which TokenFiles
// reads: the only tensor of a .safetensors file, or the one that is named "tokens".
bool is_token_tensor(const std::string& path);

// A file, or the files below a folder as one text: nothing but numbers, or by their names' endings .npy and
// .safetensors files of which is_token_tensor() holds. At most 32 are open at once. Throws Error(BadFile) where a file
// has another size, time or inode than when this was made.
class TokenFiles : public Tokens {
 public:
  // `pattern`: of the paths below the folder; empty: all. `dtype`: of files of nothing but numbers. `option` is for
  // messages. Throws UsageError for a folder
  // without such a file.
  TokenFiles(const std::string& path, const std::string& pattern, at::ScalarType dtype, const std::string& option);
  int64_t size() const override { return files_.empty() ? 0 : files_.back().end; }
  at::Tensor read(int64_t start, int64_t count) override;
  // Returns names below the folder and sizes.
  std::string identity() const override;

 private:
  struct Stamp {
    int64_t size = 0, seconds = 0, nanoseconds = 0;
    uint64_t inode = 0;
    bool operator==(const Stamp&) const = default;
  };
  struct File {
    std::string path, name;
    Stamp stamp;
    int64_t begin = 0, end = 0;  // among all tokens
    at::ScalarType dtype = at::kByte;
  };
  static Stamp stamp_of(const std::string& path);
  void add(const std::string& path, const std::string& name, const std::string& option);
  // Throws Error(BadFile) if the file is not what it was at the start.
  static void check_unchanged(const File& of);
  const TokenFile& open(size_t file);
  std::unique_ptr<TokenFile> open_new(const std::string& path, at::ScalarType& dtype) const;

  const at::ScalarType dtype_;
  std::vector<File> files_;
  std::list<std::pair<size_t, std::unique_ptr<TokenFile>>> open_;  // the last used one first
};

// A 1-d tensor of whole numbers.
class TensorTokens : public Tokens {
 public:
  TensorTokens(at::Tensor tokens, std::string name) : tokens_(std::move(tokens)), name_(std::move(name)) {}
  int64_t size() const override { return tokens_.size(0); }
  at::Tensor read(int64_t start, int64_t count) override;
  std::string identity() const override;

 private:
  at::Tensor tokens_;
  std::string name_;
};

}  // namespace plumb
