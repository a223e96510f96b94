#include "plumb/numerics/kernel_table.h"

namespace plumb::kernel {

extern const KernelTable avx2_kernels;
const KernelTable avx2_kernels = make_table("avx2");

}  // namespace plumb::kernel
