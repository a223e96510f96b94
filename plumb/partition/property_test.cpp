// Random cuts of random graphs equal the whole.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "plumb/partition/partition_testing.h"
#include "plumb/partition/pipe_split.h"

namespace plumb {
namespace {

using namespace partition_testing;

// rapidcheck draws from a part of the range that grows with its size; here the whole range is wanted from the start.
template <typename T>
T draw(T low, T high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<T>(low, high));
}

// Values are all f32[4, 4]: every operator fits every value. In-place operators, views, buffers, random draws, numbers
// and constants are among them.
std::shared_ptr<GraphModule> random_model() {
  State state;
  at::manual_seed(3);
  for (const char* name : {"a.w", "b.w", "c.w"}) parameter(state, name, {4, 4});
  state.add({"tied.w", AttrKind::Parameter, state.get("b.w").tensor});
  state.add({"norm.mean", AttrKind::Buffer, zeros_there({4, 4})});
  state.add({"k", AttrKind::Constant, randn_there({4, 4})});
  Graph g;
  std::vector<Value*> pool;
  TensorMeta meta = TensorMeta::of(ones_there({4, 4}));
  for (const char* name : {"x", "y"}) pool.push_back(g.placeholder(name, meta)->result());
  for (Value*& v : pool) v = g.call("aten::mul.Tensor", {v, 1.5})->result();
  auto pick = [&] { return pool[draw<size_t>(0, pool.size())]; };
  const int n = draw<int>(1, 30);
  for (int i = 0; i < n; ++i) {
    Value* v = pick();
    switch (draw<int>(0, 21)) {
      case 0: v = g.call("aten::add.Tensor", {v, pick()})->result(); break;
      case 1: v = g.call("aten::mul.Tensor", {v, pick()})->result(); break;
      case 2: v = g.call("aten::tanh", {v})->result(); break;
      case 3: v = g.call("aten::relu_", {v})->result(); break;
      case 4: v = g.call("aten::mul_.Tensor", {v, 0.5})->result(); break;
      case 5: v = g.call("aten::t", {v})->result(); break;
      case 6: v = g.call("aten::view", {v, Arg::List{4, 4}})->result(); break;
      case 7:
      case 8: {
        const char* names[] = {"a.w", "b.w", "c.w", "tied.w"};
        Value* w = g.get_attr(names[draw<int>(0, 4)])->result();
        v = g.call("aten::linear", {v, w})->result();
        break;
      }
      case 9: v = g.call("aten::dropout", {v, 0.3, true})->result(); break;
      case 10: {
        Node* halves = g.call("aten::chunk", {v, 2, 1}, {2});
        v = g.call("aten::cat", {Arg::List{halves->result(1), halves->result(0)}, 1})->result();
        break;
      }
      case 11: {
        Value* row = g.call("aten::select.int", {v, 0, 1})->result();
        g.call("aten::mul_.Tensor", {row, 2.0});
        break;
      }
      case 12: {
        Value* b = g.get_attr("norm.mean")->result();
        Value* d = g.call("aten::detach", {v})->result();
        Value* m = g.call("aten::mul_.Tensor", {b, 0.9})->result();
        g.call("aten::add_.Tensor", {m, d});
        v = g.call("aten::sub.Tensor", {v, b})->result();
        break;
      }
      case 13: {
        Value* r = g.call("aten::arange", {16})->result();
        Value* m = g.call("aten::view", {r, Arg::List{4, 4}})->result();
        v = g.call("aten::add.Tensor", {v, m, 0.01})->result();
        break;
      }
      case 14: v = g.call("aten::mul.Tensor", {v, g.get_attr("k")->result()})->result(); break;
      case 15: {
        Value* s = g.call("aten::sym_size.int", {v, 0})->result();
        v = g.call("aten::view", {v, Arg::List{s, -1}})->result();
        break;
      }
      case 16: v = g.call("aten::contiguous", {v})->result(); break;
      default: g.call("plumb::pipe_split", {}); continue;
    }
    pool.push_back(v);
  }
  // The loss uses a few values from anywhere.
  Value* sum = pool.back();
  for (int i = draw<int>(0, 3); i > 0; --i) sum = g.call("aten::add.Tensor", {sum, pick()})->result();
  Value* early = pick();
  g.output({g.call("aten::mean", {sum})->result(), early});
  return std::make_shared<GraphModule>(std::move(g), std::move(state), TreeSpec::positional_inputs(2),
                                       TreeSpec::tuple({TreeSpec::leaf(), TreeSpec::leaf()}));
}

// Operators whose result is, or may be, their input's memory.
bool makes_aliases(const Graph& graph) {
  for (const Node* node : graph.nodes()) {
    for (const char* name : {"_.", "mul_", "relu_", "::view", "::select", "::chunk", "::contiguous", "::detach"}) {
      if (node->target() == "aten::t" || node->target().find(name) != std::string::npos) return true;
    }
  }
  return false;
}

std::vector<c10::IValue> inputs() {
  at::manual_seed(17);
  return {randn_there({4, 4}).requires_grad_(), randn_there({4, 4}).requires_grad_()};
}

bool trains(const GraphModule& module) {
  try {
    module.deep_copy()->run(inputs())[0].toTensor().backward();
    return true;
  } catch (const std::exception&) {
    return false;  // autograd's own refusals: a value it saved was overwritten
  }
}

SplitOptions random_options() {
  SplitOptions options;
  if (draw<int>(0, 2) == 1) options.multi_use = MultiUse::Transmit;
  if (draw<int>(0, 2) == 1) options.at_conflict = AtConflict::Refuse;
  return options;
}

// Returns null if the split is refused, which only memory may cause.
std::shared_ptr<Pipe> try_pipeline(const GraphModule& module, const SplitOptions& options) {
  try {
    return pipeline(module, options);
  } catch (const Error& e) {
    RC_ASSERT(std::string(e.what()).find("which writes memory") != std::string::npos);
    return nullptr;
  }
}

RC_GTEST_PROP(SplitProperty, RandomCutsOfRandomGraphsEqualTheWhole, ()) {
  auto module = random_model();
  SplitOptions options = random_options();
  auto probe = try_pipeline(*module, options);
  RC_TAG(probe ? std::to_string(probe->num_stages()) + " stages" : "refused");
  if (!probe) return;
  const bool training = trains(*module);
  RC_CLASSIFY(training, "with gradients");
  if (training) {
    // A value and an alias of it that cross a boundary bring their gradients home as two sums; autograd makes one in
    // the order of uses. Three summands in another order: the last bit may differ.
    const double slack = makes_aliases(module->graph()) ? 1e-6 : 0.0;
    RC_LOG() << to_string(module->graph());
    RC_ASSERT(difference(*module, options, inputs(), nullptr, slack) == "");
  } else {
    auto whole = module->deep_copy();
    at::NoGradGuard guard;
    at::manual_seed(1);
    const auto expected = whole->run(fresh(inputs()));
    auto pipe = pipeline(*module->deep_copy(), options);
    at::manual_seed(1);
    const auto got = pipe->run(fresh(inputs()));
    RC_ASSERT(same(expected[0].toTensor(), got[0].toTensor()) && same(expected[1].toTensor(), got[1].toTensor()));
    RC_ASSERT(same(whole->state().get("norm.mean").tensor, pipe->merge_state_dict().get("norm.mean").tensor));
  }
}

RC_GTEST_PROP(SplitProperty, AnyForwardPolicyGivesEqualOutputs, ()) {
  auto module = random_model();
  SplitOptions options;
  std::unordered_map<std::string, int> stage;
  for (Node* node : module->graph().nodes()) {
    if (!node->is_call() || node->num_results() == 0) continue;
    int at_least = 0;
    for (Value* v : node->inputs()) {
      auto it = stage.find(v->producer()->num_results() ? v->producer()->result()->name() : "");
      if (it != stage.end()) at_least = std::max(at_least, it->second);
    }
    stage[node->result()->name()] = at_least + (draw<int>(0, 8) == 0);
  }
  options.policy = [&](const Node& node) { return node.num_results() ? stage[node.result()->name()] : 0; };
  std::shared_ptr<Pipe> pipe;
  auto copy = module->deep_copy();
  try {
    pipe = pipeline(*copy, options);
  } catch (const Error& e) {
    const std::string what = e.what();
    RC_ASSERT(what.find("which writes memory") != std::string::npos || what.find("random") != std::string::npos ||
              what.find("which it uses") !=
                  std::string::npos);  // renamed after a write: the value comes from the writer
    return;
  }
  at::NoGradGuard guard;
  auto whole = module->deep_copy();
  at::manual_seed(1);
  const auto expected = whole->run(fresh(inputs()));
  at::manual_seed(1);
  const auto got = pipe->run(fresh(inputs()));
  RC_ASSERT(same(expected[0].toTensor(), got[0].toTensor()) && same(expected[1].toTensor(), got[1].toTensor()));
}

}  // namespace
}  // namespace plumb
