#include "plumb/scaling/fp8.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim.h>

#include <functional>

#include "plumb/core/error.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/operators.h"
#include "plumb/scaling/kernels.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

const FPFormat& e4m3() { return fp8_format("e4m3fn"); }
const FPFormat& e5m2() { return fp8_format("e5m2"); }

at::Tensor codes_of_random(at::IntArrayRef sizes, const FPFormat& format) { return encode(at::randn(sizes), format); }

TEST(Fp8, CodesAreTheBytesOfTorchsTypes) {
  const auto all = at::arange(256, at::kInt).to(at::kByte);
  for (const auto* format : {&e4m3(), &e5m2()}) {
    const at::Tensor torchs = all.view(fp8_dtype(*format)).to(at::kFloat), ours = decode(all, *format);
    EXPECT_TRUE(at::equal(torchs.isnan(), ours.isnan()));
    EXPECT_TRUE(at::equal(torchs.nan_to_num(0), ours.nan_to_num(0)));
    const at::Tensor x = at::randn({4096}) * 30;
    EXPECT_TRUE(at::equal(encode(x, *format), x.to(fp8_dtype(*format)).view(at::kByte)));
  }
}

// torch multiplies codes on most CPUs; not if a setting keeps oneDNN from using its units for them.
bool cpu_multiplies() {
  try {
    return uses_scaled_mm(Fp8Kernel::ScaledMM, at::kCPU, at::kFloat);
  } catch (const Error&) {
    return false;
  }
}

TEST(Fp8, ADeviceThatCannotMultiplyCodesIsRefusedByName) {
  const at::Device nowhere(at::kXPU);
  const Error refused = error_of([&] { uses_scaled_mm(Fp8Kernel::ScaledMM, nowhere, at::kFloat); });
  EXPECT_EQ(refused.kind(), ErrorKind::Unsupported);
  EXPECT_THAT(refused.what(), testing::HasSubstr("kernel=\"scaled_mm\": torch cannot multiply FP8 on xpu: "));
  EXPECT_THAT(refused.what(), testing::HasSubstr("take kernel=\"auto\""));
  EXPECT_FALSE(uses_scaled_mm(Fp8Kernel::Auto, nowhere, at::kFloat));
}

TEST(Fp8, ScaledMMOfTorchIsTheProductOfTheValuesAtEverySize) {
  if (!cpu_multiplies()) GTEST_SKIP() << "oneDNN may not use this CPU's units";
  at::manual_seed(4);
  // Sums of few values with few bits are exact, in whatever order a library forms them.
  for (const auto& [m, k, n] :
       {std::tuple(1, 16, 16), std::tuple(64, 128, 32), std::tuple(7, 33, 5), std::tuple(65, 16, 48)}) {
    for (const bool by_column : {false, true}) {
      const at::Tensor a = codes_of_random({m, k}, e5m2());
      const at::Tensor b = by_column ? codes_of_random({n, k}, e4m3()).t() : codes_of_random({k, n}, e4m3());
      const at::Tensor expected = at::mm(decode(a, e5m2(), at::kDouble), decode(b, e4m3(), at::kDouble));
      const at::Tensor got = scaled_mm(a, e5m2(), b, e4m3(), 0.5, at::kFloat);
      EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected * 0.5, 1e-6, 1e-5)) << m << " " << k << " " << n;
      EXPECT_EQ(got.strides(), (at::IntArrayRef{n, 1}));
      EXPECT_EQ(scaled_mm(a, e5m2(), b, e4m3(), 1, at::kBFloat16).scalar_type(), at::kBFloat16);
    }
  }
  const at::Tensor a = codes_of_random({3, 8, 20}, e4m3()), b = codes_of_random({3, 20, 12}, e4m3());
  EXPECT_TRUE(
      at::allclose(scaled_mm(a, e4m3(), b, e4m3(), 2, at::kFloat), at::bmm(decode(a, e4m3()), decode(b, e4m3())) * 2));
  EXPECT_EQ(scaled_mm(a.slice(1, 0, 0), e4m3(), b, e4m3(), 1, at::kFloat).sizes(), (at::IntArrayRef{3, 0, 12}));
}

