#include "plumb/capture/guards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Returns a request to capture f(x).
CaptureRequest request_for(const std::function<at::Tensor(const at::Tensor&)>& f, const at::Tensor& x) {
  CaptureRequest request;
  request.inputs = {x};
  request.in_spec = TreeSpec::positional_inputs(1);
  request.call = [f](const std::vector<c10::IValue>& in, TreeSpec& out_spec) {
    out_spec = TreeSpec::leaf();
    return std::vector<c10::IValue>{f(in[0].toTensor())};
  };
  return request;
}

at::Tensor gated(const at::Tensor& x) { return x.sum().item<float>() > 0 ? x * 2 : x * 3; }

std::optional<ErrorKind> kind_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.kind();
  }
  return std::nullopt;
}

TEST(Guards, AValueTakenOutOfATensorIsRefusedUnlessGuardsAreAllowed) {
  const auto request = request_for(gated, at::ones({2}));
  EXPECT_EQ(kind_of([&] { capture(request); }), ErrorKind::DataDependent);
  EXPECT_THAT(message_of([&] { capture(request); }), HasSubstr("aten::item takes a value out of a tensor"));
}

TEST(Guards, AGuardedValueIsCheckedInEveryRun) {
  auto request = request_for(gated, at::ones({2}));
  request.guard_values = true;
  const auto module = capture(request);
  EXPECT_THAT(to_string(module->graph()), HasSubstr("plumb::guard_value_read("));
  EXPECT_THAT(to_string(module->graph()), HasSubstr("plumb::control_value("));
  EXPECT_TRUE(at::equal(module->run({at::ones({2})})[0].toTensor(), at::full({2}, 2.0)));
  EXPECT_EQ(kind_of([&] { module->run({at::full({2}, 2.0)}); }), ErrorKind::GuardFailed);
}

TEST(Guards, WhetherAnInputRequiresAGradientIsAnsweredAsItWasGivenAndCheckedInEveryRun) {
  const auto asks = [](const at::Tensor& x) { return requires_grad_as_given(x.sin(), true) ? x * 2 : x * 3; };
  const at::Tensor x = at::ones({2}), trained = at::ones({2}).requires_grad_();
  for (const bool given : {false, true}) {
    const auto module = capture(request_for(asks, given ? trained : x));
    EXPECT_TRUE(at::equal(module->run({given ? trained : x})[0].toTensor(), at::full({2}, given ? 2.0 : 3.0)));
    EXPECT_EQ(kind_of([&] { module->run({given ? x : trained}); }), ErrorKind::GuardFailed);
  }
}

TEST(Guards, AProgramTakesThePathOfTheControlValuesItIsGiven) {
  auto request = request_for(gated, at::ones({2}));
  request.guard_values = true;
  request.control_values = {at::full({}, -4.0)};
  const auto module = capture(request);
  EXPECT_TRUE(at::equal(module->run({at::full({2}, -2.0)})[0].toTensor(), at::full({2}, -6.0)));
}

TEST(Guards, AFreeBranchIsNoReasonToGuard) {
  auto request = request_for([](const at::Tensor& x) { return x.numel() > 1 ? x * 2 : x; }, at::ones({2}));
  request.guard_values = true;
  EXPECT_THAT(to_string(capture(request)->graph()), Not(HasSubstr("guard")));
}

TEST(Guards, AnAllowedGuardIsNotTriedForOtherRefusals) {
  const at::Tensor foreign = at::ones({2}).requires_grad_() * 2;
  auto request = request_for([&](const at::Tensor& x) { return x + foreign; }, at::ones({2}));
  request.guard_values = true;
  int attempts = 0;
  request.begin_attempt = [&](bool) { ++attempts; };
  EXPECT_EQ(kind_of([&] { capture(request); }), ErrorKind::Capture);
  EXPECT_EQ(attempts, 1);
}

TEST(Guards, ALibraryIsToldBeforeItsBranchIsRefused) {
  bool told = false;
  std::vector<bool> attempts;
  auto request = request_for([&](const at::Tensor& x) { return told ? x : gated(x); }, at::ones({2}));
  request.locate = [] { return std::make_shared<const SourceLocation>(SourceLocation{"/lib/masks.py", 3, "f"}); };
  request.in_library = [](const SourceLocation& at) { return at.file.starts_with("/lib/"); };
  request.begin_attempt = [&](bool tell) {
    told = tell;
    attempts.push_back(tell);
  };
  request.guard_values = true;
  EXPECT_THAT(to_string(capture(request)->graph()), Not(HasSubstr("guard")));
  EXPECT_THAT(attempts, ElementsAre(false, true));
}

TEST(Guards, GraphsOfOlderVersionsKnowTheirGuardsByTheOldNames) {
  Graph graph = parse_graph(R"(graph {
  %x: f32[] = placeholder "x"
  %e: f32[] = placeholder "e"
  plumb::decision(%x)
  plumb::guard_answer(%x, %e, False, "net.py:3")
  output(%x)
})");
  GraphModule module(std::move(graph), State(), TreeSpec::positional_inputs(2), TreeSpec::tuple({TreeSpec::leaf()}));
  ControlValueLog log;
  module.run({at::ones({}), at::ones({})});
  EXPECT_EQ(log.tensors.size(), 1u);
  EXPECT_EQ(kind_of([&] { module.run({at::ones({}), at::zeros({})}); }), ErrorKind::GuardFailed);
}

}  // namespace
}  // namespace plumb
