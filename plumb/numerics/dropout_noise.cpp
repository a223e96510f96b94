#include "plumb/numerics/dropout_noise.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/element.h"

namespace plumb {

at::Tensor dropout_noise(const at::Tensor& x, double kept, double value, uint64_t seed) {
  check_tensor(x, "dropout");
  const auto carrier = carrier_of(x.scalar_type(), "dropout");
  at::NoGradGuard no_grad;
  const uint32_t last = kernel::last_word_of(kept);
  const at::Tensor noise = fresh_like(x, x.scalar_type());
  if (!x.is_cpu()) {
    aten_kernels::keep(noise, value, last, seed);
    return noise;
  }
  const at::Tensor one = at::full({}, value, noise.options());
  const size_t size = noise.element_size();
  char* to = static_cast<char*>(noise.mutable_data_ptr());
  for_blocks(noise.numel(), [&](int64_t begin, int64_t end) {
    kernel::kernels().keep[carrier](to + begin * size, end - begin, one.const_data_ptr(), last, seed,
                                    begin / kernel::kRandomBlock);
  });
  return noise;
}

}  // namespace plumb
