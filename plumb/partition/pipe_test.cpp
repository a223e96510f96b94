#include "plumb/partition/pipe.h"

#include <gmock/gmock.h>

#include "plumb/operators/operator_facts.h"
#include "plumb/partition/balance.h"
#include "plumb/partition/partition_testing.h"
#include "plumb/partition/pipe_split.h"
#include "plumb/partition/stage_bytes.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

using namespace partition_testing;
using testing::HasSubstr;

c10::IValue first_of_two() { return c10::ivalue::Tuple::create({c10::IValue(true), c10::IValue(false)}); }

TEST(Pipe, TakesStructuredCallsAsTheWholeDoes) {
  const TreeSpec in =
      TreeSpec::tuple({TreeSpec::tuple({TreeSpec::leaf()}), TreeSpec::dict({"scale"}, {TreeSpec::leaf()})});
  GraphModule m(
      parse_graph(
          R"(graph { %x: f32[2] = placeholder "x" %s: f32[] = placeholder "scale" %a = aten::neg(%x) plumb::pipe_split() %y = aten::mul.Tensor(%a, %s) output(%y, %a) })"),
      State(), in, TreeSpec::dict({"y", "a"}, {TreeSpec::leaf(), TreeSpec::leaf()}));
  auto pipe = pipeline(m);
  EXPECT_EQ(pipe->num_stages(), 2);
  auto out = pipe->forward({ones_there({2})}, {{"scale", at::full({}, 4.0f)}}).toGenericDict();
  EXPECT_EQ(out.at("y").toTensor().sum().item<double>(), -8.0);
  EXPECT_THAT(message_of([&] { pipe->forward({ones_there({2})}); }), HasSubstr("'scale' is missing"));
  EXPECT_THAT(message_of([&] { pipe->forward({ones_there({3})}, {{"scale", ones_there({})}}); }),
              HasSubstr("input 'x' should be f32[2]"));
  EXPECT_THAT(message_of([&] { pipe->run({ones_there({2})}); }), HasSubstr("takes 2 inputs, got 1"));
  EXPECT_THAT(message_of([&] { pipe->stage(2); }), HasSubstr("no stage 2, it has 2"));
  EXPECT_THAT(message_of([&] { pipe->with_stages({pipe->stage(0), nullptr}); }), HasSubstr("a null pointer"));
  EXPECT_THAT(message_of([&] { pipe->run_with_backward({}); }), HasSubstr("no loss"));
  EXPECT_FALSE(pipe->has_loss_and_backward());
}

TEST(Pipe, CanBeUsedAfterItWasMoved) {
  auto pipe = pipeline(*gpt(1, true, true));
  const at::Tensor wanted = pipe->run(gpt_inputs())[0].toTensor();
  const Pipe moved(std::move(*pipe));
  EXPECT_TRUE(same(moved.run(gpt_inputs())[0].toTensor(), wanted));
  EXPECT_TRUE(same(pipe->run(gpt_inputs())[0].toTensor(), wanted));
  EXPECT_EQ(pipe->merge()->state().size(), moved.merge()->state().size());
  EXPECT_EQ(pipe->print_readable(), moved.print_readable());
}

TEST(Pipe, ForwardTrainsThroughAllStages) {
  auto whole = gpt(2, false, true);
  auto pipe = pipeline(*whole);
  auto loss = pipe->run(gpt_inputs())[0].toTensor();
  loss.backward();
  EXPECT_TRUE(pipe->stage(0)->state().get("tok.weight").tensor.grad().defined());
  EXPECT_TRUE(pipe->stage(0)->state().get("tok.weight").tensor.is_same(whole->state().get("tok.weight").tensor));
  EXPECT_EQ(pipe->parameters().size(), whole->state().size() - 1) << "all but the unused one";
}

TEST(Pipe, RunsTheWorkOfAnyCallerOfTheTable) {
  // Runs stages by the table alone, as a runtime does.
  auto whole = gpt(3, false, true);
  auto pipe = pipeline(*whole);
  const PipeTable& table = pipe->table();
  const auto inputs = gpt_inputs();
  std::vector<std::vector<c10::IValue>> made;
  for (int s = 0; s < table.num_stages(); ++s) {
    std::vector<c10::IValue> in;
    for (const auto& port : table.stages[s].inputs) {
      in.push_back(port.source.is_model_input() ? inputs[port.source.index]
                                                : made[port.source.stage][port.source.index]);
    }
    made.push_back(pipe->stage(s)->run(in));
  }
  const auto expected = whole->run(inputs);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(same(expected[i].toTensor(), made.back()[*table.outputs[i].port].toTensor()));
}

