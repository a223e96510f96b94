#include "plumb/partition/split.h"

#include <gmock/gmock.h>
#include <torch/library.h>

#include "plumb/partition/partition_testing.h"
#include "plumb/partition/pipe_split.h"
#include "plumb/partition/size_policy.h"

TORCH_LIBRARY_FRAGMENT(pippy, m) {
  m.def("_pipe_split() -> ()", []() {});
}

namespace plumb {
namespace {

using namespace partition_testing;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(Split, MarkIsAnOperatorThatDoesNothing) {
  EXPECT_NO_THROW(pipe_split());
  Graph g = parse_graph("graph { plumb::pipe_split() pippy::_pipe_split() %a = aten::ones([2]) output(%a) }");
  EXPECT_TRUE(is_pipe_split(*g.first()));
  EXPECT_TRUE(is_pipe_split(*g.first()->next()));
  EXPECT_FALSE(is_pipe_split(*g.first()->next()->next()));
  EXPECT_TRUE(g.first()->has_side_effects()) << "dead code would take the mark away";
}

TEST(Split, GptAtMarksEqualsTheWhole) {
  auto pipe = expect_equals_whole(*gpt(3, false, true), {}, gpt_inputs(), 4);
  EXPECT_TRUE(pipe->replicated_params().empty());
  EXPECT_TRUE(pipe->notes().empty());
  // Targets go straight to the last stage, tokens to the first.
  ASSERT_EQ(pipe->stage_inputs(0).size(), 1u);
  EXPECT_EQ(pipe->stage_inputs(0)[0].source, (ValueSource{ValueSource::kModelInput, 0}));
  EXPECT_EQ(pipe->stage_inputs(3)[0].source, (ValueSource{ValueSource::kModelInput, 1}));
  EXPECT_THAT(pipe->stage(1)->state().names(AttrKind::Parameter), testing::Each(testing::StartsWith("blocks.1.")));
  EXPECT_EQ(pipe->stage(1)->state().size(), 12u);
}

TEST(Split, GptWithDropoutDrawsTheSameMasks) {
  expect_equals_whole(*gpt(2, false, true, false, 0.3), {}, gpt_inputs(), 3);
}

TEST(Split, TiedWeightsAreReplicatedWithSummedGradients) {
  auto pipe = expect_equals_whole(*gpt(2, true, true), {}, gpt_inputs(), 3);
  EXPECT_THAT(pipe->replicated_params(), ElementsAre(ReplicatedParam{{0, "tok.weight"}, {2, "head.weight"}}));
  const auto& first = pipe->stage(0)->state().get("tok.weight").tensor;
  const auto& second = pipe->stage(2)->state().get("head.weight").tensor;
  EXPECT_FALSE(first.is_same(second));
  EXPECT_TRUE(same(first.grad(), second.grad()));
  const State merged = pipe->merge_state_dict();
  EXPECT_TRUE(merged.get("tok.weight").tensor.is_same(merged.get("head.weight").tensor));
  // Copies that were trained apart are no one model any more.
  at::NoGradGuard guard;
  second.add_(1);
  EXPECT_THAT(message_of([&] { pipe->merge_state_dict(); }),
              HasSubstr("'tok.weight' in stage 0 and of 'head.weight' in stage 2 differ"));
}

TEST(Split, TiedWeightsAreTransmittedOnRequest) {
  SplitOptions options;
  options.multi_use = MultiUse::Transmit;
  auto pipe = expect_equals_whole(*gpt(2, true, true), options, gpt_inputs(), 3);
  EXPECT_TRUE(pipe->replicated_params().empty());
  EXPECT_FALSE(pipe->stage(2)->state().contains("head.weight"));
  EXPECT_EQ(pipe->stage_inputs(2)[1].source.stage, 0);
  options = {};
  for (const char* name : {"tok.weight", "head.weight"}) {  // each of its names is the parameter's
    options.multi_use_by_name = {{name, MultiUse::Transmit}};
    pipe = expect_equals_whole(*gpt(2, true, true), options, gpt_inputs(), 3);
    EXPECT_TRUE(pipe->replicated_params().empty()) << name;
  }
  options.multi_use_by_name = {{"tk.weight", MultiUse::Transmit}};
  EXPECT_THAT(message_of([&] { pipeline(*gpt(1, true, true), options); }), HasSubstr("'tk.weight'"));
}

TEST(Split, AtModuleNamesByStackOrByParameterNames) {
  for (bool stacks : {true, false}) {
    SplitOptions options;
    options.points = {{"blocks.1", SplitPoint::Beginning}, {"blocks.1", SplitPoint::End}};
    auto pipe = expect_equals_whole(*gpt(3, false, false, stacks), options, gpt_inputs(), 3);
    EXPECT_THAT(pipe->stage(1)->state().names(AttrKind::Parameter), testing::Each(testing::StartsWith("blocks.1.")));
    // By stack the residual add belongs to the layer; by parameters the layer ends with the last node that uses one.
    EXPECT_EQ(pipe->stage_inputs(2)[1].name, stacks ? "y1" : "mid1");
  }
  SplitOptions options;
  options.points = {{"block.1", SplitPoint::Beginning}};
  EXPECT_THAT(message_of([&] { pipeline(*gpt(1, false, false), options); }),
              HasSubstr("no operator of the graph belongs to a module 'block.1'"));
  EXPECT_THAT(message_of([&] { pipeline(*gpt(1, false, false), options); }), HasSubstr("blocks.0.down"));
}

TEST(Split, ModuleNamesAreWholeNamesNotPrefixes) {
  SplitOptions options;
  options.points = {{"blocks.1", SplitPoint::Beginning}};
  auto pipe = expect_equals_whole(*gpt(12, false, false, true), options, gpt_inputs(), 2);
  EXPECT_TRUE(pipe->stage(1)->state().contains("blocks.1.up.bias"));
  EXPECT_TRUE(pipe->stage(1)->state().contains("blocks.10.up.bias"));
}

TEST(Split, ByPolicy) {
  SplitOptions options;
  options.policy = [](const Node& n) {
    return n.result()->name().starts_with("h1") || n.meta().module_path() == "head" ? 7
           : n.is_op("aten::cross_entropy_loss")                                    ? 9
                                                                                    : 0;
  };
  const std::string text = R"(graph { %x: f32[3, 3] = placeholder "x" %a = aten::neg(%x) %h1 = aten::mul.Tensor(%a, %x)
    %l = aten::sum(%h1) output(%l) })";
  EXPECT_THAT(message_of([&] { pipeline(*model(text), options); }),
              HasSubstr("puts node %l (aten::sum) into stage 0, before stage 1 of node %h1"));
  options.policy = [](const Node& n) { return n.is_op("aten::neg") ? 0 : 5; };
  auto pipe = expect_equals_whole(*model(text), options, {randn_there({3, 3}).requires_grad_()}, 2);
  EXPECT_EQ(pipe->stage_inputs(1).size(), 2u) << "the input goes to both stages";
  options.points = {{"a", SplitPoint::End}};
  EXPECT_THAT(message_of([&] { pipeline(*model(text), options); }), HasSubstr("split points and a split policy"));
}

