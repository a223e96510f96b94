#include "plumb/capture/capture.h"
#include "plumb/capture/custom_function.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/capture/fake_result.h"
#include "plumb/core/error.h"
#include "tests/gpt_graph.h"
#include "tests/message_of.h"
#include "tests/test_device.h"
#include "tests/zoo.h"

namespace plumb {
namespace {

using at::Tensor;
using testing::HasSubstr;

// --- the rules, each with its trap ---

struct Fn : torch::nn::Module {
  explicit Fn(std::function<Tensor(Tensor)> f) : f(std::move(f)) {}
  Tensor forward(Tensor x) { return f(x); }
  std::function<Tensor(Tensor)> f;
};

std::shared_ptr<GraphModule> capture_fn(std::function<Tensor(Tensor)> f, Tensor x = torch::randn({4, 4}),
                                        bool verify = true, std::vector<std::string>* notes = nullptr) {
  auto m = std::make_shared<Fn>(std::move(f));
  CaptureOptions options;
  options.verify = verify;
  options.notes = notes;
  return capture(options, m, x);
}

std::string refusal(std::function<Tensor(Tensor)> f, bool verify = false) {
  try {
    capture_fn(std::move(f), torch::randn({4, 4}), verify);
  } catch (const Error& e) {
    EXPECT_TRUE(e.kind() == ErrorKind::Capture || e.kind() == ErrorKind::DataDependent) << to_string(e.kind());
    return e.what();
  }
  return "captured";
}

TEST(Capture, FactoriesKeepTheirIdentity) {
  auto g = capture_fn([](Tensor x) {
    return x + torch::zeros({4, 4}) + torch::ones({4}) * torch::arange(4) + torch::full({4}, 2.0) + torch::eye(4) +
           torch::rand({4});
  });
  EXPECT_TRUE(g->state().names(AttrKind::Constant).empty());
}

TEST(Capture, RandomDrawsAreDrawnAgain) {
  auto g = capture_fn([](Tensor x) { return x + torch::rand({4}); }, torch::zeros({4, 4}));
  torch::manual_seed(1);
  Tensor a = (*g)(torch::zeros({4, 4}));
  Tensor b = (*g)(torch::zeros({4, 4}));
  EXPECT_FALSE(at::equal(a, b));
}

TEST(Capture, NumbersStayNumbers) {
  auto g = capture_fn([](Tensor x) { return at::mul(x, 2.5) + 3; });
  EXPECT_THAT(to_string(g->graph()), HasSubstr("aten::mul.Scalar(%x0, 2.5)"));
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kLong}) {
    capture_fn([](Tensor x) { return at::mul(x, 2) + 3; }, torch::arange(4).to(dtype), dtype != at::kLong);
  }
}

TEST(Capture, KeepsAConstantMadeOutsideAndListsIt) {
  Tensor outside = torch::randn({4});
  std::vector<std::string> notes;
  auto g = capture_fn([=](Tensor x) { return x + outside; }, torch::randn({4, 4}), true, &notes);
  EXPECT_TRUE(g->state().get("_constant_0").tensor.is_same(outside));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0], HasSubstr("constant _constant_0"));
}

TEST(Capture, CTorchTensorIsFilledElementByElement) {
  auto g = capture_fn([](Tensor x) { return x + torch::tensor({1.f, 2.f, 3.f, 4.f}); });
  EXPECT_TRUE(at::equal((*g)(torch::zeros({4, 4}))[0], torch::tensor({1.f, 2.f, 3.f, 4.f})));
}

TEST(Capture, CutsWhereDataWasTaken) {
  auto g = capture_fn([](Tensor x) { return x * x.variable_data(); }, torch::randn({4, 4}), false);
  Tensor x = torch::full({4, 4}, 3.0).requires_grad_();
  (*g)(x).sum().backward();
  EXPECT_EQ(x.grad()[0][0].item<float>(), 3.0f);
  EXPECT_THAT(to_string(g->graph()), HasSubstr("plumb::data"));
}

