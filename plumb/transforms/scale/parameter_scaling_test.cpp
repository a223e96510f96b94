#include "plumb/transforms/scale/parameter_scaling.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "plumb/transforms/scale/unit_scale.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

at::Tensor live_parameter(at::IntArrayRef sizes, double std) {
  at::manual_seed(3);
  return (at::randn(sizes) * std).requires_grad_();
}

double live_std(const at::Tensor& t) { return at::std(t.detach()).item<double>(); }

// y = linear(x, w, b), and z that uses v beside it.
GraphModule live_linear(const at::Tensor& w, const at::Tensor& b) {
  State state;
  state.add({"w", AttrKind::Parameter, w, true});
  state.add({"b", AttrKind::Parameter, b, true});
  return GraphModule(parse_graph(R"(graph {
    %x: f32[5, 4] = placeholder "x"
    %w: f32[3, 4] grad = get_attr "w"
    %b: f32[3] grad = get_attr "b"
    %y: f32[5, 3] grad = aten::linear(%x, %w, %b)
    output(%y)
  })"),
                     std::move(state), TreeSpec::positional_inputs(1), TreeSpec::leaf());
}

// The weight is an operand of a sum, too.
GraphModule live_used_twice(const at::Tensor& w) {
  State state;
  state.add({"w", AttrKind::Parameter, w, true});
  return GraphModule(parse_graph(R"(graph {
    %x: f32[5, 4] = placeholder "x"
    %w: f32[3, 4] grad = get_attr "w"
    %y: f32[5, 3] grad = aten::linear(%x, %w)
    %s: f32[] grad = aten::sum(%w)
    %z: f32[5, 3] grad = aten::mul.Tensor(%y, %s)
    output(%z)
  })"),
                     std::move(state), TreeSpec::positional_inputs(1), TreeSpec::leaf());
}

Report confirm_live(ParameterScaling& scaling, GraphModule module) {
  UnitScaleOptions options;
  options.live = &scaling;
  Report report("unit_scale");
  unit_scale(module, options, &report);
  return report;
}

TEST(ParameterScaling, ProposesWeightsAndBiasesInPlace) {
  at::Tensor w = live_parameter({3, 4}, 0.1), b = live_parameter({3}, 2), other = live_parameter({2, 2}, 5),
             one = live_parameter({1}, 1);
  const at::Tensor before = other.detach().clone();
  ParameterScaling scaling;
  EXPECT_THAT(scaling.propose({{{"w", "tied"}, w, ScaledKind::Weight},
                               {{"b"}, b, ScaledKind::Bias},
                               {{"other"}, other, std::nullopt},
                               {{"one"}, one, ScaledKind::Weight}}),
              ElementsAre("w", "b"));
  EXPECT_NEAR(live_std(w), 1, 1e-6);
  EXPECT_TRUE(at::equal(b.detach(), at::zeros({3})));
  EXPECT_TRUE(at::equal(other.detach(), before));
}

TEST(ParameterScaling, AGraphConfirmsAProposalAndChangesNothingMore) {
  at::Tensor w = live_parameter({3, 4}, 0.1), b = live_parameter({3}, 2);
  ParameterScaling scaling;
  scaling.propose({{{"w"}, w, ScaledKind::Weight}, {{"b"}, b, ScaledKind::Bias}});
  const at::Tensor values = w.detach().clone();
  const Report report = confirm_live(scaling, live_linear(w, b));
  EXPECT_TRUE(at::equal(w.detach(), values));
  EXPECT_NE(report.find(ReportKind::Weight, "w"), nullptr);
  EXPECT_NE(report.find(ReportKind::Bias, "b"), nullptr);
  EXPECT_THAT(scaling.confirmed(), ElementsAre("b", "w"));
}

TEST(ParameterScaling, AParameterUnderANewNameIsNotScaledAgain) {
  at::Tensor w = live_parameter({3, 4}, 0.1), b = live_parameter({3}, 2);
  ParameterScaling scaling;
  scaling.propose({{{"layer.w"}, w, ScaledKind::Weight}, {{"layer.b"}, b, ScaledKind::Bias}});
  at::NoGradGuard no_grad;
  w.mul_(3);
  scaling.mark_changed("layer.w");
  EXPECT_TRUE(scaling.rename("layer.w", "w"));
  EXPECT_TRUE(scaling.rename("layer.b", "b"));
  EXPECT_FALSE(scaling.rename("other", "w"));
  const at::Tensor values = w.clone();
  const Report report = confirm_live(scaling, live_linear(w, b));
  EXPECT_TRUE(at::equal(w, values));
  EXPECT_NE(report.find(ReportKind::Weight, "w"), nullptr) << "under the name that it has now";
  EXPECT_EQ(report.find(ReportKind::Weight, "layer.w"), nullptr);
}

TEST(ParameterScaling, AGraphAddsWhatNoLayerProposed) {
  at::Tensor w = live_parameter({3, 4}, 0.1), b = live_parameter({3}, 2);
  ParameterScaling scaling;
  scaling.propose({{{"w"}, w, std::nullopt}, {{"b"}, b, std::nullopt}});
  const at::Tensor same = w;
  confirm_live(scaling, live_linear(w, b));
  EXPECT_NEAR(live_std(w), 1, 1e-6);
  EXPECT_TRUE(same.is_same(w)) << "in place";
  EXPECT_TRUE(at::equal(b.detach(), at::zeros({3})));
  const at::Tensor values = w.detach().clone();
  confirm_live(scaling, live_linear(w, b));
  EXPECT_TRUE(at::equal(w.detach(), values)) << "once";
}

