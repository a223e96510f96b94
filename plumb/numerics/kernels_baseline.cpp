#include "plumb/numerics/kernel_table.h"

namespace plumb::kernel {

const KernelTable baseline_kernels = make_table("baseline");

}  // namespace plumb::kernel
