#include "plumb/transforms/scale/einsum_products.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/transforms/scale/unit_scale_testing.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using namespace testing_unit_scale;

// Returns the graph of an einsum after unit_scale.
std::string scaled(const std::string& x, const std::string& y, const std::string& equation, const std::string& z) {
  return after_scaling("graph { %x: " + x + " = placeholder \"x\" %y: " + y + " = placeholder \"y\" %z: " + z +
                       " = aten::einsum(\"" + equation + "\", [%x, %y]) output(%z) }");
}

TEST(EinsumProducts, BecomeProductsBetweenPermutations) {
  const std::string text =
      scaled("f32[2, 3, 5, 8]", "f32[2, 3, 7, 8]", "b h i d, b h j d -> b h j i", "f32[2, 3, 7, 5]");
  for (const char* part : {"%permute: f32[2, 3, 8, 7]{168, 56, 1, 8}", "aten::permute(%y, [0, 1, 3, 2])",
                           "%matmul: f32[2, 3, 5, 7]", "plumb::matmul(%x, %permute, constraint=None)",
                           "%z: f32[2, 3, 7, 5]{105, 35, 1, 7}", "aten::permute(%matmul, [0, 1, 3, 2])"})
    EXPECT_THAT(text, HasSubstr(part));
}

TEST(EinsumProducts, JoinDimensions) {
  const std::string text = scaled("f32[5, 2, 8]", "f32[8, 3, 4]", "ibh,hnd->ibnd", "f32[5, 2, 3, 4]");
  for (const char* call : {"aten::reshape(%contiguous, [10, 8])", "aten::reshape(%contiguous_1, [8, 12])",
                           "plumb::matmul(%reshape, %reshape_1", "aten::reshape(%contiguous_2, [5, 2, 3, 4])"})
    EXPECT_THAT(text, HasSubstr(call));
  EXPECT_THAT(scaled("f32[\"s0\"=5, 2, 8]", "f32[8, 3, 4]", "ibh,hnd->ibnd", "f32[\"s0\"=5, 2, 3, 4]"),
              HasSubstr("aten::einsum("));
  EXPECT_THAT(scaled("f32[2, \"s0\"=5, 8]", "f32[2, 8, 4]", "bih,bhd->bdi", "f32[2, 4, \"s0\"=5]"),
              AllOf(HasSubstr("%matmul: f32[2, \"s0\"=5, 4]"), HasSubstr("plumb::matmul(%x, %y")));
}

TEST(EinsumProducts, LeaveOtherEinsumsAlone) {
  for (const auto& [x, y, equation, z] : {std::tuple{"f32[4]", "f32[5]", "i,j->ij", "f32[4, 5]"},
                                          {"f32[4, 4]", "f32[4, 5]", "ii,ij->ij", "f32[4, 5]"},
                                          {"f32[2, 4]", "f32[4, 5]", "bi,ij->j", "f32[5]"},
                                          {"f32[2, 1]", "f32[4, 5]", "bi,ij->bj", "f32[2, 5]"},
                                          {"i64[2, 4]", "f32[4, 5]", "bi,ij->bj", "f32[2, 5]"},
                                          {"b8[2, 4]", "f32[4, 5]", "bi,ij->bj", "f32[2, 5]"}})
    EXPECT_THAT(scaled(x, y, equation, z), HasSubstr("aten::einsum(")) << equation;
  const std::string table = after_scaling(R"(graph { %x: f32[2, 4] = placeholder "x" %i: i64[2] = placeholder "i"
      %o: i64[2, 4] = aten::one_hot(%i, 4) %f: f32[2, 4] = aten::to.dtype(%o, 6)
      %z: f32[2, 2] = aten::einsum("bi,ci->bc", [%x, %f]) output(%z) })");
  EXPECT_THAT(table, Not(HasSubstr("matmul")));
  const std::string combined = after_scaling(R"(graph { %x: f32[2, 4, 3] = placeholder "x" %i: i64[2] = placeholder "i"
      %g: f32[2, 1] = placeholder "g" %o: i64[2, 4] = aten::one_hot(%i, 4) %f: f32[2, 4] = aten::mul.Tensor(%g, %o)
      %z: f32[2, 3] = aten::einsum("be,bed->bd", [%f, %x]) output(%z) })");
  EXPECT_THAT(combined, Not(HasSubstr("matmul")));
}

}  // namespace
}  // namespace plumb
