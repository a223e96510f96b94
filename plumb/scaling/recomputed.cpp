// The unit-scaled operators that a backward may compute again. Those whose backward needs their result are not cheap:
// it is kept anyway.
#include "plumb/autograd/recompute/recompute_facts.h"
#include "plumb/operators/dispatch_keys.h"

namespace plumb {

TORCH_LIBRARY_IMPL(plumb, PLUMB_RECOMPUTE_KEY, m) {
  compute_again(m, {"plumb", "gelu layer_norm rms_norm silu silu_glu", true});
  compute_again(m, {"plumb", "conv1d conv2d conv3d linear linear_readout matmul", false});
}

}  // namespace plumb