TEST(Split, CutsThatLeaveNothingMakeNoStage) {
  const std::string text =
      R"(graph { %x: f32[3] = placeholder "x" plumb::pipe_split() %a = aten::neg(%x) plumb::pipe_split()
    plumb::pipe_split() pippy::_pipe_split() %b = aten::exp(%a) %l = aten::sum(%b) plumb::pipe_split() output(%l) })";
  expect_equals_whole(*model(text), {}, {randn_there({3}).requires_grad_()}, 2);
  auto pipe = pipeline(*model("graph { %x = placeholder \"x\" plumb::pipe_split() output(%x, 3, None) }"));
  EXPECT_EQ(pipe->num_stages(), 1);
  auto out = pipe->run({ones_there({2})});
  EXPECT_TRUE(out[2].isNone());
  EXPECT_EQ(out[1].toInt(), 3);
}

TEST(Split, ACutBeforeAnOperatorThatIsNotThereIsRefused) {
  const auto two = model("graph { %x: f32[3] = placeholder \"x\" %a = aten::neg(%x) %b = aten::exp(%a) output(%b) }");
  SplitOptions options;
  options.cut_before = {1, 2};
  EXPECT_EQ(pipeline(*two, options)->num_stages(), 2);
  options.cut_before = {1, 3};
  EXPECT_THAT(message_of([&] { pipeline(*two, options); }),
              HasSubstr("SplitOptions::cut_before has 3, the graph has 2 operators"));
}

TEST(Split, SkipConnectionsGoStraightToTheirUsers) {
  State state;
  at::manual_seed(0);
  for (const char* w : {"d0.w", "d1.w", "u0.w", "u1.w"}) parameter(state, w, {4, 4});
  const std::string unet = R"(graph { %x: f32[5, 4] = placeholder "x"
    %w0 = get_attr "d0.w" %a = aten::linear(%x, %w0) %s0 = aten::relu(%a) plumb::pipe_split()
    %w1 = get_attr "d1.w" %b = aten::linear(%s0, %w1) %s1 = aten::tanh(%b) plumb::pipe_split()
    %w2 = get_attr "u1.w" %c = aten::linear(%s1, %w2) %c1 = aten::mul.Tensor(%c, %s1) %c2 = aten::mul.Tensor(%c1, %s0) plumb::pipe_split()
    %w3 = get_attr "u0.w" %d = aten::linear(%c2, %w3) %d0 = aten::mul.Tensor(%d, %s0) %d1 = aten::mul.Tensor(%d0, %s0)
    %e = aten::add.Tensor(%d1, %x) %l = aten::mean(%e) output(%l, %s0) })";
  auto pipe = expect_equals_whole(*model(unet, state), {}, {randn_there({5, 4}).requires_grad_()}, 4);
  const auto& s0 = pipe->stage_outputs(0)[0];
  EXPECT_EQ(s0.name, "s0");
  EXPECT_THAT(s0.consumers, ElementsAre(PortUse{1, 0}, PortUse{2, 0}, PortUse{3, 1}));
  EXPECT_EQ(pipe->stage_outputs(3)[1].pipeline_output, 1u) << "the last stage hands the early output through";
}

