#include "plumb/graph/passes/constant_folding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/graph/pass.h"
#include "plumb/graph/passes/passes_testing.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(ConstantFolding, ComputesWhatHangsOnConstantsAlone) {
  expect_rewrite("constant_folding", R"(graph {
  %x: f32[4] = placeholder "x"
  %c: f32[4] = get_attr "constant_0"
  %i: i64[4] = aten::arange(4)
  %d: f32[4] = aten::mul.Tensor(%c, %i)
  %y: f32[4] = aten::add.Tensor(%x, %d)
  output(%y)
})",
                 R"(graph {
  %x = placeholder "x"
  %folded_d = get_attr "folded_d"
  %y = aten::add.Tensor(%x, %folded_d)
  output(%y)
})");
}

TEST(ConstantFolding, FoldsATensorThatCppFillsElementByElement) {
  const std::string text = R"(graph {
  %x: f32[2] = placeholder "x"
  %e: f32[2] = aten::empty.memory_format([2])
  %a: f32[] = aten::select.int(%e, 0, 0)
  %b: f32[] = aten::fill_.Scalar(%a, 1.5)
  %c: f32[] = aten::select.int(%e, 0, 1)
  %d: f32[] = aten::fill_.Scalar(%c, -2.5)
  %y: f32[2] = aten::mul.Tensor(%x, %e)
  output(%y)
})";
  GraphModule m = module_of(parse_graph(text));
  EXPECT_TRUE(run_checked("constant_folding", m));
  EXPECT_EQ(to_string(m.graph()), R"(graph {
  %x: f32[2] = placeholder "x"
  %folded_e: f32[2] = get_attr "folded_e"
  %y: f32[2] = aten::mul.Tensor(%x, %folded_e)
  output(%y)
}
)");
  EXPECT_TRUE(at::equal(m.state().get("folded_e").tensor, at::tensor({1.5f, -2.5f})));
  EXPECT_EQ(m.state().get("folded_e").kind, AttrKind::Constant);
}

TEST(ConstantFolding, TakesTheConstantInPlaceOfItsCopy) {
  expect_rewrite("constant_folding", R"(graph {
  %x: f32[4] = placeholder "x"
  %c: f32[4] = get_attr "constant_0"
  %d: f32[4] = aten::clone(%c)
  %y: f32[4] = aten::add.Tensor(%x, %d)
  output(%y)
})",
                 R"(graph {
  %x = placeholder "x"
  %constant_0 = get_attr "constant_0"
  %y = aten::add.Tensor(%x, %constant_0)
  output(%y)
})");
}

TEST(ConstantFolding, PutsNumbersInAsNumbers) {
  EXPECT_THAT(graph_after("constant_folding", R"(graph {
  %x: f32[4] = placeholder "x"
  %c: f32[4] = get_attr "constant_0"
  %n: int = aten::size.int(%c, 0)
  %y: f32[2, 2] = aten::view(%x, [%n])
  output(%y, %n)
})"),
              HasSubstr("%y: f32[2, 2] = aten::view(%x, [4])\n  output(%y, 4)"));
}

TEST(ConstantFolding, LeavesParametersBuffersAndRandomDrawsAlone) {
  expect_unchanged("constant_folding", R"(graph {
  %x: f32[4] = placeholder "x"
  %b: f32[4] = get_attr "buffer"
  %w: f32[4] grad = get_attr "weight"
  %r: f32[4] = aten::rand([4])
  %s: f32[4] = aten::mul.Tensor(%b, %w)
  %t: f32[4] = aten::neg(%b)
  output(%r, %s, %t)
}
)");
}

TEST(ConstantFolding, LeavesConstantsAloneThatAreWrittenWithOtherThingsReadEarlyOrReturned) {
  expect_unchanged("constant_folding", R"(graph {
  %x: f32[4] = placeholder "x"
  %z: f32[4] = aten::zeros([4])
  %y: f32[4] = aten::add_.Tensor(%z, %x)
  %o: f32[4] = aten::ones([4])
  %early: f32[4] = aten::mul.Tensor(%x, %o)
  %m: f32[4] = aten::mul_.Tensor(%o, 2)
  %late: f32[4] = aten::mul.Tensor(%x, %o)
  %r: f32[4] = aten::full([4], 3.0)
  output(%y, %early, %late, %r)
}
)");
}

TEST(ConstantFolding, LeavesATensorAloneThatIsAskedForItsGradient) {
  expect_unchanged("constant_folding", R"(graph {
  %z: f32[2] = aten::zeros([2])
  %r: f32[2] grad = aten::requires_grad_(%z)
  %y: f32[2] grad = aten::mul.Tensor(%r, 2)
  %s: f32[2] grad = aten::exp(%y)
  output(%s)
}
)");
}

TEST(ConstantFolding, LeavesLargeUnknownAndMetaTensorsAlone) {
  expect_unchanged("constant_folding", R"(graph {
  %x: f32[4] = placeholder "x"
  %a: f32[4096, 4096] = aten::zeros([4096, 4096])
  %b: f32[] = aten::sum(%a)
  %c = aten::ones([4])
  %d: f32[4]@meta = aten::ones([4], device=device("meta"))
  %y: f32[4] = aten::mul.Tensor(%x, %b)
  %z: f32[4] = aten::mul.Tensor(%y, %c)
  %n: f32[4]@meta = aten::neg(%d)
  output(%z, %n)
}
)");
  const std::string small = R"(graph {
  %x: f32[4] = placeholder "x"
  %o: f32[4] = aten::ones([4])
  %y: f32[4] = aten::mul.Tensor(%x, %o)
  output(%y)
}
)";
  expect_unchanged("constant_folding", small, {{"limit_bytes", "15"}});
  EXPECT_THAT(graph_after("constant_folding", small, {{"limit_bytes", "16"}}), HasSubstr("get_attr \"folded_o\""));
  EXPECT_THROW(graph_after("constant_folding", small, {{"limit_bytes", "many"}}), Error);
}

TEST(ConstantFolding, LeavesANodeAloneThatCannotRunHereAndFoldsTheRest) {
  const std::string text = graph_after("constant_folding", R"(graph {
  %x: f32[4] = placeholder "x"
  %c: f32[4] = get_attr "constant_0"
  %bad: f32[3] = aten::view(%c, [3])
  %worse: f32[3] = aten::neg(%bad)
  %good: f32[4] = aten::neg(%c)
  %s: f32[] = aten::sum(%worse)
  %y: f32[4] = aten::mul.Tensor(%x, %good)
  %z: f32[4] = aten::mul.Tensor(%y, %s)
  output(%z)
})");
  EXPECT_THAT(text, HasSubstr("aten::view(%c, [3])"));
  EXPECT_THAT(text, Not(HasSubstr("%good")));
}

TEST(ConstantFolding, LeavesATypeAloneThatDoesNotComeOutToday) {
  expect_unchanged("constant_folding", R"(graph {
  %x: f64[4] = placeholder "x"
  %o: f64[4] = aten::ones([4])
  %y: f64[4] = aten::mul.Tensor(%x, %o)
  output(%y)
}
)");
}

}  // namespace
}  // namespace plumb
