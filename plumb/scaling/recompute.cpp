// Which unit-scaled operators a backward may compute again. Those whose own backward needs their result are not among
// them: it is kept anyway.
#include "plumb/autograd/recompute_note.h"

namespace plumb {

TORCH_LIBRARY_IMPL(plumb, TESTING_ONLY_GenericWrapper, m) {
  for (const char* name : {"gelu", "silu", "silu_glu", "layer_norm", "rms_norm"}) m.impl(name, cheap_to_recompute());
  for (const char* name : {"linear", "linear_readout", "matmul", "conv1d", "conv2d", "conv3d"})
    m.impl(name, saves_its_arguments());
}

}  // namespace plumb