TEST(Split, NumbersCrossBetweenStages) {
  const std::string text =
      R"(graph { %x: f32["s0"=5, 4] = placeholder "x" %n: int = aten::sym_size.int(%x, 0) %a = aten::neg(%x) plumb::pipe_split()
    %v = aten::view(%a, [%n, 2, 2]) %s = aten::sum(%v) output(%s, %n) })";
  auto pipe = expect_equals_whole(*model(text), {}, {randn_there({5, 4}).requires_grad_()}, 2);
  EXPECT_EQ(pipe->stage_inputs(1)[0].type, ValueType::Int);
  EXPECT_EQ(unpack_value(pack_value(c10::IValue(int64_t{1} << 60)), ValueType::Int).toInt(), int64_t{1} << 60);
  EXPECT_EQ(unpack_value(pack_value(c10::IValue(0.1)), ValueType::Float).toDouble(), 0.1);
  EXPECT_EQ(unpack_value(pack_value(c10::IValue(true)), ValueType::Bool).toBool(), true);
  EXPECT_THROW(pack_value(c10::IValue("text")), Error);
  expect_equals_whole(*model(text), {}, {randn_there({7, 4}).requires_grad_()}, 2);
}

TEST(Split, ConstantsAndCheapNodesAreTakenNotSent) {
  State state;
  state.add({"c", AttrKind::Constant, randn_there({4})});
  const std::string text =
      R"(graph { %x: f32[4] = placeholder "x" %c = get_attr "c" %k = aten::clone(%c) %i = aten::arange(4) %f = aten::add.Tensor(%i, %k)
    %a = aten::mul.Tensor(%x, %f) plumb::pipe_split() %b = aten::mul.Tensor(%a, %f) %l = aten::sum(%b) output(%l, %f) })";
  auto pipe = expect_equals_whole(*model(text, state), {}, {randn_there({4}).requires_grad_()}, 2);
  ASSERT_EQ(pipe->stage_inputs(1).size(), 1u);
  EXPECT_EQ(pipe->stage_inputs(1)[0].name, "a");
  // Random ones are drawn once and sent.
  pipe = expect_equals_whole(
      *model(R"(graph { %x: f32[4] = placeholder "x" %r = aten::rand([4]) %a = aten::mul.Tensor(%x, %r)
    plumb::pipe_split() %b = aten::mul.Tensor(%a, %r) %l = aten::sum(%b) output(%l) })"),
      {}, {randn_there({4}).requires_grad_()}, 2);
  EXPECT_EQ(pipe->stage_inputs(1).size(), 2u);
}

TEST(Split, ParametersViewedInAnEarlierStageAreNotSent) {
  State state;
  parameter(state, "w", {3, 4});
  parameter(state, "b", {3});
  const std::string text =
      R"(graph { %x: f32[5, 4] = placeholder "x" %w = get_attr "w" %b = get_attr "b" %t = aten::t(%w) %y = aten::neg(%x)
    plumb::pipe_split() %m = aten::addmm(%b, %y, %t) %l = aten::mean(%m) output(%l) })";
  auto pipe = expect_equals_whole(*model(text, state), {}, {randn_there({5, 4})}, 2);
  EXPECT_EQ(pipe->stage(0)->state().size(), 0u);
  EXPECT_EQ(pipe->stage_inputs(1).size(), 1u);
}

TEST(Split, AModuleUsedInTwoStagesIsReplicated) {
  State state;
  parameter(state, "fc.weight", {4, 4});
  const std::string text =
      R"(graph { %x: f32[5, 4] = placeholder "x" %w = get_attr "fc.weight" %a = aten::linear(%x, %w) %a1 = aten::linear(%a, %w) plumb::pipe_split()
    %b = aten::linear(%a1, %w) %b1 = aten::linear(%b, %w) plumb::pipe_split() %w2 = get_attr "fc.weight" %c = aten::linear(%b1, %w2) %l = aten::mean(%c) output(%l) })";
  for (MultiUse use : {MultiUse::Replicate, MultiUse::Transmit}) {
    SplitOptions options;
    options.multi_use = use;
    auto pipe = expect_equals_whole(*model(text, state), options, {randn_there({5, 4}).requires_grad_()}, 3);
    EXPECT_EQ(pipe->replicated_params().size(), use == MultiUse::Replicate ? 1u : 0u);
  }
}

