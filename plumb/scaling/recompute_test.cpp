// Unit-scaled operators whose results the backward computes again.
#include "plumb/autograd/recompute/recompute.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/autograd/recompute/recompute_testing.h"
#include "plumb/scaling/functional.h"

namespace plumb {
namespace {

using at::Tensor;

struct Case {
  std::string name;  // name of the operator
  int64_t tensors;
  std::function<Tensor(const std::vector<Tensor>&)> forward;
};

std::vector<Case> cases() {
  namespace us = functional;
  return {
      {"plumb::gelu", 1, [](const auto& t) { return us::linear(us::gelu(us::linear(t[0], t[1])), t[2]); }},
      {"plumb::gelu", 1,
       [](const auto& t) { return us::linear(us::gelu(us::linear(t[0], t[1]), 2.0, std::nullopt, "tanh"), t[2]); }},
      {"plumb::silu", 1, [](const auto& t) { return us::linear(us::silu(us::linear(t[0], t[1])), t[2]); }},
      {"plumb::silu_glu", 1,
       [](const auto& t) { return us::linear(us::silu_glu(us::linear(t[0], t[1]), us::linear(t[0], t[3])), t[2]); }},
      {"plumb::layer_norm", 1,
       [](const auto& t) { return us::linear(us::layer_norm(us::linear(t[0], t[1]), {128}, t[4], t[5]), t[2]); }},
      {"plumb::rms_norm", 1,
       [](const auto& t) { return us::linear(us::rms_norm(us::linear(t[0], t[1]), {128}, t[4]), t[2]); }},
      {"plumb::softmax", 0, [](const auto& t) { return us::linear(us::softmax(us::linear(t[0], t[1]), -1), t[2]); }},
  };
}

TEST(ScaledRecompute, GivesTheSameBitsWithoutWhatWasKept) {
  PLUMB_SKIP_IF_ALL_IS_KEPT();
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const Case& c : cases()) {
      auto train = [&](bool cheap, RecomputeReport* report) {
        at::manual_seed(3);
        std::vector<Tensor> leaves;
        for (at::IntArrayRef sizes :
             std::vector<std::vector<int64_t>>{{64, 64}, {128, 64}, {64, 128}, {128, 64}, {128}, {128}})
          leaves.push_back(at::randn(sizes).to(dtype).requires_grad_(true));
        std::optional<CheapRecompute> scope;
        if (cheap) scope.emplace(/*check=*/true);
        Tensor out = c.forward(leaves);
        if (scope) {
          scope->finish();
          *report = scope->report();
        }
        scope.reset();
        out.square().sum().backward();
        std::vector<Tensor> values{out.detach()};
        for (const Tensor& t : leaves) values.push_back(t.grad().defined() ? t.grad() : Tensor(at::zeros({})));
        return values;
      };
      RecomputeReport report;
      const auto kept = train(false, nullptr), again = train(true, &report);
      for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], again[i])) << c.name << " " << i;
      EXPECT_EQ(report.differing, 0) << c.name;
      EXPECT_EQ(report.by_operator.count(c.name) ? report.by_operator.at(c.name).tensors : 0, c.tensors) << c.name;
    }
  }
}

}  // namespace
}  // namespace plumb
