// Errors of a backward name nodes.
#include "plumb/graph/backward_errors.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/graph/graph_module.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string message_of_backward(const std::string& nodes) {
  GraphModule module(parse_graph("graph { %x: f32[3] = placeholder \"x\" " + nodes + " }"), State(),
                     TreeSpec::positional_inputs(1), TreeSpec::tuple({TreeSpec::leaf()}));
  const at::Tensor x = at::ones({3}).requires_grad_();
  const at::Tensor y = module.run({x})[0].toTensor();
  return message_of([&] { run_backward_of(module.graph(), [&] { y.sum().backward(); }); });
}

TEST(BackwardErrors, TheNodeThatWritesOneIsNamed) {
  const std::string text = message_of_backward(
      "%e: f32[3] = aten::exp(%x) %r: f32[3] = aten::neg(%x) %r_: f32[3] = aten::add_.Scalar(%r, 2, 1) "
      "%e_: f32[3] = aten::mul_.Scalar(%e, 2) %y: f32[3] = aten::add.Tensor(%e_, %r_) output(%y)");
  EXPECT_THAT(text,
              AllOf(HasSubstr("output 0 of Exp"), HasSubstr("Written in place: %e by node %e_ (aten::mul_.Scalar)."),
                    Not(HasSubstr("%r_")), Not(HasSubstr("anomaly")), HasSubstr("clone()")));
}

TEST(BackwardErrors, WithoutThatAllWritesAreNamed) {
  const std::string text = message_of_backward(
      "%e: f32[3] = aten::exp(%x) %v: f32[3] = aten::view(%e, [3]) %v_: f32[3] = aten::add_.Scalar(%v, 2, 1) "
      "output(%e)");
  EXPECT_THAT(text, HasSubstr("Written in place: %v by node %v_ (aten::add_.Scalar)."));
}

TEST(BackwardErrors, NamesTheNodeWithoutADerivative) {
  const std::string text = message_of_backward(
      "%e: f32[3] = aten::exp(%x) %h: f32[3] = aten::heaviside(%e, %x) %z: f32[3] = aten::mul.Tensor(%h, %e) "
      "output(%z)");
  EXPECT_THAT(text,
              AllOf(HasSubstr("derivative for aten::heaviside is not implemented. It is of node %h (aten::heaviside)."),
                    HasSubstr("detach()"), Not(HasSubstr("%z"))));
  EXPECT_THAT(message_of_backward("%g: f32[3] = aten::igamma(%x, %x) output(%g)"),
              HasSubstr("It is of node %g (aten::igamma)."));
}

TEST(BackwardErrors, OtherErrorsStayAsTheyAre) {
  const Graph graph;
  EXPECT_THROW(run_backward_of(graph, [] { throw std::out_of_range("other"); }), std::out_of_range);
}

}  // namespace
}  // namespace plumb
