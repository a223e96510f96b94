#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/graph.h"

namespace plumb {
namespace {

using testing::HasSubstr;

std::string round_trip(const std::string& text) { return to_string(parse_graph(text)); }

std::string parse_error(const std::string& text) {
  try {
    parse_graph(text);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::InvalidGraph);
    return e.what();
  }
  return "no error";
}

TEST(Text, ShowsEveryKindOfNodeAndReadsItBack) {
  const std::string text = R"(graph {
  %x: f32[2, "s0"=8] = placeholder "x"
  %n: int = placeholder "n"
  %fc_weight: f32[4, 8] grad = get_attr "fc.weight"
  %linear: f32[2, 4] grad = aten::linear(%x, %fc_weight) in "":"Net" "fc":"Linear" at "model.py":12:"forward"
  %t: f32[4, 2]{1, 4} = aten::t(%linear) no_grad
  %max, %max_1: i64[2] = aten::max.dim(%linear, 1)
  [%chunk, %chunk_1] = aten::chunk(%linear, 2, 1)
  %view = aten::view(%linear, [%n, -1])
  %to: f16[2, 4]@cuda:0 = aten::to.device(%linear, device("cuda:0"), torch.float16)
  plumb_test_no_such
}
)";
  EXPECT_THAT(parse_error(text), HasSubstr("line 11, column 3: no operator"));
  std::string good = text;
  good.replace(good.find("  plumb_test_no_such\n"), 21,
               "  output(%chunk, %t, None, 1.5, \"a\\x0ab\", [1, 2], complex(1.0, -inf), nan, -0.0)\n");
  EXPECT_EQ(round_trip(good), good);
  EXPECT_NO_THROW(lint(parse_graph(good)));
}

TEST(Text, LeavesOutArgumentsThatEqualTheirDefaults) {
  const std::string text =
      "graph {\n  %x = placeholder \"x\"\n  %add = aten::add.Tensor(%x, %x)\n"
      "  %add_1 = aten::add.Tensor(%x, 2, alpha=3)\n  output(%add_1)\n}\n";
  EXPECT_EQ(round_trip(text), text);
  EXPECT_EQ(round_trip("graph { %x = placeholder \"x\" %add = aten::add.Tensor(%x, other=%x, alpha=1) output(%add) }"),
            "graph {\n  %x = placeholder \"x\"\n  %add = aten::add.Tensor(%x, %x)\n  output(%add)\n}\n");
}

TEST(Text, KeepsIntegersAndFloatsApart) {
  const std::string text =
      "graph {\n  %x = placeholder \"x\"\n  %a = aten::mul.Tensor(%x, 2)\n"
      "  %b = aten::mul.Tensor(%x, 2.0)\n  %c = aten::mul.Tensor(%x, 1e+300)\n"
      "  %d = aten::mul.Tensor(%x, True)\n  output(%a, %b, %c, %d)\n}\n";
  EXPECT_EQ(round_trip(text), text);
}

TEST(Text, IgnoresComments) {
  EXPECT_EQ(round_trip("graph { # nothing\n %x = placeholder \"x\" # in\n output(%x) }"),
            "graph {\n  %x = placeholder \"x\"\n  output(%x)\n}\n");
}

TEST(Text, RefusesWrongTextWithLineAndColumn) {
  EXPECT_THAT(parse_error("graph {\n  output(%x)\n}"),
              HasSubstr("line 2, column 10: %x is used before it is produced"));
  EXPECT_THAT(parse_error("graph {\n  %y = aten::no_such(1)\n}"), HasSubstr("no operator 'aten::no_such'"));
  EXPECT_THAT(parse_error("graph { %x = placeholder \"x"), HasSubstr("a string is not closed"));
  EXPECT_THAT(parse_error("graph { %x: f99[2] = placeholder \"x\" }"), HasSubstr("unknown type 'f99'"));
  EXPECT_THAT(parse_error("graph { %x: f32[3, -1] = placeholder \"x\" }"), HasSubstr("a negative size"));
  EXPECT_THAT(parse_error("graph { %x: f32[3]{4, 1} = placeholder \"x\" }"), HasSubstr("as many strides as sizes"));
  EXPECT_THAT(parse_error("graph { %x = placeholder \"x\" %x = placeholder \"y\" }"), HasSubstr("%x is used twice"));
  EXPECT_THAT(parse_error("graph { %x = placeholder \"x\" %a, %b = aten::relu(%x) }"),
              HasSubstr("another arrangement"));
  EXPECT_THAT(parse_error("graph { %x = placeholder \"x\" %a = aten::relu(nothing=%x) }"),
              HasSubstr("has no argument 'nothing'"));
  EXPECT_THAT(parse_error("graph { %x = placeholder \"x\" %a = aten::add.Tensor(%x, 99999999999999999999) }"),
              HasSubstr("integer"));
  EXPECT_THAT(parse_error("graph { output() } more"), HasSubstr("after the graph's closing brace"));
  EXPECT_THAT(parse_error("graph { output() %x = placeholder \"x\" }"), HasSubstr("a node after the output"));
  EXPECT_THAT(parse_error(""), HasSubstr("expected 'graph'"));
  std::string deep = "graph { output(";
  for (int i = 0; i < 100'000; ++i) deep += '[';
  EXPECT_THAT(parse_error(deep), HasSubstr("nested deeper"));
}

}  // namespace
}  // namespace plumb
