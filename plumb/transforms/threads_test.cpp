// One module, several threads, from its first call on. `make sanitize SANITIZER=thread` runs these under
// ThreadSanitizer.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <thread>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "plumb/numerics/quantise.h"
#include "plumb/tensors/node_seeds.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/track_scales.h"
#include "plumb/transforms/verdict/verdict.h"

namespace plumb {
namespace {

constexpr int kThreads = 4, kRounds = 8;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width = 8) : up(width, 2 * width), down(2 * width, 4) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) { return down(torch::gelu(up(x))) * 0.5; }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Net);

std::vector<at::Tensor> parameters_of(GraphModule& module) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& p : module.parameters()) {
    if (p.requires_grad()) found.push_back(p);
  }
  return found;
}

// Returns the output and the parameters' gradients.
std::vector<at::Tensor> step(GraphModule& module, const std::vector<at::Tensor>& parameters, const at::Tensor& x) {
  std::vector<at::Tensor> out{module(x)};
  for (const at::Tensor& g : torch::autograd::grad({out[0].sum()}, parameters)) out.push_back(g);
  return out;
}

template <class Body>
void together(const Body& body) {
  std::barrier start(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      at::set_num_threads(1);
      start.arrive_and_wait();
      body(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <class Make>
void expect_the_bits_of_one_thread(const Make& make, at::IntArrayRef sizes = {5, 8}) {
  torch::manual_seed(0);
  std::vector<at::Tensor> inputs;
  for (int t = 0; t < kThreads; ++t) inputs.push_back(at::randn(sizes));
  for (int round = 0; round < kRounds; ++round) {
    const auto alone = make(), shared = make();
    const auto own = parameters_of(*alone), theirs = parameters_of(*shared);
    std::vector<std::vector<at::Tensor>> want, got(kThreads);
    // MKL's products may have other bits by several threads than by one.
    std::thread([&] {
      at::set_num_threads(1);
      for (const at::Tensor& x : inputs) want.push_back(step(*alone, own, x));
    }).join();
    together([&](int t) {
      for (int i = 0; i < 3; ++i) got[t] = step(*shared, theirs, inputs[t]);
    });
    for (int t = 0; t < kThreads; ++t) {
      ASSERT_EQ(got[t].size(), want[t].size());
      for (size_t i = 0; i < want[t].size(); ++i) EXPECT_TRUE(at::equal(got[t][i], want[t][i]));
    }
  }
}

std::shared_ptr<GraphModule> captured() {
  torch::manual_seed(1);
  Net net;
  return capture(net, at::randn({5, 8}));
}

TEST(Threads, CallACapturedModuleForTheFirstTimeTogether) { expect_the_bits_of_one_thread(captured); }
TEST(Threads, CallAUnitScaledModuleForTheFirstTimeTogether) {
  expect_the_bits_of_one_thread([] { return unit_scale(captured()); });
}
TEST(Threads, CallATrackedModuleForTheFirstTimeTogether) {
  expect_the_bits_of_one_thread([] { return track_scales(captured()); });
}
// Large enough for saved tensors to be kept as codes.
TEST(Threads, RoundToNearestInFp8Together) {
  static constexpr int64_t kRows = 64, kWidth = 32;
  expect_the_bits_of_one_thread(
      [] {
        torch::manual_seed(1);
        Net net(kWidth);
        SimulateFormatOptions options;
        options.rounding = Rounding::Nearest;
        return simulate_fp8(unit_scale(capture(net, at::randn({kRows, kWidth}))), options);
      },
      {kRows, kWidth});
}
// Every call draws its seed from torch's one generator: what a thread gets depends on who comes first, the set of seeds
// does not.
TEST(Threads, StochasticRoundingDrawsFromTheGeneratorOfTheProcess) {
  constexpr int kCalls = 8;
  const at::Tensor x = at::rand({1024});
  const auto draw = [&](std::vector<at::Tensor>& to) {
    for (int i = 0; i < kCalls; ++i) to.push_back(quantise(x, FPFormat(4, 3)));
  };
  torch::manual_seed(3);
  std::vector<at::Tensor> alone;
  for (int t = 0; t < kThreads; ++t) draw(alone);
  torch::manual_seed(3);
  std::vector<std::vector<at::Tensor>> each(kThreads);
  together([&](int t) { draw(each[t]); });
  std::vector<bool> found(alone.size());
  for (const auto& drawn : each) {
    for (const at::Tensor& result : drawn) {
      size_t i = 0;
      while (i < alone.size() && (found[i] || !at::equal(alone[i], result))) ++i;
      ASSERT_LT(i, alone.size()) << "no such seed in one thread";
      found[i] = true;
    }
  }
}
// The generator is that of the process: another thread's node may not draw between a node's seed and its draw.
TEST(Threads, DrawSeededNodesWithTheBitsOfOneThread) {
  torch::manual_seed(1);
  Net net;
  const at::Tensor x = at::randn({5, 8});
  const auto dropped = [&](const at::Tensor& in) { return at::dropout(net(in), 0.5, true); };
  const auto module = simulate_fp8(capture_call(*net, dropped, {}, x));
  const auto parameters = parameters_of(*module);
  const auto seeded = [&](int t) {
    const NodeSeeds seeds(static_cast<uint64_t>(t), {at::detail::getDefaultCPUGenerator()});
    return step(*module, parameters, x);
  };
  std::vector<std::vector<at::Tensor>> want;
  for (int t = 0; t < kThreads; ++t) want.push_back(seeded(t));
  together([&](int t) {
    for (int i = 0; i < 20 * kRounds; ++i) {
      const auto got = seeded(t);
      for (size_t k = 0; k < got.size(); ++k) ASSERT_TRUE(at::equal(got[k], want[t][k])) << t << " " << i << " " << k;
    }
  });
}
TEST(Threads, FindTheVerdictOfOneThread) {
  torch::manual_seed(1);
  Net net(32);
  const at::Tensor x = at::randn({64, 32}), y = at::randn({64, 4});
  const auto dropped = [&](const at::Tensor& in) { return net(at::dropout(in, 0.5, true)); };
  const auto module = capture_call(*net, dropped, {}, x);
  const auto find = [&] {
    const Verdict::Part part = [&](GraphModule& graph) { return at::mse_loss(graph(x), y); };
    return verdict(*module, {{part}}, {.recipes = {"fp8"}, .explain = false}).to_json().dump();
  };
  std::string want;
  std::vector<std::string> got(kThreads);
  std::thread([&] {
    at::set_num_threads(1);
    want = find();
  }).join();
  for (int round = 0; round < kRounds; ++round) {
    together([&](int t) { got[t] = find(); });
    for (const std::string& each : got) ASSERT_EQ(each, want) << round;
  }
}
TEST(Threads, CaptureModulesOfTheirOwnTogether) {
  std::vector<at::Tensor> got(kThreads);
  const at::Tensor x = at::ones({5, 8});
  together([&](int t) {
    for (int i = 0; i < kRounds; ++i) {
      Net net;
      const auto module = capture(net, x);
      EXPECT_TRUE(at::equal((*module)(x), net(x))) << t;
    }
  });
}
TEST(Threads, CaptureAModuleBesideItsBackwards) {
  constexpr int kCalls = 6 * kRounds;
  torch::manual_seed(1);
  Net net;
  const at::Tensor x = at::ones({5, 8});
  const auto backwards = [&](int calls) {
    for (int i = 0; i < calls; ++i) net(x).sum().backward();
  };
  std::thread([&] {
    at::set_num_threads(1);
    backwards((kThreads - 1) * kCalls);
  }).join();
  std::vector<at::Tensor> want;
  for (const at::Tensor& p : net->parameters()) {
    want.push_back(p.grad());
    p.mutable_grad().reset();
  }
  together([&](int t) {
    if (t) return backwards(kCalls);
    for (int i = 0; i < kCalls; ++i) EXPECT_NO_THROW(capture(net, x)) << i;
  });
  size_t next = 0;
  for (const auto& p : net->named_parameters()) EXPECT_TRUE(at::equal(p.value().grad(), want[next++])) << p.key();
}
TEST(Threads, RefuseOtherShapesBesideThreadsThatRun) {
  const auto module = captured();
  const at::Tensor x = at::ones({5, 8}), other = at::ones({6, 8}), want = (*captured())(x);
  together([&](int t) {
    for (int i = 0; i < kRounds; ++i) {
      if (t % 2) {
        EXPECT_THROW((*module)(other), Error);
      } else {
        EXPECT_TRUE(at::equal((*module)(x), want));
      }
    }
  });
}
TEST(Threads, PutTensorsInTheStateBesideThreadsThatRun) {
  const auto module = captured();
  const at::Tensor x = at::ones({5, 8}), want = (*captured())(x);
  const at::Tensor bias = module->state().get("up.bias").tensor.detach().clone();
  together([&](int t) {
    for (int i = 0; i < 4 * kRounds; ++i) {
      if (t == 0) {
        module->set_state({{"up.bias", bias.clone().requires_grad_()}});
      } else {
        EXPECT_TRUE(at::equal((*module)(x), want));
      }
    }
  });
}

}  // namespace
}  // namespace plumb
