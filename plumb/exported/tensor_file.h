// Plain tensor files: `.pt` of torch.save, `.npy` of numpy, raw token files.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace plumb {

// Reads by the ending of the name: `.pt`/`.pth` (a tensor, or a dict, list or tuple of tensors), `.npy` (a tensor).
// Throws Error (BadFile) that says what is wrong and where.
c10::IValue load_tensors(const std::string& path);
// Writes by the ending of the name; `.npy` takes one tensor. Beside the path first, then renamed. torch.load (also with
// weights_only=True) and numpy.load read the files.
void save_tensors(const c10::IValue& value, const std::string& path);

// One tensor of a `.npy` file, C order, little endian; no objects. bfloat16 and float8 have no type there.
at::Tensor load_npy(const std::string& path);
void save_npy(const at::Tensor& tensor, const std::string& path);

// A file of nothing but numbers, 1-d, memory-mapped: kByte, kUInt16 or kInt, little endian. Writes to it never reach
// the file. The file must not shrink while the tensor lives.
at::Tensor map_tokens(const std::string& path, at::ScalarType dtype);

}  // namespace plumb
