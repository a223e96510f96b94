#include "plumb/numerics/kernel_table.h"

namespace plumb::kernel {

const KernelTable avx2_kernels = make_table("avx2");

}  // namespace plumb::kernel
