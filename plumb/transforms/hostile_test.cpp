// Graphs that no program has end no pass: what a pass cannot use is left alone, or is an Error.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/graph/graph_module.h"
#include "plumb/graph/pass.h"

namespace plumb {
namespace {

// Runs every pass on a graph without its parameters. Any exception but an Error ends the test.
void run_every_pass(const std::string& text) {
  SCOPED_TRACE(text);
  const Graph graph = parse_graph(text);
  for (const Pass* pass : all_passes()) {
    State state;
    for (const Node* node : graph.attributes())
      state.add({node->target(), AttrKind::Parameter, at::ones(node->result()->meta()->sizes).requires_grad_()});
    GraphModule module(graph.clone(), std::move(state), TreeSpec::positional_inputs(graph.placeholders().size()),
                       TreeSpec::tuple(std::vector<TreeSpec>(graph.output_node()->args().size(), TreeSpec::leaf())));
    try {
      run_pass(*pass, module, {}, nullptr, true);
    } catch (const Error& e) {
      EXPECT_NE(e.kind(), ErrorKind::Internal) << pass->name << ": " << e.what();
    }
  }
}

// An LSTM of one layer, of which the arguments from its states on are given.
std::string lstm(const std::string& arguments, const std::string& input = "f32[3, 2, 8]",
                 const std::string& weight = "f32[32, 8]") {
  return "graph {\n %x: " + input + " grad = placeholder \"x\"\n %h: f32[1, 2, 8] = placeholder \"h\"\n" +
         " %c: f32[1, 2, 8] = placeholder \"c\"\n %a: " + weight + " grad = get_attr \"a\"\n" +
         " %b: f32[32, 8] grad = get_attr \"b\"\n" +
         " %y: f32[3, 2, 8] grad, %hn: f32[1, 2, 8] grad, %cn: f32[1, 2, 8] grad = aten::lstm.input(%x, " + arguments +
         ")\n output(%y)\n}";
}

TEST(HostileGraphs, LayersThatDoNotFitTheirWeightsAreLeftAlone) {
  const std::string rest = ", 0.0, True, False, False";
  for (const char* layers : {"0", "-1", "5", "4611686018427387904", "9223372036854775807"}) {
    run_every_pass(lstm("[%h, %c], [%a, %b], False, " + std::string(layers) + rest));
    run_every_pass(lstm("[%h, %c], [%a, %b], False, " + std::string(layers) + ", 0.0, True, True, False"));
  }
  run_every_pass(lstm("[%h, %c], [%a, %b], True, 1" + rest));
  run_every_pass(lstm("[%h, %c], [%a, %b], False, 2, -inf, True, False, False"));
  run_every_pass(lstm("[%h, %c], [], False, 1" + rest));
  run_every_pass(lstm("[%h], [%a, %b], False, 1" + rest));
  run_every_pass(lstm("[], [%a, %b], False, 1" + rest));
  run_every_pass(lstm("[%h, %c], [%a, %b], False, 1" + rest, "f32[3, 2, 8]", "f32[32]"));
}

TEST(HostileGraphs, StepsWithoutNumberAreNotWrittenOut) {
  const std::string arguments = "[%h, %c], [%a, %b], False, 1, 0.0, True, False, False";
  for (const char* steps : {"100000000", "1000000000000", "9223372036854775807"})
    run_every_pass(lstm(arguments, "f32[" + std::string(steps) + ", 2, 8]"));
}

TEST(HostileGraphs, ASliceOfANumberIsNoChoice) {
  for (const char* sizes : {"f32[]", "f32[4]"}) {
    run_every_pass("graph {\n %x: " + std::string(sizes) + " grad = placeholder \"x\"\n %s: " + sizes +
                   " grad = aten::softmax.int(%x, -1)\n %t: f32[] grad = aten::slice.Tensor(%s, -1, 0, 1, 1)\n" +
                   " %z: f32[] grad = aten::add.Tensor(%t, %x)\n output(%z)\n}");
  }
}

TEST(HostileGraphs, ProductsOfSizesBeyondCountingAreFolded) {
  run_every_pass(R"(graph {
    %x: f32[9223372036854775807, 4, 8] grad = placeholder "x"
    %w: f32[4, 8] grad = get_attr "w"
    %y: f32[9223372036854775807, 4, 4] grad = plumb::linear(%x, %w)
    %k: f32[9223372036854775807, 4, 8] grad = plumb::matmul(%y, %x)
    %z: f32[9223372036854775807, 4, 8] grad = plumb::add(%k, %x, constraint=None)
    output(%z)
  })");
}

TEST(HostileGraphs, AHeadWithoutRowsIsNotDivided) {
  run_every_pass(R"(graph {
    %x: f32[4, 8] grad = placeholder "x"
    %t: i64[4] = placeholder "t"
    %w: f32[6, 8] grad = get_attr "w"
    %y: f32[] grad = aten::linear(%x, %w)
    %v: f32[4, 6] grad = aten::view(%y, [4, 6])
    %z: f32[] grad = aten::cross_entropy_loss(%v, %t)
    output(%z)
  })");
  run_every_pass(R"(graph {
    %x: f32[4, 8] grad = placeholder "x"
    %t: i64[4] = placeholder "t"
    %i = aten::size.int(%x, 0)
    %w: f32[6, 8] grad = get_attr "w"
    %y: f32[4, 6] grad = aten::linear(%x, %w)
    %z: f32[] grad = aten::cross_entropy_loss(%y, %t, None, %i)
    output(%z)
  })");
}

}  // namespace
}  // namespace plumb