TEST(Pipe, StagesThatDoNotReachTheLossHaveNoBackward) {
  SplitOptions options;
  options.loss_spec = first_of_two();
  auto pipe = pipeline(
      *model(
          R"(graph { %x: f32[4] = placeholder "x" %y: f32[4] = placeholder "y" %a: i64[4] = aten::to.dtype(%x, torch.int64) plumb::pipe_split()
    %b = aten::mul.Tensor(%a, %y) %l = aten::sum(%b) output(%l, %b) })"),
      options);
  auto result = pipe->run_with_backward({ones_there({4}).requires_grad_(), ones_there({4}).requires_grad_()});
  EXPECT_FALSE(result.input_grads[0].defined());
  EXPECT_TRUE(result.input_grads[1].defined());
}

TEST(Pipe, BackwardNeedsALossThatRequiresAGradient) {
  SplitOptions options;
  options.loss_spec = first_of_two();
  auto pipe = pipeline(*gpt(1, false, true), options);
  {
    at::NoGradGuard guard;
    EXPECT_THAT(message_of([&] { pipe->run_with_backward(gpt_inputs()); }),
                HasSubstr("%loss, is no tensor of one element that requires a gradient"));
  }
  auto constant = model("graph { %x = placeholder \"x\" output(3, %x) }");
  EXPECT_THAT(message_of([&] { pipeline(*constant, options); }), HasSubstr("the loss is a constant"));
}

TEST(Pipe, GradientsAddToThoseThatAreThere) {
  SplitOptions options;
  options.loss_spec = first_of_two();
  auto whole = gpt(1, true, true);
  auto pipe = pipeline(*whole->deep_copy(), options);
  for (int i = 0; i < 3; ++i) {
    whole->run(gpt_inputs())[0].toTensor().backward();
    pipe->run_with_backward(gpt_inputs());
  }
  for (const Attr& attr : pipe->merge_state_dict())
    EXPECT_TRUE(same(attr.tensor.grad(), whole->state().get(attr.name).tensor.grad())) << attr.name;
}

TEST(Pipe, MovesStagesWithTheirDeviceArguments) {
  State state;
  parameter(state, "w", {4, 4});
  state.add({"v", AttrKind::Parameter, state.get("w").tensor});
  const std::string text =
      R"(graph { %x: f32[4, 4] = placeholder "x" %w = get_attr "w" %v = get_attr "v" %o = aten::rand([4, 4], device=device("cpu")) %z = aten::rand([4, 4])
    %like = aten::rand_like(%x) %a: f32[4, 4] = aten::linear(%x, %w) %b = aten::add.Tensor(%a, %o) %c = aten::add.Tensor(%b, %z) %d = aten::linear(%c, %v)
    %e = aten::to.device(%d, device("cpu"), torch.float32) %f = aten::add.Tensor(%e, %like) plumb::pipe_split() %l = aten::sum(%f) output(%l) })";
  auto pipe = pipeline(*model(text, state));
  pipe->move_stage(0, at::kMeta);
  const auto& moved = pipe->stage(0)->state();
  EXPECT_TRUE(moved.get("w").tensor.is_meta() && moved.get("w").tensor.requires_grad());
  EXPECT_TRUE(moved.get("w").tensor.is_same(moved.get("v").tensor)) << "tied weights stay tied";
  EXPECT_EQ(pipe->stage_inputs(0)[0].meta->device, at::Device(at::kMeta));
  const auto out = pipe->stage(0)->run({at::ones({4, 4}, at::kMeta)});
  EXPECT_TRUE(out[0].toTensor().is_meta());
  EXPECT_THAT(pipe->stage_text(0), testing::Not(HasSubstr("\"cpu\"")));
  EXPECT_THAT(pipe->stage_text(0), HasSubstr("aten::rand_like(%x)")) << "it follows its input";
  EXPECT_TRUE(pipe->stage(0)->named_parameters()["w"].is_meta());
}