TEST(ParameterScaling, AGraphGivesAWeightBackThatSomethingElseUses) {
  at::Tensor w = live_parameter({3, 4}, 0.5);
  const at::Tensor before = w.detach().clone();
  ParameterScaling scaling;
  scaling.propose({{{"w"}, w, ScaledKind::Weight}});
  const Report report = confirm_live(scaling, live_used_twice(w));
  EXPECT_TRUE(at::allclose(w.detach(), before));
  EXPECT_NE(report.find(ReportKind::LeftAlone, "w"), nullptr);
  EXPECT_THAT(scaling.scaled(), IsEmpty());
}

TEST(ParameterScaling, LeavesValuesAloneThatSomebodyWroteMeanwhile) {
  at::Tensor w = live_parameter({3, 4}, 0.5), v = live_parameter({3, 4}, 0.5), b = live_parameter({3}, 2);
  ParameterScaling scaling;
  scaling.propose({{{"w"}, w, ScaledKind::Weight}});
  {
    at::NoGradGuard no_grad;
    w.fill_(7);
  }
  confirm_live(scaling, live_used_twice(w));
  EXPECT_TRUE(at::equal(w.detach(), at::full({3, 4}, 7.0f)));
  ParameterScaling other;
  other.propose({{{"w"}, v, std::nullopt}, {{"b"}, b, std::nullopt}});
  {
    at::NoGradGuard no_grad;
    v.fill_(7);
  }
  const Report report = confirm_live(other, live_linear(v, b));
  EXPECT_TRUE(at::equal(v.detach(), at::full({3, 4}, 7.0f)));
  ASSERT_NE(report.find(ReportKind::LeftAlone, "w"), nullptr);
}

TEST(ParameterScaling, RefusesToChangeParametersThatWereCopiedSincePropose) {
  at::Tensor w = live_parameter({3, 4}, 0.5), v = live_parameter({3, 4}, 0.5), b = live_parameter({3}, 2);
  ParameterScaling scaling, other, loaded;
  scaling.propose({{{"w"}, w, ScaledKind::Weight}});
  const at::Tensor scaled = w.detach().clone(), before = v.detach().clone();
  scaling.freeze("a wrapper");
  EXPECT_THAT(message_of([&] { confirm_live(scaling, live_used_twice(w)); }),
              AllOf(HasSubstr("'w'"), HasSubstr("a wrapper has copied"), HasSubstr("before you give it to a wrapper")));
  EXPECT_TRUE(at::equal(w.detach(), scaled));
  other.propose({{{"w"}, v, std::nullopt}, {{"b"}, b, ScaledKind::Bias}});
  other.freeze("a wrapper");
  EXPECT_THAT(message_of([&] { confirm_live(other, live_linear(v, b)); }), HasSubstr("'w'"));
  EXPECT_TRUE(at::equal(v.detach(), before));
  other.freeze("");
  confirm_live(other, live_linear(v, b));
  EXPECT_FALSE(at::equal(v.detach(), before));
  other.freeze("a wrapper");
  confirm_live(other, live_linear(v, b));  // the first graph has confirmed it
  loaded.propose({{{"w"}, w, ScaledKind::Weight}});
  loaded.mark_changed("w");
  loaded.freeze("a wrapper");
  const at::Tensor values = w.detach().clone();
  confirm_live(loaded, live_used_twice(w));
  EXPECT_TRUE(at::equal(w.detach(), values));
}

TEST(ParameterScaling, IsRestoredFromWhatIsSaved) {
  at::Tensor w = live_parameter({3, 4}, 0.5);
  const at::Tensor before = w.detach().clone();
  ParameterScaling scaling;
  scaling.propose({{{"w"}, w, ScaledKind::Weight}});
  ParameterScaling again = ParameterScaling::restore(scaling.scaled(), scaling.confirmed(), scaling.changed());
  confirm_live(again, live_used_twice(w));
  EXPECT_TRUE(at::allclose(w.detach(), before));
}

TEST(ParameterScaling, ACopyLeavesValuesAloneThatWereWrittenBeforeItOrSince) {
  for (const bool before : {true, false}) {
    at::Tensor w = live_parameter({3, 4}, 0.5), copied;
    ParameterScaling scaling;
    scaling.propose({{{"w"}, w, ScaledKind::Weight}});
    const auto write = [](const at::Tensor& t) {
      at::NoGradGuard no_grad;
      t.fill_(7);
    };
    if (before) write(w);
    scaling.look_at("w", w, /*buffer=*/false);
    ParameterScaling copy = scaling.for_copy();
    copied = w.detach().clone().requires_grad_();
    if (!before) write(copied);
    ParameterScaling file = ParameterScaling::restore(copy.scaled(), copy.confirmed(), copy.changed());
    confirm_live(copy, live_used_twice(copied));
    EXPECT_TRUE(at::equal(copied.detach(), at::full({3, 4}, 7.0f)));
    if (!before) file.mark_changed("w");
    confirm_live(file, live_used_twice(copied));
    EXPECT_TRUE(at::equal(copied.detach(), at::full({3, 4}, 7.0f)));
  }
}

}  // namespace
}  // namespace plumb
