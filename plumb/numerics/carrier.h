// Between tensors and kernels: dtype to carrier, format to RoundingSpec, and loops over blocks. For rooms with kernels.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "plumb/numerics/format.h"
#include "plumb/numerics/kernels.h"

namespace plumb {

// Returns the storage dtype of kernels. Throws Error(TensorMismatch), naming `what`, for other dtypes.
kernel::Carrier carrier_of(at::ScalarType dtype, const char* what);

// Returns false for a subclass of Python's that keeps its values in other tensors (DTensor, fake tensors).
bool has_own_memory(const at::Tensor& x);

// Throws Error(TensorMismatch) for a tensor that is not strided, has no values (on the meta device) or has them in
// other tensors.
void check_tensor(const at::Tensor& x, const char* what);

// Throws Error(TensorMismatch) for a tensor that measure() does not take.
void check_measurable(const at::Tensor& x);

kernel::RoundingSpec rounding_spec(const FPFormat& format, kernel::Carrier carrier);

// The type in which elements of blocks are computed.
kernel::Carrier computed_in(kernel::Carrier carrier);
// Returns the specification of a format whose blocks share scales.
kernel::BlockSpec block_spec(const FPFormat& format, kernel::Carrier carrier);

// Returns the specification of a format's elements. Throws Error(InvalidArgument) for more than 8 bits.
kernel::CodeSpec code_spec_of(const FPFormat& format);
// code_spec_of() with a code for negative zero in place of NaN where the format has no NaN: nan_code -1.
kernel::CodeSpec saved_code_spec(const FPFormat& format);

// x's elements are one run of memory.
bool is_dense(const at::Tensor& x);

// Like at::empty_like; a large one asks for huge pages, which halves the cost of touching fresh memory.
at::Tensor fresh_like(const at::Tensor& x, at::ScalarType dtype);

// body(begin, end) over pieces of [0, n) that start at multiples of kernel::kRandomBlock, on torch's threads.
template <class Body>
void for_blocks(int64_t n, const Body& body) {
  constexpr int64_t block = kernel::kRandomBlock;
  if (n <= 4 * block) {
    if (n > 0) body(int64_t(0), n);
    return;
  }
  at::parallel_for(0, (n + block - 1) / block, 4,
                   [&](int64_t first, int64_t last) { body(first * block, std::min(n, last * block)); });
}

}  // namespace plumb
