#include "plumb/numerics/kernel_table.h"

namespace plumb::kernel {

extern const KernelTable baseline_kernels;
const KernelTable baseline_kernels = make_table("baseline");

}  // namespace plumb::kernel