TEST(Split, CutsBySizeCountATensorOnce) {
  State state;
  std::string text = "graph { %x: f32[2, 4] = placeholder \"x\" %w = get_attr \"w\" %v = get_attr \"v\"";
  parameter(state, "w", {4, 4});
  parameter(state, "v", {4, 4});
  std::string last = "%x";
  for (int i = 0; i < 6; ++i) {
    const std::string name = "%h" + std::to_string(i);
    text += " " + name + " = aten::linear(" + last + (i < 3 ? ", %w)" : ", %v)");
    last = name;
  }
  const auto whole = model(text + " %l = aten::sum(" + last + ") output(%l) }", state);
  EXPECT_EQ(cuts_of_equal_size(*whole, 2), std::vector<std::string>{"h3"});
  EXPECT_EQ(cuts_of_equal_size(*whole, 6).size(), 1u);
  EXPECT_EQ(cuts_at_size(*whole, 64), std::vector<std::string>{"h3"});
  EXPECT_TRUE(cuts_at_size(*whole, 128).empty());
  expect_equals_whole(*mark_before(*whole, {"h3"}), {}, {randn_there({2, 4}).requires_grad_()}, 2);
  EXPECT_THAT(message_of([&] { mark_before(*whole, {"h9"}); }), HasSubstr("no value %h9"));
  for (const std::vector<std::string>& values : {std::vector<std::string>{"h4", "h2"}, {"h3", "h3"}})
    EXPECT_THAT(message_of([&] { mark_before(*whole, values); }), HasSubstr("is not made after %h"));
  EXPECT_THAT(message_of([&] { cuts_of_equal_size(*whole, 0); }), HasSubstr("into 0 stages"));
}

TEST(Split, UnusedParametersComeBackWithTheWhole) {
  auto whole = gpt(1, false, true);
  auto pipe = pipeline(*whole);
  EXPECT_FALSE(pipe->stage(0)->state().contains("unused.weight") || pipe->stage(1)->state().contains("unused.weight"));
  auto merged = pipe->merge();
  EXPECT_NO_THROW(merged->lint());
  EXPECT_EQ(to_string(merged->graph()), to_string(whole->graph()));
  for (const Attr& attr : whole->state())
    EXPECT_TRUE(merged->state().get(attr.name).tensor.is_same(attr.tensor)) << attr.name;
}

TEST(Split, LeavesTheModuleAsItIs) {
  auto whole = gpt(2, true, true);
  const auto hash = whole->graph().hash();
  pipeline(*whole);
  EXPECT_EQ(whole->graph().hash(), hash);
  EXPECT_EQ(whole->state().size(), 30u);
}

TEST(Split, FindsTheLossInEveryStructure) {
  auto tuple = [](std::vector<c10::IValue> v) { return c10::IValue(c10::ivalue::Tuple::create(std::move(v))); };
  const TreeSpec leaf = TreeSpec::leaf(), pair = TreeSpec::tuple({leaf, leaf});
  EXPECT_EQ(find_loss_output(leaf, true), 0u);
  EXPECT_EQ(find_loss_output(pair, tuple({false, true})), 1u);
  EXPECT_EQ(find_loss_output(TreeSpec::list({pair, leaf, pair}), tuple({false, false, tuple({true, false})})), 3u);
  TreeSpec dict = TreeSpec::dict({"logits", "loss"}, {pair, leaf});
  c10::impl::GenericDict spec(c10::StringType::get(), c10::AnyType::get());
  spec.insert("loss", true);
  spec.insert("logits", false);
  EXPECT_EQ(find_loss_output(dict, spec), 2u);
  EXPECT_EQ(find_loss_by_name(dict), 2u);
  EXPECT_EQ(find_loss_by_name(pair), std::nullopt);
  EXPECT_THAT(message_of([&] { find_loss_output(pair, tuple({false, false})); }), HasSubstr("marks no output"));
  EXPECT_THAT(message_of([&] { find_loss_output(pair, tuple({true, true})); }), HasSubstr("marks 2 outputs"));
  EXPECT_THAT(message_of([&] { find_loss_output(pair, true); }), HasSubstr("says true for (*, *)"));
  EXPECT_THAT(message_of([&] { find_loss_output(dict, tuple({true, false})); }),
              HasSubstr("a sequence where the outputs are a dict"));
  EXPECT_THAT(message_of([&] { find_loss_output(pair, tuple({true})); }), HasSubstr("1 entries"));
}

}  // namespace
}  // namespace plumb
