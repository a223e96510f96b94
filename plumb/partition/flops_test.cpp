
#include <gtest/gtest.h>

#include "plumb/partition/cost.h"
#include "plumb/partition/partition_testing.h"

namespace plumb {
namespace {

using partition_testing::model;

// Returns the operations of the node in the last line: "%y: f32[...] = op(...)".
double flops(const std::string& placeholders, const std::string& call) {
  std::string text = "graph {\n";
  std::istringstream lines(placeholders);
  for (std::string one; std::getline(lines, one, ';');) {
    const size_t name = one.find('%') + 1;
    text += one + " = placeholder \"" + one.substr(name, one.find(':') - name) + "\"\n";
  }
  return estimate_cost(*model(text + call + "\noutput(%y)\n}")).flops();
}

TEST(Flops, AreTwiceTheProductsOfAContraction) {
  EXPECT_EQ(flops("%x: f32[3, 5, 8];%w: f32[16, 8]", "%y: f32[3, 5, 16] = aten::linear(%x, %w)"), 2. * 15 * 8 * 16);
  EXPECT_EQ(flops("%x: f32[5, 8];%w: f32[8, 16]", "%y: f32[5, 16] = aten::mm(%x, %w)"), 2. * 5 * 8 * 16);
  EXPECT_EQ(flops("%b: f32[16];%x: f32[5, 8];%w: f32[8, 16]", "%y: f32[5, 16] = aten::addmm(%b, %x, %w)"),
            2. * 5 * 8 * 16);
  EXPECT_EQ(flops("%b: f32[5];%m: f32[5, 8];%v: f32[8]", "%y: f32[5] = aten::addmv(%b, %m, %v)"), 2. * 5 * 8);
  EXPECT_EQ(flops("%b: f32[5, 7];%m: f32[2, 5, 8];%v: f32[2, 8, 7]", "%y: f32[5, 7] = aten::addbmm(%b, %m, %v)"),
            2. * 2 * 5 * 8 * 7);
  EXPECT_EQ(flops("%b: f32[2, 5, 7];%m: f32[2, 5, 8];%v: f32[2, 8, 7]", "%y: f32[2, 5, 7] = aten::baddbmm(%b, %m, %v)"),
            2. * 2 * 5 * 8 * 7);
}

TEST(Flops, OfBilinearSumOverBothInputs) {
  EXPECT_EQ(flops("%a: f32[5, 8];%b: f32[5, 6];%w: f32[3, 8, 6]", "%y: f32[5, 3] = aten::bilinear(%a, %b, %w)"),
            2. * 5 * 3 * 6 * (8 + 1));
}

TEST(Flops, OfEinsumAreThoseOfTheProductItSays) {
  const std::string two = "%a: f32[4, 5, 8];%b: f32[4, 8, 7]";
  EXPECT_EQ(flops(two, "%y: f32[4, 5, 7] = aten::einsum(\"bij,bjk->bik\", [%a, %b])"), 2. * 4 * 5 * 8 * 7);
  EXPECT_EQ(flops(two, "%y: f32[4, 5, 7] = aten::einsum(\"...ij,...jk->...ik\", [%a, %b])"), 2. * 4 * 5 * 8 * 7);
  EXPECT_EQ(flops(two, "%y: f32[5, 7] = aten::einsum(\"bij,bjk\", [%a, %b])"), 2. * 4 * 5 * 8 * 7);
  // From left to right: (ij, jk -> ik), then (ik, kl -> il).
  EXPECT_EQ(flops("%a: f32[2, 3];%b: f32[3, 5];%c: f32[5, 7]",
                  "%y: f32[2, 7] = aten::einsum(\"ij,jk,kl->il\", [%a, %b, %c])"),
            2. * 2 * 3 * 5 + 2. * 2 * 5 * 7);
  EXPECT_EQ(flops("%a: f32[4, 6]", "%y: f32[6, 4] = aten::einsum(\"ij->ji\", [%a])"), 24.);
}

TEST(Flops, OfConvolutionsAreAFilterForEachOutputOrInput) {
  EXPECT_EQ(flops("%x: f32[2, 3, 8, 8];%w: f32[4, 3, 3, 3]", "%y: f32[2, 4, 6, 6] = aten::conv2d(%x, %w)"),
            2. * (2 * 4 * 6 * 6) * 27);
  EXPECT_EQ(
      flops("%x: f32[2, 3, 8, 8];%w: f32[3, 4, 3, 3]", "%y: f32[2, 4, 10, 10] = aten::conv_transpose2d.input(%x, %w)"),
      2. * (2 * 3 * 8 * 8) * 36);
  const std::string rest = ", None, [1, 1], [0, 0], [1, 1], ";
  EXPECT_EQ(flops("%x: f32[2, 3, 8, 8];%w: f32[3, 4, 3, 3]",
                  "%y: f32[2, 4, 10, 10] = aten::convolution(%x, %w" + rest + "True, [0, 0], 1)"),
            2. * (2 * 3 * 8 * 8) * 36);
}

TEST(Flops, OfAttentionAreItsTwoProducts) {
  const std::string inputs = "%q: f32[2, 4, 5, 8];%k: f32[2, 4, 7, 8];%v: f32[2, 4, 7, 6]";
  const double both = 2. * 2 * 4 * 5 * 7 * 8 + 2. * 2 * 4 * 5 * 7 * 6;
  EXPECT_EQ(flops(inputs, "%y: f32[2, 4, 5, 6] = aten::scaled_dot_product_attention(%q, %k, %v)"), both);
  EXPECT_EQ(
      flops(inputs,
            "%y: f32[2, 4, 5, 6], %l: f32[2, 4, 5] = aten::_scaled_dot_product_flash_attention_for_cpu(%q, %k, %v)"),
      both);
}

TEST(Flops, OfRecurrentLayersAndCellsAreThoseOfTheirWeights) {
  EXPECT_EQ(flops("%x: f32[3, 8];%h: f32[3, 5];%i: f32[15, 8];%w: f32[15, 5]",
                  "%y: f32[3, 5] = aten::gru_cell(%x, %h, %i, %w)"),
            2. * 3 * (15 * 8 + 15 * 5));
  EXPECT_EQ(
      flops("%x: f32[6, 3, 8];%h: f32[1, 3, 5];%i: f32[5, 8];%w: f32[5, 5];%b: f32[5];%c: f32[5]",
            "%y: f32[6, 3, 5], %n: f32[1, 3, 5] = aten::rnn_tanh.input(%x, %h, [%i, %w, %b, %c], True, 1, 0.0, False, "
            "False, False)"),
      2. * 18 * (5 * 8 + 5 * 5));
}

TEST(Flops, LeaveViewsAndLookupsOutAndCountTheRestByElement) {
  EXPECT_EQ(flops("%x: f32[5, 8]", "%y: f32[8, 5] = aten::t(%x)"), 0.);
  EXPECT_EQ(flops("%w: f32[11, 8];%i: i64[3]", "%y: f32[3, 8] = aten::embedding(%w, %i)"), 0.);
  EXPECT_EQ(flops("%x: f32[5, 8]", "%y: f32[5, 8] = aten::gelu(%x)"), 40.);
  EXPECT_EQ(flops("%x: f32[5, 8]", "%y: f32[5, 8] = aten::rms_norm(%x, [8])"), 40.);
}

}  // namespace
}  // namespace plumb
