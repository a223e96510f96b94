// plumb::data is what Python's `.data` and C++'s variable_data() are in a graph: the tensor's memory, cut from
// autograd's graph and with a version of its own. Autograd takes no notice of what is written through it, as in the
// program.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "plumb/operators/operator_facts.h"

namespace plumb {

const RegisterOperators data_operator_rows{{"plumb::", "data", {.passes_through = true, .plain_view = true}}};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("data(Tensor(a) self) -> Tensor(a)", tags);
}
TORCH_LIBRARY_IMPL(plumb, CompositeImplicitAutograd, m) {
  m.impl("data", [](const at::Tensor& self) { return self.variable_data(); });
}

}  // namespace plumb