TEST(Capture, RecordsGradModePerNode) {
  auto g = capture_fn([](Tensor x) {
    Tensor a;
    {
      torch::NoGradGuard guard;
      a = x * 2;
    }
    return a * x;
  });
  EXPECT_THAT(to_string(g->graph()), HasSubstr("no_grad"));
}

TEST(Capture, KeepsRepeatedInputsApart) {
  zoo::Shared m;
  Tensor x = torch::randn({3, 5});
  auto g = capture(m, x, x);
  EXPECT_EQ(g->graph().placeholders().size(), 2u);
  Tensor y = torch::randn({3, 5});
  const auto out = g->run({x, y});
  EXPECT_TRUE(at::equal(out[1].toTensor(), m->fc(y)));
}

TEST(Capture, RefusesValuesTakenOutOfTensors) {
  EXPECT_THAT(refusal([](Tensor x) { return x * x.sum().item<double>(); }),
              HasSubstr("aten::item takes a value out of a tensor"));
  EXPECT_THAT(refusal([](Tensor x) { return x.sum().is_nonzero() ? x : -x; }), HasSubstr("aten::is_nonzero"));
  EXPECT_THAT(refusal([](Tensor x) { return at::allclose(x, x) ? x : -x; }), HasSubstr("aten::allclose"));
}

TEST(Capture, ChecksInEveryRunThatTensorsAreStillEqualOrNot) {
  auto same = capture_fn([](Tensor x) { return at::equal(x, x) ? x * 2 : -x; });
  EXPECT_EQ(same->graph().size(), 3u) << "one tensor is equal to itself: nothing to check";
  zoo::Shared pair;
  auto g = capture_call(
      *pair, [](Tensor a, Tensor b) { return at::equal(a, b) ? a : b; }, {}, torch::ones({3}), torch::zeros({3}));
  EXPECT_EQ(g->forward({torch::ones({3}), torch::full({3}, 5.0)}).toTensor()[0].item<float>(), 5);
  EXPECT_THROW(g->forward({torch::ones({3}), torch::ones({3})}), Error);
}

TEST(Capture, LeavesLargeProductsOutWhereNoValueIsAskedFor) {
  // Products are recorded as without such reads; the reads get the real values.
  Tensor w = torch::randn({200, 200});
  for (bool in_place : {false, true}) {
    auto f = [=](Tensor x) {
      Tensor y = torch::matmul(torch::linear(x, w), x.t());
      return in_place ? y.add_(1).relu_() : at::relu(y + 1);
    };
    auto quick = capture_fn(f, torch::randn({200, 200}), false), whole = capture_fn(f, torch::randn({200, 200}), true);
    EXPECT_EQ(to_string(quick->graph()), to_string(whole->graph()));
    Tensor x = torch::randn({200, 200});
    EXPECT_TRUE(at::equal(quick->forward({x}).toTensor(), f(x.clone())));
  }
  // Attention in the memory order of its kernels, with masks and without, and gelu of other orders.
  auto attend = [](Tensor x, Tensor mask) {
    Tensor a = at::scaled_dot_product_attention(x, x, x.cos());
    Tensor b = at::scaled_dot_product_attention(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), mask);
    return at::gelu(a.transpose(1, 2)) + b;
  };
  Tensor x = torch::randn({3, 32, 48, 96}).requires_grad_(), mask = torch::randn({3, 1, 48, 48});
  auto attention = [&](bool verify, const Tensor& m) {
    return capture_fn([&](Tensor t) { return attend(t, m.narrow(-1, 0, 32).narrow(-2, 0, 32)); }, x, verify);
  };
  for (const Tensor& m : {mask, mask[0], mask.narrow(0, 0, 1)}) {
    auto quick = attention(false, m);
    EXPECT_EQ(to_string(quick->graph()), to_string(attention(true, m)->graph()));
    EXPECT_TRUE(at::equal(quick->forward({x}).toTensor(), attend(x, m.narrow(-1, 0, 32).narrow(-2, 0, 32))));
  }
  zoo::Shared pair;
  auto g = capture_call(
      *pair, [=](Tensor a, Tensor b) { return at::equal(at::mm(a, w), at::mm(b, w)) ? a : b; }, {},
      torch::randn({200, 200}), torch::randn({200, 200}));
  EXPECT_THROW(g->forward({torch::ones({200, 200}), torch::ones({200, 200})}), Error) << "they were different";
}

