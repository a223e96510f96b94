// Plain tensor files: `.pt` of torch.save, `.npy` of numpy, raw token files.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "plumb/core/input_file.h"

namespace plumb {

// Reads by the ending of the name: `.pt`/`.pth` (a tensor, or a dict, list or tuple of tensors), `.npy` (a tensor).
// Throws Error (BadFile) that says what is wrong and where.
c10::IValue load_tensors(const std::string& path);
// Writes by the ending of the name, beside the path first, then renamed; `.npy` takes one tensor. torch.load (also with
// weights_only=True) and numpy.load read the files. An undefined tensor is None in a `.pt` file. Throws
// Error(InvalidArgument) for another ending, and for something other than a tensor in a `.npy` file; Error(Unsupported)
// for values, dtypes and layouts that the file has no place for; Error(CannotWrite).
void save_tensors(const c10::IValue& value, const std::string& path);

// Reads one tensor of a `.npy` file, C order, little endian; no objects. bfloat16 and float8 have no type there.
at::Tensor load_npy(const std::string& path);
// Throws what save_tensors() throws, and Error(InvalidArgument) for an undefined tensor.
void save_npy(const at::Tensor& tensor, const std::string& path);

// The header of a `.npy` file.
struct NpyHeader {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  uint64_t offset = 0;  // file offset of the first number
};
// Reads and checks the header, and that the file is as long as it states.
NpyHeader read_npy_header(const std::string& path);

// A file of nothing but numbers: kByte, kUInt16 or kInt, little endian. It stays open, and is read in pieces. Or a part
// of a file: `count` numbers of any whole-number type from byte `offset` on.
class TokenFile {
 public:
  TokenFile(std::string path, at::ScalarType dtype);
  TokenFile(std::string path, at::ScalarType dtype, uint64_t offset, int64_t count);
  int64_t size() const { return count_; }  // tokens
  // Reads `count` tokens from `start` on, 1-d, kLong. Throws Error(InvalidArgument) for tokens that the file does not
  // have, and Error(BadFile) for one of 2^63 or more or if the file has become shorter.
  at::Tensor read(int64_t start, int64_t count) const;

 private:
  std::string path_;
  InputFile file_;
  at::ScalarType dtype_;
  uint64_t offset_ = 0;
  int64_t count_ = 0;
};

// Returns 1-d tokens as kLong. Throws Error(BadFile) for one of 2^63 or more: the token's number counts from `first`,
// `name` is the file's or the tensor's.
at::Tensor as_long_tokens(const at::Tensor& tokens, const std::string& name, int64_t first);

}  // namespace plumb