TEST(StageBytes, AStageComesBackWhole) {
  SplitOptions options;
  options.loss_spec = first_of_two();
  auto whole = gpt(2, true, true, true);
  auto pipe = pipeline(*whole, options);
  const auto inputs = gpt_inputs();
  std::vector<std::vector<c10::IValue>> made;
  for (int s = 0; s < pipe->num_stages(); ++s) {
    StagePackage package = deserialize_stage(serialize_stage(*pipe, s));
    EXPECT_EQ(package.index, s);
    EXPECT_EQ(to_string(package.module->graph()), pipe->stage_text(s));
    EXPECT_EQ(package.table.stages, pipe->table().stages);
    EXPECT_EQ(package.table.replicated, pipe->table().replicated);
    EXPECT_EQ(package.table.loss_output, 0u);
    EXPECT_EQ(package.input_names, (std::vector<std::string>{"ids", "targets"}));
    for (const Attr& attr : pipe->stage(s)->state()) {
      const Attr& back = package.module->state().get(attr.name);
      EXPECT_TRUE(same(attr.tensor.detach(), back.tensor.detach()) &&
                  back.tensor.requires_grad() == attr.tensor.requires_grad())
          << attr.name;
    }
    std::vector<c10::IValue> in;
    for (const auto& port : package.table.stages[s].inputs) {
      in.push_back(port.source.is_model_input() ? inputs[port.source.index]
                                                : made[port.source.stage][port.source.index]);
    }
    made.push_back(package.module->run(in));
  }
  EXPECT_TRUE(same(whole->run(inputs)[0].toTensor(), made.back()[0].toTensor()));
}