TEST(Capture, StandsInWithTheShapesAndStridesOfRealProducts) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::linear", "");
  const Tensor w = torch::randn({200, 128}).requires_grad_(true), b = torch::randn({200});
  for (auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (const Tensor& x :
         {torch::randn({256, 128}), torch::randn({4, 64, 128}), torch::randn({64, 4, 128}).transpose(0, 1),
          torch::randn({128, 256}).t(), torch::randn({2, 2, 64, 128}), torch::randn({128})}) {
      for (const Tensor& bias : {Tensor(), b.to(dtype)}) {
        torch::jit::Stack stack{x.to(dtype), w.to(dtype), bias};
        const Tensor real = torch::linear(x.to(dtype), w.to(dtype), bias);
        ASSERT_TRUE(fake_result(op, "aten::linear", &stack));
        ASSERT_EQ(stack.size(), 1u);
        const Tensor stood = stack[0].toTensor();
        EXPECT_EQ(stood.sizes(), real.sizes());
        EXPECT_EQ(stood.strides(), real.strides()) << x.sizes() << " " << x.strides();
        EXPECT_EQ(stood.scalar_type(), dtype);
        EXPECT_EQ(stood.requires_grad(), real.requires_grad());
      }
    }
  }
  torch::jit::Stack misfit{torch::randn({256, 127}), w, b};
  EXPECT_THROW(fake_result(op, "aten::linear", &misfit), c10::Error);
}

TEST(Capture, ReadsValuesOfConstantsAlone) {
  std::vector<std::string> notes;
  auto g =
      capture_fn([](Tensor x) { return x * torch::arange(5)[3].item<int64_t>(); }, torch::randn({4, 4}), true, &notes);
  EXPECT_EQ(g->forward({torch::ones({4, 4})}).toTensor().sum().item<float>(), 48);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0], HasSubstr("depends on constants alone"));
}

TEST(Capture, RefusesTensorsWithAnUnknownPast) {
  Tensor w = torch::randn({4}).requires_grad_();
  Tensor past = w * 2;
  EXPECT_THAT(refusal([=](Tensor x) { return x + past; }), HasSubstr("unknown origin that carries a gradient"));
}

TEST(Capture, RefusesCustomFunctionsWhoseBackwardWouldBeLost) {
  struct Cube : torch::autograd::Function<Cube> {
    static Tensor forward(torch::autograd::AutogradContext*, Tensor x) { return x * 3; }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list g) {
      return {g[0] * 100};
    }
  };
  EXPECT_THAT(refusal([](Tensor x) { return Cube::apply(x) + 1; }), HasSubstr("custom autograd function"));
}

TEST(Capture, KeepsCustomFunctionsThatAreAppliedByPlumb) {
  struct Cube : torch::autograd::Function<Cube> {
    static Tensor forward(torch::autograd::AutogradContext*, Tensor x) { return x * 3; }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list g) {
      return {g[0] * 100};
    }
  };
  struct Both : torch::autograd::Function<Both> {
    static torch::autograd::variable_list forward(torch::autograd::AutogradContext*, Tensor a, Tensor b) {
      return {a + b, a - b};
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list g) {
      return {g[0] * 2, g[1] * 5};
    }
  };
  auto f = [](Tensor x) {
    auto both = plumb::apply<Both>(plumb::apply<Cube>(x), x.sin());
    return both[0] * both[1];
  };
  auto g = capture_fn(f, torch::randn({4, 4}).requires_grad_(), true);
  EXPECT_THAT(to_string(g->graph()), HasSubstr("plumb::python_function"));
  Tensor x = torch::randn({4, 4}).requires_grad_(), y = x.detach().clone().requires_grad_();
  f(x).sum().backward();
  (*g)(y).sum().backward();
  EXPECT_TRUE(x.grad().equal(y.grad()));
}

