#include "plumb/scaling/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "plumb/core/error.h"
#include "plumb/scaling/constraint.h"

namespace plumb {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Pointwise;

TEST(Constraint, MeansAreWhatTheirNamesSay) {
  const std::vector<double> two{8, 2}, three{12.75, 55, 0.001};
  EXPECT_DOUBLE_EQ(gmean(two), 4);
  EXPECT_DOUBLE_EQ(hmean(two), 3.2);
  EXPECT_DOUBLE_EQ(amean(two), 5);
  EXPECT_NEAR(gmean(three), std::cbrt(12.75 * 55 * 0.001), 1e-12);
}

TEST(Constraint, GivesEveryScaleTheOneItChose) {
  EXPECT_THAT(apply_constraint("to_output_scale", {2, 3, 4}), ElementsAre(2, 2, 2));
  EXPECT_THAT(apply_constraint("to_grad_input_scale", {2, 3}), ElementsAre(3, 3));
  EXPECT_THAT(apply_constraint("to_left_grad_scale", {2, 3, 4}), ElementsAre(3, 3, 3));
  EXPECT_THAT(apply_constraint("to_right_grad_scale", {2, 3, 4}), ElementsAre(4, 4, 4));
}

TEST(Constraint, LeavesScalesAloneWithoutAName) {
  EXPECT_THAT(apply_constraint(std::nullopt, {2, 3}), ElementsAre(2, 3));
  EXPECT_THAT(apply_constraint("", {2, 3}), ElementsAre(2, 3));
  EXPECT_THAT(Constraint(std::nullopt).apply({2, 3}), ElementsAre(2, 3));
}

TEST(Constraint, OfAUserSeesAllScales) {
  Constraint largest(ConstraintFn([](std::span<const double> s) { return std::max(s[0], s[1]); }));
  EXPECT_TRUE(largest.is_user_function());
  EXPECT_THAT(largest.apply({2, 3}), ElementsAre(3, 3));
}

TEST(Constraint, RefusesAFunctionWithoutAFiniteScale) {
  for (const double wrong : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    try {
      Constraint(ConstraintFn([&](std::span<const double>) { return wrong; })).apply({2, 3});
      ADD_FAILURE() << "no error for " << wrong;
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), testing::HasSubstr("for the scales 2, 3"));
    }
  }
}

TEST(Constraint, RefusesUnknownNamesAndMisfits) {
  EXPECT_THROW(apply_constraint("median", {1, 2}), Error);
  EXPECT_THROW(apply_constraint("to_left_grad_scale", {1, 2}), Error);
  EXPECT_THROW(Constraint("median"), Error);
}

TEST(Rules, LogarithmicInterpolationGoesBetweenItsLimitsByRatios) {
  EXPECT_NEAR(rules::logarithmic_interpolation(0, 1e-3, 1e-1), 1e-3, 1e-15);
  EXPECT_NEAR(rules::logarithmic_interpolation(0.5, 1e-3, 1e-1), 1e-2, 1e-15);
  EXPECT_NEAR(rules::logarithmic_interpolation(1, 1e-3, 1e-1), 1e-1, 1e-15);
}

TEST(Rules, CausalAttentionOfOnePositionIsACopy) {
  EXPECT_NEAR(rules::attention(1, 64, 1, 0, true), 1, 1e-12);
  EXPECT_GT(rules::attention(64, 64, 1, 0, true), 1);
}

TEST(Rules, AResidualWeightIsAFiniteNumber) {
  EXPECT_EQ(rules::residual(0).skip, 1);
  for (double tau : {std::nan(""), HUGE_VAL, -HUGE_VAL, 1e200}) EXPECT_THROW(rules::residual(tau), Error) << tau;
}

TEST(Rules, TransformerResidualsHavePythonsBits) {
  EXPECT_EQ(rules::transformer_residual_scaling_rule(0.5, 1.7)(9, 24), 0x1.835d4495eefc1p-4);
  EXPECT_EQ(rules::transformer_residual_scaling_rule(0.7, 0.5)(6, 8), 0x1.582c95507a5d1p-3);
}

TEST(Rules, TransformerResidualsContributeAsAsked) {
  for (auto [mult, ratio, layers] : {std::tuple{1.0, 1.0, 4}, {0.5, 1.0, 4}, {1.0, 2.0, 4}, {0.5, 1 / 3.0, 6}}) {
    auto rule = rules::transformer_residual_scaling_rule(mult, ratio);
    std::vector<double> share(static_cast<size_t>(layers) + 1, 1.0);  // embedding first
    for (int n = 0; n < layers; ++n) {
      const double tau = rule(n, layers);
      share[static_cast<size_t>(n) + 1] *= tau;
      for (int k = 0; k <= n + 1; ++k) share[static_cast<size_t>(k)] /= std::sqrt(1 + tau * tau);
    }
    double attn = 0, mlp = 0;
    for (size_t k = 1; k < share.size(); ++k) (k % 2 ? attn : mlp) += share[k] * share[k];
    EXPECT_NEAR(attn + mlp + share[0] * share[0], 1, 1e-12);
    EXPECT_NEAR(std::sqrt((attn + mlp) / 2) / share[0], mult, 1e-12);
    EXPECT_NEAR(std::sqrt(attn / mlp), ratio, 1e-12);
    EXPECT_THAT(std::vector<double>({share[1], share[2]}),
                Pointwise(DoubleNear(1e-12), std::vector<double>({share[3], share[4]})));
  }
}

}  // namespace
}  // namespace plumb
