#include "plumb/graph/passes/dead_code.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/graph/pass.h"
#include "plumb/graph/passes/passes_testing.h"

namespace plumb {
namespace {

std::string after(const std::string& text, const PassOptions& options = {}) {
  return graph_after("dead_code", text, options);
}

TEST(DeadCode, ErasesWhatLeadsToNoOutput) {
  EXPECT_EQ(after(R"(graph {
  %x = placeholder "x"
  %unused = placeholder "unused"
  %w = get_attr "w"
  %a = aten::relu(%x)
  %b = aten::mul.Tensor(%a, %w)
  %c = aten::exp(%b)
  output(%a)
})"),
            R"(graph {
  %x = placeholder "x"
  %unused = placeholder "unused"
  %a = aten::relu(%x)
  output(%a)
}
)");
}

TEST(DeadCode, ErasesWritesIntoMemoryThatNothingReadsLater) {
  EXPECT_EQ(after(R"(graph {
  %x = placeholder "x"
  %a = aten::exp(%x)
  %s = aten::select.int(%a, 0, 1)
  %y = aten::neg(%a)
  %f = aten::fill_.Scalar(%s, 2.0)
  output(%y)
})"),
            R"(graph {
  %x = placeholder "x"
  %a = aten::exp(%x)
  %y = aten::neg(%a)
  output(%y)
}
)");
}

TEST(DeadCode, LeavesAWriteThatIsSeenThroughAView) {
  expect_unchanged("dead_code", R"(graph {
  %x = placeholder "x"
  %a = aten::exp(%x)
  %t = aten::t(%a)
  %s = aten::select.int(%a, 0, 1)
  %f = aten::fill_.Scalar(%s, 2.0)
  %y = aten::neg(%t)
  output(%y)
}
)");
}

TEST(DeadCode, KnowsOperatorsThatShareMemoryWithoutSayingSo) {
  for (const char* view :
       {"[%a, %b] = aten::unsafe_split.Tensor(%e, 2)", "[%a, %b] = aten::unsafe_split_with_sizes(%e, [2, 2])",
        "%a = aten::_unsafe_view(%e, [-1])", "[%a] = aten::unflatten_dense_tensors(%e, [%x])"}) {
    expect_unchanged("dead_code", std::string("graph { %x = placeholder \"x\" %e = aten::exp(%x) ") + view +
                                      " %f = aten::fill_.Scalar(%a, 2.0) output(%e) }");
  }
}

TEST(DeadCode, LeavesWritesToInputsParametersBuffersAndReturnedTensors) {
  expect_unchanged("dead_code", R"(graph {
  %x = placeholder "x"
  %count = get_attr "count"
  %v = aten::view(%x, [-1])
  %a = aten::add_.Tensor(%v, 1)
  %b = aten::add_.Tensor(%count, 1) no_grad
  %y = aten::exp(%x)
  %c = aten::zero_(%y)
  output(%y)
}
)");
  expect_unchanged("dead_code", R"(graph {
  %x = placeholder "x"
  %mean = get_attr "bn.running_mean"
  %var = get_attr "bn.running_var"
  %n = aten::batch_norm(%x, None, None, %mean, %var, True, 0.1, 1e-05, False)
  output(%x)
}
)");
}

TEST(DeadCode, KeepsRandomDrawsUnlessAskedTo) {
  const std::string text = R"(graph {
  %x = placeholder "x"
  %d = aten::dropout(%x, 0.5, True)
  output(%x)
}
)";
  expect_unchanged("dead_code", text);
  EXPECT_EQ(after(text, {{"remove_random", "true"}}), "graph {\n  %x = placeholder \"x\"\n  output(%x)\n}\n");
  EXPECT_EQ(after(R"(graph { %x = placeholder "x" %d = aten::dropout(%x, 0.5, False) output(%x) })"),
            "graph {\n  %x = placeholder \"x\"\n  output(%x)\n}\n");
}

TEST(DeadCode, KnowsThatADropoutOfNothingHandsItsInputBack) {
  Graph g = parse_graph(R"(graph {
  %x = placeholder "x"
  %h = aten::sin(%x)
  %a = aten::dropout(%h, 0.0, True)
  %b = aten::dropout(%h, 0.5, True)
  %c = aten::dropout(%h, 0.5, False)
  output(%a, %b, %c)
})");
  const Aliases aliases(g);
  const Value* h = g.find_value("h");
  EXPECT_TRUE(aliases.may_alias(g.find_value("a"), h));
  EXPECT_FALSE(aliases.may_alias(g.find_value("b"), h));
  EXPECT_TRUE(aliases.may_alias(g.find_value("c"), h));
}

TEST(DeadCode, LeavesTheReadAloneThatRenewsTheHistoryOfAWrittenView) {
  const std::string text = R"(graph {
  %w: f32[4, 4] grad = get_attr "w"
  %t: f32[4, 4]{1, 4} grad = aten::t(%w)
  %m: f32[4, 4]{1, 4} grad = aten::mul_.Tensor(%t, 2) no_grad
  %first: f32[4, 4]{1, 4} grad = aten::neg(%t)
  %y: f32[4, 4]{1, 4} grad = aten::sin(%t)
  output(%y)
}
)";
  expect_unchanged("dead_code", text);
  // The same through an operator that returns its input.
  std::string handed = text;
  handed.replace(handed.find("  %first:"), 0, "  %d: f32[4, 4]{1, 4} grad = aten::dropout(%t, 0.5, False)\n");
  handed.replace(handed.find("sin(%t)"), 7, "sin(%d)");
  expect_unchanged("dead_code", handed);
  std::string unwritten = text;
  unwritten.erase(unwritten.find("  %m:"), unwritten.find("  %first:") - unwritten.find("  %m:"));
  EXPECT_THAT(after(unwritten), testing::Not(testing::HasSubstr("aten::neg")));
}

TEST(DeadCode, KnowsTiedTensorsByTheState) {
  const std::string text = R"(graph {
  %x = placeholder "x"
  %a = get_attr "a"
  %b = get_attr "b"
  %c = aten::add_.Tensor(%b, 1)
  %y = aten::mul.Tensor(%x, %a)
  output(%y)
})";
  State state;
  at::Tensor tied = at::zeros({2});
  state.add({"a", AttrKind::Buffer, tied});
  state.add({"b", AttrKind::Buffer, tied.view({1, 2})});
  Graph g = parse_graph(text);
  EXPECT_FALSE(dead_code(g, &state));
  Aliases aliases(g, &state);
  EXPECT_TRUE(aliases.may_alias(g.find_value("a"), g.find_value("b")));
  EXPECT_FALSE(Aliases(g).may_alias(g.find_value("a"), g.find_value("b")));
}

}  // namespace
}  // namespace plumb
