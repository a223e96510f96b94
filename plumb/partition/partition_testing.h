// Models as text for this room's tests, and the comparison of a split with the whole.
#pragma once

#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/partition/split.h"
#include "tests/gpt_graph.h"
#include "tests/message_of.h"

namespace plumb::partition_testing {

inline void parameter(State& state, const std::string& name, at::IntArrayRef sizes) {
  state.add({name, AttrKind::Parameter, (at::randn(sizes) * 0.3).requires_grad_()});
}

constexpr testing_models::GptConfig kSmallGpt{.width = 8, .heads = 2, .length = 6, .batch = 3, .vocabulary = 11};

// Returns a small GPT with a parameter that nobody uses.
inline std::shared_ptr<GraphModule> gpt(int layers, bool tied, bool marks, bool stacks = false, double dropout = 0.0) {
  at::manual_seed(7);
  testing_models::GptConfig config = kSmallGpt;
  config.layers = layers, config.tied = tied, config.marks = marks, config.stacks = stacks, config.dropout = dropout;
  auto module = testing_models::gpt(config);
  module->state().add({"unused.weight", AttrKind::Parameter, ones_there({2}).requires_grad_()});
  module->sync_module();
  return module;
}

inline std::vector<c10::IValue> gpt_inputs() {
  at::manual_seed(11);
  return testing_models::gpt_inputs(kSmallGpt);
}

inline bool same(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  at::NoGradGuard no_grad;
  return !a.defined() || (a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && at::equal(a, b));
}

inline std::shared_ptr<GraphModule> model(const std::string& text, State state = {}) {
  Graph graph = parse_graph(text);
  const size_t inputs = graph.placeholders().size(), outputs = graph.output_node()->args().size();
  auto module = std::make_shared<GraphModule>(std::move(graph), std::move(state), TreeSpec::positional_inputs(inputs),
                                              TreeSpec::tuple(std::vector<TreeSpec>(outputs, TreeSpec::leaf())));
  move_there(*module);
  return module;
}

inline std::vector<c10::IValue> fresh(const std::vector<c10::IValue>& inputs) {
  std::vector<c10::IValue> copies;
  for (const auto& v : inputs) {
    if (v.isTensor()) {
      at::Tensor t = v.toTensor();
      copies.emplace_back(there(t).detach().clone().set_requires_grad(t.requires_grad()));
    } else {
      copies.push_back(v);
    }
  }
  return copies;
}

// Splits, and compares with the whole. Output 0 is the loss. Steps twice (so that buffers go on from the first step's)
// and runs once more without loss. Compares outputs, gradients of inputs and of every parameter, buffers, inputs
// written: all bit for bit. Names what differs; "" if nothing does. `gradient_slack` is what gradients may differ by,
// relative to the largest element.
inline std::string difference(const GraphModule& module, SplitOptions options, const std::vector<c10::IValue>& inputs,
                              std::shared_ptr<Pipe>* made = nullptr, double gradient_slack = 0.0) {
  auto whole = module.deep_copy();
  auto cut = module.deep_copy();
  const size_t num_outputs = module.graph().output_node()->args().size();
  std::vector<c10::IValue> spec(num_outputs, false);
  spec[0] = true;
  options.loss_spec = c10::ivalue::Tuple::create(spec);
  auto pipe = pipeline(*cut, options);
  if (made) *made = pipe;
  std::string found;
  auto compare = [&](const c10::IValue& want, const c10::IValue& have, const std::string& what) {
    const bool equal = want.isTensor() && have.isTensor() ? same(want.toTensor(), have.toTensor()) : want == have;
    if (!equal) found += what + " differs; ";
  };
  auto compare_gradients = [&](const at::Tensor& want, const at::Tensor& have, const std::string& what) {
    const bool near = want.defined() && have.defined() && want.sizes() == have.sizes() &&
                      at::allclose(want, have, 0.0, gradient_slack * want.abs().max().item<double>());
    if (!near) compare(want, have, "gradient of " + what);
  };
  for (int step = 0; step < 2; ++step) {
    auto in_whole = fresh(inputs), in_cut = fresh(inputs);
    at::manual_seed(5 + step);
    auto expected = whole->run(in_whole);
    expected[0].toTensor().backward();
    at::manual_seed(5 + step);
    auto got = pipe->run_with_backward(in_cut);
    for (size_t i = 0; i < num_outputs; ++i) compare(expected[i], got.outputs[i], "output " + std::to_string(i));
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].isTensor()) continue;
      compare_gradients(in_whole[i].toTensor().grad(), got.input_grads[i], "input " + std::to_string(i));
      compare(in_whole[i], in_cut[i], "input " + std::to_string(i) + " after the step");
    }
    const State merged = pipe->merge_state_dict();
    if (merged.size() != whole->state().size()) return found + "the merged state has another size";
    for (size_t a = 0; a < merged.size(); ++a) {
      const Attr &want = whole->state().attrs()[a], &have = merged.attrs()[a];
      if (want.name != have.name) found += want.name + " is called " + have.name + "; ";
      compare(want.tensor, have.tensor, want.name);
      compare_gradients(want.tensor.grad(), have.tensor.grad(), want.name);
    }
  }
  for (int s = 0; s < pipe->num_stages(); ++s) pipe->stage(s)->lint();
  at::manual_seed(9);
  auto expected = whole->run(fresh(inputs));
  at::manual_seed(9);
  auto got = pipe->run(fresh(inputs));
  for (size_t i = 0; i < num_outputs; ++i) compare(expected[i], got[i], "output " + std::to_string(i) + " of run()");
  return found;
}

inline std::shared_ptr<Pipe> expect_equals_whole(const GraphModule& module, const SplitOptions& options,
                                                 const std::vector<c10::IValue>& inputs, int stages) {
  std::shared_ptr<Pipe> pipe;
  EXPECT_EQ(difference(module, options, inputs, &pipe), "");
  EXPECT_EQ(pipe->num_stages(), stages);
  return pipe;
}

}  // namespace plumb::partition_testing
