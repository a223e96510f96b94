#include "plumb/transforms/scale/normalized.h"

#include <gtest/gtest.h>

#include <string>

#include "plumb/transforms/scale/unit_scale_testing.h"

namespace plumb {
namespace {

using namespace testing_unit_scale;

// Returns whether unit_scale leaves the product %p alone.
bool is_left_alone(const std::string& nodes, const State& state = {}) {
  Report report("unit_scale");
  after_scaling(
      "graph { %x: f32[4, 8] = placeholder \"x\" %y: f32[6, 8] = placeholder \"y\" " + nodes + " output(%p) }", state,
      {}, &report);
  return report.find(ReportKind::LeftAlone, "p");
}

const std::string kSides =
    "%n: f32[4, 1] = aten::linalg_vector_norm(%x, 2, [1], True) "
    "%m: f32[4, 1] = aten::clamp_min(%n, 1e-12) %e: f32[4, 8] = aten::expand(%m, [4, 8]) "
    "%t: f32[8, 6] = aten::transpose.int(%y, 0, 1) ";

TEST(Normalized, ProductsOfCosinesHaveNoFactor) {
  const std::string product = " %p: f32[4, 6] = aten::matmul(%u, %t)";
  EXPECT_TRUE(is_left_alone(kSides + "%u: f32[4, 8] = aten::div.Tensor(%x, %e)" + product));
  EXPECT_FALSE(is_left_alone(kSides + "%u: f32[4, 8] = aten::div.Tensor(%x, 2.0)" + product));
}

TEST(Normalized, IsThatOfWhatTheProductSumsOver) {  // one over four elements, and eight are summed
  EXPECT_FALSE(
      is_left_alone("%n: f32[1, 8] = aten::linalg_vector_norm(%x, 2, [0], True) "
                    "%u: f32[4, 8] = aten::div.Tensor(%x, %n) %t: f32[8, 6] = aten::transpose.int(%y, 0, 1) "
                    "%p: f32[4, 6] = aten::matmul(%u, %t)"));
}

TEST(Normalized, SharesMakeAMean) {  // as streams are mixed by a matrix whose columns sum to 1
  const std::string product = " %p: f32[4, 6] = aten::matmul(%u, %t)", by = "%u: f32[4, 8] = aten::div.Tensor(%x, %a)";
  const std::string sum = "%t: f32[8, 6] = aten::transpose.int(%y, 0, 1) %s: f32[4, 1] = aten::sum.dim_IntList";
  const std::string stable = "%a: f32[4, 1] = aten::add.Tensor(%s, 1e-6) ";
  EXPECT_TRUE(is_left_alone(sum + "(%x, [1], True) " + stable + by + product));
  EXPECT_FALSE(is_left_alone("%z: f32[4, 8] = aten::exp(%x) " + sum + "(%z, [1], True) " + stable + by + product));
}

TEST(Normalized, IsFoundInDemodulatedFilters) {  // as StyleGAN 2 has them
  const std::string filter =
      "%s: f32[6, 1, 1] = aten::sum.dim_IntList(%q, [1, 2], True) %a = aten::add.Tensor(%s, 1e-8) "
      "%r: f32[6, 1, 1] = aten::rsqrt(%a) %u: f32[6, 4, 2] = aten::mul.Tensor(%f, %r) "
      "%g: f32[1, 4, 8] = aten::view(%x, [1, 4, 8]) "
      "%p: f32[1, 6, 7] = aten::conv1d(%g, %u)";
  const std::string made = "%f: f32[6, 4, 2] = aten::view(%y, [6, 4, 2]) ";
  EXPECT_TRUE(is_left_alone(made + "%q: f32[6, 4, 2] = aten::pow.Tensor_Scalar(%f, 2) " + filter));
  EXPECT_FALSE(is_left_alone(made + "%q: f32[6, 4, 2] = aten::pow.Tensor_Scalar(%f, 4) " + filter));
}

}  // namespace
}  // namespace plumb
