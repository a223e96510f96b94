#include "plumb/numerics/kernel_table.h"

namespace plumb::kernel {

extern const KernelTable avx512_kernels;
const KernelTable avx512_kernels = make_table("avx512");

}  // namespace plumb::kernel