TEST(Fp8, CodesThatHaveNoProductAreRefused) {
  const FPFormat& format = fp8_format("e4m3fn");
  const auto codes = [](at::IntArrayRef sizes) { return at::ones(sizes, at::kByte); };
  for (const auto& [a, b] : std::vector<std::pair<at::Tensor, at::Tensor>>{{codes({2, 3}), codes({4, 2})},
                                                                           {codes({2, 3}), codes({2, 3, 2})},
                                                                           {codes({2, 2, 3}), codes({1, 3, 2})},
                                                                           {codes({3}), codes({3})},
                                                                           {codes({0, 3}), codes({4, 2})},
                                                                           {at::Tensor(), codes({3, 2})}}) {
    EXPECT_THROW(scaled_mm(a, format, b, format, 1, at::kFloat), Error);
  }
}

TEST(Fp8, AKeptWeightIsCastOnceUntilItIsWritten) {
  at::manual_seed(5);
  const KeepWeightCodes keep;
  at::Tensor w = at::randn({32, 48}).requires_grad_();
  at::Tensor first = encode_weight(w, "e4m3fn");
  EXPECT_TRUE(at::equal(first, encode(w, e4m3())));
  EXPECT_TRUE(encode_weight(w, "e4m3fn").is_same(first));
  EXPECT_TRUE(at::equal(encode_weight(w, "e5m2"), encode(w, e5m2()))) << "another format has other codes";
  first = encode_weight(w, "e4m3fn");
  {
    at::NoGradGuard no_grad;
    w.mul_(3);
  }
  EXPECT_TRUE(at::equal(encode_weight(w, "e4m3fn"), encode(w, e4m3())));
  first = encode_weight(w, "e4m3fn");
  w.set_data(at::randn({32, 48}));
  EXPECT_TRUE(at::equal(encode_weight(w, "e4m3fn"), encode(w, e4m3()))) << "another memory";
  const at::Tensor spoilt = encode_weight(w, "e4m3fn");
  spoilt.zero_();
  EXPECT_TRUE(at::equal(encode_weight(w, "e4m3fn"), encode(w, e4m3()))) << "codes that were written are not used";
}

TEST(Fp8, WritesPastAutogradCountFromTheNextCallOnAlsoWhileAGraphHoldsTheCodes) {
  at::Tensor w = at::randn({32, 48}).requires_grad_();
  const at::Tensor held = encode_weight(w, "e4m3fn");
  w.data().mul_(3);  // no version counter sees it
  EXPECT_TRUE(at::equal(encode_weight(w, "e4m3fn"), encode(w, e4m3())));
}

TEST(Fp8, EveryOptimizerOfTorchIsSeenBetweenSteps) {
  auto trains = [](auto make) {
    at::Tensor w = at::randn({32, 32}).requires_grad_();
    auto optimizer = make(std::vector<at::Tensor>{w});
    std::vector<at::Tensor> held;
    for (int step = 0; step < 3; ++step) {
      optimizer->zero_grad();
      held.push_back(encode_weight(w, "e4m3fn"));
      EXPECT_TRUE(at::equal(held.back(), encode(w, e4m3()))) << step;
      w.square().sum().backward();
      optimizer->step();
    }
  };
  using namespace torch::optim;
  trains([](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.3)); });
  trains([](auto p) { return std::make_unique<AdamW>(p, AdamWOptions(0.3)); });
  trains([](auto p) { return std::make_unique<Adam>(p, AdamOptions(0.3)); });
  trains([](auto p) { return std::make_unique<RMSprop>(p, RMSpropOptions(0.3)); });
  trains([](auto p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.3)); });
}

TEST(Fp8, WeightsStayCastWhileSomebodyAsksForIt) {
  at::Tensor w = at::randn({32, 48}).requires_grad_();
  KeepWeightCodes keep;
  const void* memory = encode_weight(w, "e4m3fn").const_data_ptr();
  const at::Tensor other = at::empty({32, 48}, at::kByte);  // would take the memory if it were free
  EXPECT_EQ(encode_weight(w, "e4m3fn").const_data_ptr(), memory);
}

