#include "plumb/numerics/kernel_table.h"

namespace plumb::kernel {

const KernelTable avx512_kernels = make_table("avx512");

}  // namespace plumb::kernel