TEST(StageBytes, KeepsTiesStridesAndTypes) {
  State state;
  at::Tensor w = randn_there({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  state.add({"a", AttrKind::Parameter, w});
  state.add({"b", AttrKind::Parameter, w});
  state.add({"t", AttrKind::Buffer, randn_there({3, 4}).t(), false});
  state.add({"e", AttrKind::Buffer, ones_there({2, 1}).expand({2, 3})});
  state.add({"i", AttrKind::Constant, there(at::arange(3))});
  state.add({"z", AttrKind::Buffer, zeros_there({0, 4}, at::kBFloat16)});
  auto pipe = pipeline(
      *model("graph { %x = placeholder \"x\" %a = get_attr \"a\" %b = get_attr \"b\" %t = get_attr \"t\" %e = get_attr "
             "\"e\" %i = get_attr \"i\" %z = get_attr \"z\" output(%x, %a, %b, %t, %e, %i, %z, None, nan, inf) }",
             state));
  StagePackage back = deserialize_stage(serialize_stage(*pipe, 0));
  const State& s = back.module->state();
  EXPECT_TRUE(s.get("a").tensor.is_same(s.get("b").tensor));
  EXPECT_EQ(s.get("a").tensor.strides(), w.strides());
  EXPECT_EQ(s.get("t").tensor.strides(), state.get("t").tensor.strides());
  EXPECT_FALSE(s.get("t").persistent);
  for (const Attr& attr : state) EXPECT_TRUE(same(attr.tensor.detach(), s.get(attr.name).tensor.detach())) << attr.name;
  EXPECT_TRUE(std::isnan(back.table.outputs[8].constant.toDouble()));
  EXPECT_EQ(back.table.outputs[9].constant.toDouble(), std::numeric_limits<double>::infinity());
}

TEST(StageBytes, StagesTheirCopiesAndTheirBytesKeepTagsOfParameters) {
  auto whole = gpt(2, true, true);
  const ParameterData embedding{MupType::Weight, std::nullopt}, up{MupType::Weight, 4, 48};
  const auto names = whole->state().names(AttrKind::Parameter);
  const std::string deep =
      *std::find_if(names.begin(), names.end(), [](const std::string& n) { return n.ends_with(".1.up.weight"); });
  tag(whole->state().get(names[0]).tensor, embedding);
  tag(whole->state().get(deep).tensor, up);
  auto pipe = pipeline(*whole);
  ASSERT_FALSE(pipe->replicated_params().empty()) << "the embedding has a copy in the last stage";
  for (const auto& [stage, name] : pipe->replicated_params()[0]) {
    EXPECT_EQ(parameter_data(pipe->stage(stage)->state().get(name).tensor), embedding) << "stage " << stage;
    const StagePackage back = deserialize_stage(serialize_stage(*pipe, stage));
    EXPECT_EQ(parameter_data(back.module->state().get(name).tensor), embedding) << "bytes of stage " << stage;
  }
  for (int s = 0; s < pipe->num_stages(); ++s) {
    if (!pipe->stage(s)->state().contains(deep)) continue;
    const StagePackage back = deserialize_stage(serialize_stage(*pipe, s));
    EXPECT_EQ(parameter_data(back.module->state().get(deep).tensor), up);
    pipe->move_stage(s, at::kMeta);
    EXPECT_EQ(parameter_data(pipe->stage(s)->state().get(deep).tensor), up) << "moved";
  }
}

TEST(StageBytes, RefuseOperatorsThatAreNoTensorArithmetic) {
  for (const char* call : {"aten::from_file(\"/etc/passwd\", False, 2)",
                           "aten::from_file.out(\"/tmp/x\", True, 2, out=%x)", "aten::set_.source_Tensor(%x, %x)"}) {
    GraphModule module(
        parse_trusted_graph("graph { %x: f32[2] = placeholder \"x\" %y = " + std::string(call) + " output(%y) }"),
        State(), TreeSpec::positional_inputs(1), TreeSpec::leaf());
    const std::string bytes = serialize_stage(*pipeline(module), 0);
    EXPECT_THAT(message_of([&] { deserialize_stage(bytes); }), HasSubstr("may not stand in a file")) << call;
  }
}

TEST(StageBytes, StagesAndTheirBytesKeepTheModeThatTheForwardReads) {
  auto whole = gpt(2, true, true);
  whole->set_made_in_training(false);
  whole->set_mode_read_at("model.py:3");
  auto pipe = pipeline(*whole);
  const StagePackage back = deserialize_stage(serialize_stage(*pipe, 0));
  for (const auto& module : {pipe->stage(0), back.module, pipe->merge()}) {
    EXPECT_FALSE(module->is_training());
    EXPECT_THAT(message_of([&] { module->train(); }),
                testing::AllOf(HasSubstr("cannot change to"), HasSubstr("model.py:3")));
  }
  whole->set_made_in_training(true);
  whole->set_mode_read_at("");
  deserialize_stage(serialize_stage(*pipeline(*whole), 0)).module->eval();
}

TEST(StageBytes, RefuseHeadersThatAreNestedDeep) {
  const std::string good = serialize_stage(*pipeline(*gpt(1, false, true)), 0);
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  auto with_version = [&](const std::string& version) {
    const std::string header = "{\"version\": " + version + "}";
    const uint64_t length = header.size();
    return good.substr(0, 8) + std::string(reinterpret_cast<const char*>(&length), sizeof length) + header;
  };
  EXPECT_THAT(message_of([&] { deserialize_stage(with_version(deep)); }), HasSubstr("nested deeper"));
  EXPECT_THAT(message_of([&] { deserialize_stage(with_version("7")); }), HasSubstr("unknown version 7"));
  EXPECT_THAT(message_of([&] { PipeTable::from_json("{\"version\": " + deep + "}"); }), HasSubstr("nested deeper"));
  EXPECT_THAT(message_of([&] { TreeSpec::from_json("[1, " + deep + "]"); }), HasSubstr("nested deeper"));
}

TEST(StageBytes, RefusesBytesThatAreNoStage) {
  auto pipe = pipeline(*gpt(1, false, true));
  const std::string good = serialize_stage(*pipe, 1);
  EXPECT_THAT(message_of([&] { deserialize_stage(""); }), HasSubstr("no pipeline stage"));
  EXPECT_THAT(message_of([&] { deserialize_stage(good.substr(0, good.size() - 1)); }), HasSubstr("cut off"));
  EXPECT_THAT(message_of([&] { deserialize_stage(good + "x"); }), HasSubstr("left over"));
  // Every truncation and many flipped bytes of the header: an error or a stage, never anything else.
  const size_t header = good.find("\"version\"") + 40;
  for (size_t n = 0; n < header; n += 7) EXPECT_THROW(deserialize_stage(good.substr(0, n)), Error);
  at::manual_seed(0);
  for (int i = 0; i < 300; ++i) {
    std::string bad = good;
    bad[at::randint(static_cast<int64_t>(bad.size()), {1}).item<int64_t>()] ^= static_cast<char>(1 << (i % 8));
    try {
      deserialize_stage(bad);
    } catch (const Error&) {
    }
  }
  pipe->move_stage(1, at::kMeta);
  EXPECT_THAT(message_of([&] { serialize_stage(*pipe, 1); }), HasSubstr("meta device"));
}

}  // namespace
}  // namespace plumb