// Returns how many copies of tensors a call makes.
int copies_in(const std::function<void()>& call) {
  static thread_local int count;
  count = 0;
  const auto seen = [](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
    count += std::string_view(fn.name()) == "aten::clone";
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(seen).scopes({at::RecordScope::FUNCTION}));
  call();
  at::removeCallback(handle);
  return count;
}

TEST(Fp8, AWeightsCodesAreTransposedOnceWhileTheyAreKept) {
  if (!cpu_multiplies()) GTEST_SKIP() << "oneDNN may not use this CPU's units";
  at::manual_seed(7);
  const at::Tensor w = at::randn({32, 48}).requires_grad_(), g = codes_of_random({16, 32}, e5m2());
  at::Tensor first, second;
  const auto product = [&](at::Tensor& result) {
    return copies_in([&] { result = scaled_mm(g, e5m2(), encode_weight(w, "e4m3fn"), e4m3(), 1, at::kFloat); });
  };
  const int alone = product(first);
  EXPECT_EQ(product(second), alone) << "nobody keeps them";
  {
    KeepWeightCodes keep;
    EXPECT_EQ(product(second), alone);
    EXPECT_TRUE(at::equal(first, second));
    EXPECT_EQ(product(second), alone - 1);
    EXPECT_TRUE(at::equal(first, second));
    at::NoGradGuard no_grad;
    at::Tensor(w).mul_(2);
    EXPECT_EQ(product(second), alone) << "written since: cast and transposed anew";
    EXPECT_TRUE(at::equal(second, scaled_mm(g, e5m2(), encode(w, e4m3()), e4m3(), 1, at::kFloat)));
  }
}

TEST(Fp8, GradientsComeOfBothProductsAndTheBias) {
  at::manual_seed(6);
  const auto linear = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::fp8_linear", "");
  at::Tensor x = at::randn({24, 40}).requires_grad_(), w = at::randn({8, 40}).requires_grad_();
  at::Tensor b = at::randn({8}).requires_grad_();
  torch::jit::Stack stack{x,
                          w,
                          b,
                          encode(x, e4m3()),
                          encode(w, e4m3()),
                          "e4m3fn",
                          "e5m2",
                          c10::IValue(),
                          std::vector<double>{0.5, 0.5, 0.5},
                          std::vector<double>{2, 3, 5, 7, 11},
                          "decoded"};
  linear.callBoxed(stack);
  const at::Tensor y = stack[0].toTensor();
  const at::Tensor xq = decode(encode(x, e4m3()), e4m3()), wq = decode(encode(w, e4m3()), e4m3());
  const at::Tensor seed = at::randn({24, 8}), g = decode(encode(seed, e5m2()), e5m2());
  y.backward(seed);
  at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(y, at::addmm(b, xq, wq.t(), 7, 2)));
  EXPECT_TRUE(at::equal(x.grad(), gemm(g, wq, 3)));
  EXPECT_TRUE(at::equal(w.grad(), gemm(g.t(), xq, 5)));
  EXPECT_TRUE(at::equal(b.grad(), g.sum(0) * 11));
}

TEST(Fp8, RefusesCodesThatAreNotTheValuesAndGradientsOfGradients) {
  const auto matmul = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::fp8_matmul", "");
  auto call = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& ca, const at::Tensor& cb,
                  const char* fwd = "e4m3fn") {
    torch::jit::Stack stack{a, b, c10::IValue(), ca, cb, fwd, "e5m2", c10::IValue(), c10::IValue(), "auto"};
    matmul.callBoxed(stack);
    return stack[0].toTensor();
  };
  const at::Tensor a = at::randn({4, 8}).requires_grad_(), b = at::randn({8, 4});
  const at::Tensor ca = encode(a, e4m3()), cb = encode(b, e4m3());
  EXPECT_THROW(call(a, b, ca, ca), Error);
  EXPECT_THROW(call(a, b, a, cb), Error);
  EXPECT_THROW(call(a, b, ca, cb, "E4M3"), Error);
  EXPECT_THROW(call(ca, b, ca, cb), Error) << "values are no codes";
  const at::Tensor y = call(a, b, ca, cb).square().sum();
  EXPECT_THROW(torch::autograd::grad({y}, {a}, {}, true, true), Error);
}

}  // namespace
}  // namespace plumb