TORCH_LIBRARY_FRAGMENT(plumb_capture_test, m) { m.def("half(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(plumb_capture_test, CPU, m) {
  m.impl("half", [](const Tensor& x) { return x / 2; });
}

TEST(Capture, RefusesHooksOnGradients) {
  EXPECT_THAT(refusal([](Tensor x) {
                static const auto half = find_operator("plumb_capture_test::half").typed<Tensor(const Tensor&)>();
                return half.call(x * torch::ones({4}).requires_grad_());
              }),
              HasSubstr("an operator of your own that has no Autograd kernel"));
  Tensor w = torch::ones({4}).requires_grad_();
  auto hooked = [=](Tensor x, bool last) {
    Tensor y = (x * w).sin(), z = y * 2;
    (last ? z : y).register_hook([](Tensor g) { return g * 2; });
    return z;
  };
  EXPECT_THAT(refusal([&](Tensor x) { return hooked(x, false); }), HasSubstr("registers a hook on a gradient"));
  EXPECT_THAT(refusal([&](Tensor x) { return hooked(x, true); }), HasSubstr("registers a hook on a gradient"));
  w.register_hook([](Tensor g) { return g * 2; });
  EXPECT_EQ(refusal([=](Tensor x) { return x * w; }), "captured");
}

TEST(Capture, RefusesMemoryFilledByRawPointer) {
  EXPECT_THAT(refusal([](Tensor x) {
                Tensor e = torch::empty({4, 4});
                std::fill_n(static_cast<float*>(e.data_ptr()), 16, 3.f);
                return e * x;
              }),
              HasSubstr("memory made by torch.empty"));
  EXPECT_EQ(refusal([](Tensor x) { return torch::empty({4, 4}).copy_(x) * 2; }, true), "captured");
  EXPECT_EQ(refusal([](Tensor x) { return torch::empty_like(x).fill_(1) + x; }, true), "captured");
  const auto by_rows = [](Tensor x) { return torch::empty_like(x).index_copy(0, torch::arange(x.size(0)), x) * 2; };
  EXPECT_EQ(refusal(by_rows, true), "captured");
}

TEST(Capture, VerifyFindsValuesThatLeaveTorchUnseen) {
  auto leak = [](Tensor x) { return x * static_cast<const float*>(x.data_ptr())[0]; };
  EXPECT_EQ(refusal(leak), "captured");
  EXPECT_THAT(refusal(leak, true), HasSubstr("verify:"));
}

TEST(Capture, IsNotDisturbedByTheCallersModes) {
  zoo::GPT m(50, 16, 1, 4, 32, false);
  Tensor x = torch::randint(50, {2, 8}, at::kLong);
  auto plain = to_string(capture(m, x)->graph());
  torch::NoGradGuard guard;
  EXPECT_EQ(to_string(capture(m, x)->graph()), plain);
}

TEST(Capture, ReplayIgnoresTheCallersAutocast) {
  zoo::GPT m(50, 16, 1, 4, 32, false);
  Tensor x = torch::randint(50, {2, 8}, at::kLong);
  auto g = capture(m, x);
  Tensor expected = (*g)(x);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  Tensor under = (*g)(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_TRUE(at::equal(expected, under));
}

TEST(Capture, EndsCleanlyWhenTheModelThrows) {
  auto m = std::make_shared<Fn>([](Tensor) -> Tensor { throw std::runtime_error("mine"); });
  EXPECT_THROW(capture(m, torch::randn({2})), std::runtime_error);
  EXPECT_FALSE(is_capturing());
  EXPECT_EQ(torch::ones({2}).sum().item<float>(), 2);
}

TEST(Capture, PutsBackTheModesThatTheForwardChanges) {
  struct Changes : torch::nn::Module {
    Changes() {
      for (auto* part : {&a, &b}) register_module(part == &a ? "a" : "b", *part);
      b->eval();
    }
    Tensor forward(Tensor x) {
      x = a(x);
      eval();
      b->train();
      if (fails) throw std::runtime_error("mine");
      return b(x);
    }
    torch::nn::Dropout a, b;
    bool fails = false;
  };
  auto m = std::make_shared<Changes>();
  for (const bool fails : {false, true}) {
    m->fails = fails;
    if (fails) {
      EXPECT_THROW(capture(m, torch::ones({4})), std::runtime_error);
    } else {
      EXPECT_TRUE(capture(m, torch::ones({4}))->is_training());
    }
    EXPECT_TRUE(m->is_training() && m->a->is_training() && !m->b->is_training());
  }
}

struct Moves : torch::nn::Module {
  explicit Moves(std::function<void(Tensor&, const Tensor&)> assign) : assign(std::move(assign)) {
    w = register_parameter("w", torch::ones({4}));
  }
  Tensor forward(Tensor x) {
    const torch::NoGradGuard no_grad;
    assign(w, w * 2);
    const at::AutoGradMode grad(true);
    return x * w;
  }
  std::function<void(Tensor&, const Tensor&)> assign;
  Tensor w;
};

TEST(Capture, RefusesATensorThatIsGivenOtherMemoryUnseen) {
  auto m = std::make_shared<Moves>([](Tensor& w, const Tensor& to) { w.set_data(to); });
  try {
    capture(m, torch::ones({4}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'w' other memory"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(at::equal(m->w, torch::ones({4})));
}

TEST(Capture, RefusesABackwardThatLeavesGradientsInParametersOrInputs) {
  const auto own = [](const Tensor& x, const Tensor& to) {
    (to * x.detach()).sum().backward();
    return x * 2;
  };
  auto m = std::make_shared<Moves>([&](Tensor& w, const Tensor&) {
    const at::AutoGradMode grad(true);
    own(torch::ones({4}), w);
  });
  for (const Tensor& before : {Tensor(), torch::full({4}, 5.0)}) {
    m->w.mutable_grad() = before;
    EXPECT_THAT(message_of([&] { capture(m, torch::ones({4})); }), HasSubstr("leaves a gradient in 'w'"));
    EXPECT_TRUE(m->w.grad().is_same(before));
    EXPECT_TRUE(!before.defined() || at::equal(before, torch::full({4}, 5.0)));
  }
  const auto in_input = [&](Tensor x) { return own(x, x); };
  EXPECT_THAT(message_of([&] { capture_fn(in_input, torch::ones({4, 4}).requires_grad_(), false); }),
              HasSubstr("leaves a gradient in 'input 0'"));
  capture_fn([](Tensor x) { return torch::autograd::grad({x.pow(2).sum()}, {x}, {}, true, true)[0]; });
}

TEST(Capture, RefusesARequestWhosePartsDoNotFit) {
  CaptureRequest request;
  EXPECT_THAT(message_of([&] { capture(request); }), HasSubstr("CaptureRequest::call is empty"));
  request.inputs = {torch::ones({4})};
  request.call = [](const std::vector<c10::IValue>& in, TreeSpec& out) {
    out = TreeSpec::tuple({{}, {}});
    return std::vector<c10::IValue>{in[0].toTensor() + 1};
  };
  request.in_spec = TreeSpec::positional_inputs(2);
  EXPECT_THAT(message_of([&] { capture(request); }), HasSubstr("inputs ((*, *), {}) has 2 values, 1 are there"));
  request.in_spec = TreeSpec::positional_inputs(1);
  EXPECT_THAT(message_of([&] { capture(request); }), HasSubstr("outputs (*, *) has 2 values, 1 are there"));
  CaptureOptions names;
  names.input_names = {"a", "b"};
  EXPECT_THAT(message_of([&] { capture(request, names); }), HasSubstr("2 names for 1 inputs"));
  names.input_names = {"\xff"};
  EXPECT_THAT(message_of([&] { capture(request, names); }), HasSubstr("'\\xff' is no name of an input"));
  EXPECT_THAT(message_of([] { register_opaque(nullptr, "mine"); }), HasSubstr("'mine' is empty"));
}

TEST(Capture, RefusesAModelThatIsNotThere) {
  std::shared_ptr<Fn> none;
  torch::nn::Linear empty{nullptr};
  EXPECT_THAT(message_of([&] { capture(none, torch::ones({4, 4})); }), HasSubstr("null pointer"));
  EXPECT_THAT(message_of([&] { capture(empty, torch::ones({4, 4})); }), HasSubstr("empty holder"));
}

TEST(Capture, RefusesToSeedRandomNumbers) {
  torch::manual_seed(0);
  EXPECT_THAT(refusal([](Tensor x) {
                torch::manual_seed(1);
                return x + torch::rand({4});
              }),
              HasSubstr("sets torch's random state"));
  EXPECT_EQ(at::detail::getDefaultCPUGenerator().current_seed(), 0u);
}

TEST(Capture, DrawsTheNumbersOfAnEagerCall) {
  torch::manual_seed(3);
  const Tensor wanted = torch::rand({4});
  torch::manual_seed(3);
  Tensor drawn;
  capture_fn(
      [&](Tensor x) {
        drawn = torch::rand({4});
        return x + drawn;
      },
      torch::ones({4}), /*verify=*/false);
  EXPECT_TRUE(at::equal(drawn, wanted));
  EXPECT_TRUE(at::equal(torch::rand({4}), wanted));
}

TEST(Capture, AnAssignmentOfDataIsACopyInTheGraph) {
  auto m = std::make_shared<Moves>([](Tensor& w, const Tensor& to) { assign_data(w, to); });
  auto g = capture(m, torch::ones({4}));
  EXPECT_TRUE(at::equal(m->w, torch::ones({4})));
  for (int step = 1; step <= 3; ++step) {
    EXPECT_EQ((*g)(torch::ones({4})).sum().item<float>(), 4 << step);
    EXPECT_EQ(m->w.sum().item<float>(), 4 << step);
  }
}

TEST(Capture, KeepsAnOpaqueFunctionAsOneNode) {
  const int64_t id =
      register_opaque([](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] * 2 + 1}; }, "mine");
  auto g = capture_fn([=](Tensor x) {
    static auto op = find_operator("plumb::python_function");
    torch::jit::Stack stack{id, std::vector<Tensor>{x}};
    op.callBoxed(stack);
    return stack[0].toTensorVector()[0] * 3;
  });
  EXPECT_EQ(g->graph().size(), 4u);
  EXPECT_EQ(opaque_name(id), "mine");
}

TEST(Capture, KnowsComparisonsOfRandomDrawsThatHaveOneAnswer) {
  for (double limit : {0.0, 1.0}) {
    auto f = [=](Tensor x) { return (at::rand({}) < limit).is_nonzero() ? x + 1 : x * 2; };
    EXPECT_TRUE(at::equal((*capture_fn(f))(torch::ones({4, 4})), f(torch::ones({4, 4}))));
  }
  EXPECT_THROW(capture_fn([](Tensor x) { return (at::rand({}) < 0.5).is_nonzero() ? x + 1 : x * 2; }), Error);
  EXPECT_THROW(capture_fn([](Tensor x) { return (at::rand({}) - 1 < 0).is_nonzero() ? x + 1 : x * 2; }), Error);
}

TEST(Capture, OfALargeModelOnMetaTakesNoMemory) {
  auto options = torch::TensorOptions(at::kMeta);
  struct Wide : torch::nn::Module {
    explicit Wide(const torch::TensorOptions& o) {
      for (int i = 0; i < 64; ++i)
        w.push_back(register_parameter("w" + std::to_string(i), torch::empty({10000, 10000}, o)));
    }
    Tensor forward(Tensor x) {
      for (const Tensor& t : w) x = at::tanh(at::linear(x, t));
      return x;
    }
    std::vector<Tensor> w;
  };
  auto m = std::make_shared<Wide>(options);
  auto g = capture(m, torch::empty({4, 10000}, options));
  EXPECT_EQ(g->graph().attributes().size(), 64u);
  EXPECT_EQ((*g)(torch::empty({4, 10000}, options)).sizes(), (std::vector<int64_t>{4, 10000}));
}

}  // namespace
}  // namespace plumb
