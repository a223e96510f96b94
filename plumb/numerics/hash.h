// A tensor's bits as one number, to find out whether two tensors, perhaps of two runs, are the same.
//
// The tensor is a list of 32-bit words in the order of its indices, whatever its strides: an element of 1, 2 or 4 bytes
// is one, of 8 two, the low one first. The hash is the sum of kHashKey^place x (word ^ word >> 16) mod 2^64. Keys are
// odd, so one changed word always changes it, and so do two words in which the same bit is flipped. Parts add up: the
// hash of a batch is the sum of those of its parts, each times kHashKey^(words before it). It depends on no thread,
// device or stride. Equal values may have other bits: -0 and 0, and NaNs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace plumb {

// Takes strided tensors of any dtype and on any device; waits for the device (ops::tensor_hash does not). Throws
// Error(TensorMismatch) for others.
uint64_t hash_of(const at::Tensor& x);
// Returns the number of words in a tensor.
int64_t hashed_words(const at::Tensor& x);
// Returns what a hash adds to that of a tensor in which `words` words stand before its own.
uint64_t hash_after(uint64_t hash, int64_t words);

namespace ops {
// plumb::tensor_hash: the hash's bits as int64 [].
at::Tensor tensor_hash(const at::Tensor& x);
}  // namespace ops

}  // namespace plumb
