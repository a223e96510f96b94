// Graphs before and after optimise(): their bits.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/optimise/optimise.h"

namespace plumb::testing_optimise {

using namespace testing_models;
using Tensors = std::vector<at::Tensor>;

inline size_t count(const GraphModule& module, std::string_view op) {
  size_t n = 0;
  for (const Node* node : module.graph().nodes()) n += node->is_op(op);
  return n;
}

inline Tensors run(GraphModule& module, const Tensors& inputs) {
  std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  Tensors results;
  for (const c10::IValue& v : module.run(std::move(values))) results.push_back(v.toTensor());
  return results;
}

// Returns outputs, gradients of the inputs and of the parameters.
inline Tensors outputs_and_gradients(GraphModule& module, Tensors inputs) {
  Tensors wanted;
  for (at::Tensor& x : inputs) {
    if (!x.is_floating_point()) continue;
    x = x.detach().requires_grad_();
    wanted.push_back(x);
  }
  for (const Attr& attr : module.state()) {
    if (attr.kind == AttrKind::Parameter) wanted.push_back(attr.tensor);
  }
  Tensors all = run(module, inputs);
  at::manual_seed(9);
  Tensors seeds;
  for (const at::Tensor& y : all) seeds.push_back(at::randn_like(y));
  Tensors roots, root_seeds;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].requires_grad()) continue;
    roots.push_back(all[i]);
    root_seeds.push_back(seeds[i]);
  }
  for (const at::Tensor& g : torch::autograd::grad(roots, wanted, root_seeds, std::nullopt, false, true))
    all.push_back(g.defined() ? g : zeros_there({}));
  return all;
}

inline void expect_same_bits(GraphModule& a, GraphModule& b, const Tensors& inputs) {
  const Tensors x = outputs_and_gradients(a, inputs), y = outputs_and_gradients(b, inputs);
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_TRUE(at::equal(at::nan_to_num(x[i]), at::nan_to_num(y[i]))) << i << "\n"
                                                                       << to_string(a.graph()) << to_string(b.graph());
  }
}

inline void expect_close(GraphModule& a, GraphModule& b, const Tensors& inputs) {
  const Tensors x = outputs_and_gradients(a, inputs), y = outputs_and_gradients(b, inputs);
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(at::allclose(x[i], y[i], 1e-5, 1e-5)) << i;
}

}  // namespace plumb::testing_optimise
