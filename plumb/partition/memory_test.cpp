// Cuts through memory that is written.
#include <gmock/gmock.h>

#include "plumb/partition/assign.h"
#include "plumb/partition/partition_testing.h"

namespace plumb {
namespace {

using namespace partition_testing;
using testing::HasSubstr;

SplitOptions refuse() {
  SplitOptions options;
  options.at_conflict = AtConflict::Refuse;
  return options;
}

std::vector<c10::IValue> x34() {
  at::manual_seed(1);
  return {randn_there({3, 4}).requires_grad_()};
}

TEST(Memory, AnInPlaceOperatorMayBeginAStage) {
  auto pipe = expect_equals_whole(
      *model(R"(graph { %x: f32[3, 4] = placeholder "x" %a = aten::mul.Tensor(%x, 3) plumb::pipe_split()
    %r = aten::relu_(%a) %m = aten::mul.Tensor(%r, %a) plumb::pipe_split() %n = aten::mul.Tensor(%a, %m) %l = aten::sum(%n) output(%l, %a) })"),
      refuse(), x34(), 3);
  EXPECT_TRUE(pipe->stage_inputs(1)[0].written);
  EXPECT_FALSE(pipe->stage_inputs(2)[0].written);
  EXPECT_EQ(pipe->stage_inputs(2)[0].source.stage, 1) << "after the write the value is the writer's";
}

TEST(Memory, RenamingAfterWritesFollowsChains) {
  Graph g = parse_graph(
      R"(graph { %x = placeholder "x" %a = aten::neg(%x) %r = aten::relu_(%a) %s = aten::mul_.Tensor(%a, 2) %t = aten::add.Tensor(%a, %r) output(%t, %a) })");
  EXPECT_TRUE(rename_after_writes(g));
  EXPECT_EQ(g.find_value("s")->producer()->input(0)->name(), "r");
  EXPECT_EQ(g.find_value("t")->producer()->input(0)->name(), "s");
  EXPECT_EQ(g.find_value("t")->producer()->input(1)->name(), "s");
  EXPECT_EQ(g.output_node()->input(1)->name(), "s");
  EXPECT_FALSE(rename_after_writes(g));
}

TEST(Memory, AViewOfWhatALaterStageWritesIsFound) {
  // %v shares %a's memory, stage 1 writes %a, stage 2 reads %v: it must see the write.
  const std::string text =
      R"(graph { %x: f32[3, 4] = placeholder "x" %a = aten::mul.Tensor(%x, 3) %v = aten::view(%a, [12]) plumb::pipe_split()
    %r = aten::mul_.Tensor(%a, 2) %m = aten::mean(%r) plumb::pipe_split() %n = aten::mul.Tensor(%v, %m) %l = aten::sum(%n) output(%l) })";
  const std::string error = message_of([&] { pipeline(*model(text), refuse()); });
  EXPECT_THAT(error, HasSubstr("node %r (aten::mul_.Tensor), which writes memory, from node %n (aten::mul.Tensor)"));
  auto pipe = expect_equals_whole(*model(text), {}, x34(), 3);
  EXPECT_THAT(pipe->notes(), testing::Contains(HasSubstr("a cut was moved to before")));
}

TEST(Memory, TwoViewsOfOneMemoryDoNotArriveApartWhereItIsWritten) {
  const std::string text =
      R"(graph { %x: f32[3, 4] = placeholder "x" %a = aten::mul.Tensor(%x, 3) %v = aten::view(%a, [12]) %y = aten::neg(%x) plumb::pipe_split()
    %r = aten::mul_.Tensor(%a, 2) %n = aten::mul.Tensor(%v, 5) %m = aten::mean(%n) %l = aten::mul.Tensor(%m, %m) output(%l, %r, %y) })";
  EXPECT_THAT(message_of([&] { pipeline(*model(text), refuse()); }), HasSubstr("share memory and would arrive apart"));
}

TEST(Memory, ViewsNobodyWritesMayCross) {
  auto pipe = expect_equals_whole(
      *model(
          R"(graph { %x: f32[3, 4] = placeholder "x" %a = aten::mul.Tensor(%x, 3) %t = aten::t(%a) [%c, %d] = aten::split.Tensor(%t, 2) plumb::pipe_split()
    %m = aten::mul.Tensor(%c, %d) %mm = aten::mm(%m, %a) %l = aten::sum(%mm) output(%l, %t) })"),
      refuse(), x34(), 2);
  EXPECT_EQ(pipe->stage_inputs(1).size(), 4u);
}

TEST(Memory, WritesThroughAViewInOneStageAreFine) {
  expect_equals_whole(
      *model(
          R"(graph { %x: f32[3, 4] = placeholder "x" %a = aten::mul.Tensor(%x, 3) %s = aten::select.int(%a, 0, 1) %w = aten::mul_.Tensor(%s, 2) plumb::pipe_split()
    %m = aten::mul.Tensor(%a, %a) %l = aten::sum(%m) output(%l) })"),
      refuse(), x34(), 2);
}

TEST(Memory, AWrittenInputUsedLaterIsFound) {
  // Stage 0 writes the input through a view, stage 1 reads the input.
  const std::string text =
      R"(graph { %x: f32[3, 4] = placeholder "x" %w: f32[3, 4] = placeholder "w" %s = aten::select.int(%x, 0, 1) %z = aten::zero_(%s) %a = aten::mul.Tensor(%w, 2)
    plumb::pipe_split() %m = aten::mul.Tensor(%a, %x) %l = aten::sum(%m) output(%l) })";
  EXPECT_THAT(message_of([&] { pipeline(*model(text), refuse()); }), HasSubstr("as it was before the write"));
  at::manual_seed(2);
  auto pipe = expect_equals_whole(*model(text), {}, {randn_there({3, 4}), randn_there({3, 4}).requires_grad_()}, 2);
  EXPECT_EQ(pipe->notes().size(), 1u);
}

State norm_state(const std::string& prefix) {
  State state;
  state.add({prefix + ".weight", AttrKind::Parameter, ones_there({4}).requires_grad_()});
  state.add({prefix + ".bias", AttrKind::Parameter, zeros_there({4}).requires_grad_()});
  state.add({prefix + ".running_mean", AttrKind::Buffer, zeros_there({4})});
  state.add({prefix + ".running_var", AttrKind::Buffer, ones_there({4})});
  state.add({prefix + ".num_batches_tracked", AttrKind::Buffer, zeros_there({}, at::kLong)});
  return state;
}

std::string norm(const std::string& prefix, const std::string& in, const std::string& out) {
  const std::string p = "%" + out;
  return p + "w = get_attr \"" + prefix + ".weight\" " + p + "b = get_attr \"" + prefix + ".bias\" " + p +
         "m = get_attr \"" + prefix + ".running_mean\" " + p + "v = get_attr \"" + prefix + ".running_var\" " + p +
         "n = get_attr \"" + prefix + ".num_batches_tracked\" " + p + "n1 = aten::add_.Tensor(" + p + "n, 1) " + p +
         " = aten::batch_norm(%" + in + ", " + p + "w, " + p + "b, " + p + "m, " + p + "v, True, 0.1, 1e-5, False)\n";
}

TEST(Memory, BatchNormBuffersAreWrittenInTheirStage) {
  State state = norm_state("bn1");
  for (const Attr& attr : norm_state("bn2")) state.add(attr);
  const std::string text = "graph { %x: f32[3, 4] = placeholder \"x\" " + norm("bn1", "x", "a") +
                           "plumb::pipe_split() %r = aten::relu_(%a) " + norm("bn2", "r", "b") +
                           "%s = aten::mul.Tensor(%b, %b) %l = aten::sum(%s) output(%l) }";
  auto pipe = expect_equals_whole(*model(text, state), refuse(), x34(), 2);
  EXPECT_EQ(pipe->stage(0)->state().size(), 5u);
  EXPECT_EQ(pipe->stage(1)->state().get("bn2.num_batches_tracked").tensor.item<int64_t>(), 3);
}

TEST(Memory, BatchNormUsedInTwoStagesIsRefused) {
  const std::string text = "graph { %x: f32[3, 4] = placeholder \"x\" " + norm("bn", "x", "a") +
                           "plumb::pipe_split() %r = aten::relu(%a) " + norm("bn", "r", "b") +
                           "%s = aten::mul.Tensor(%b, %b) %l = aten::sum(%s) output(%l) }";
  EXPECT_THAT(message_of([&] { pipeline(*model(text, norm_state("bn")), refuse()); }),
              HasSubstr("can live in one stage only"));
}

TEST(Memory, ACutMovesToTheFartherSideIfAStageVanishesAtTheNearer) {
  // One stage reads the buffer's old value, the next writes it: both belong into one.
  State state;
  state.add({"history", AttrKind::Buffer, ones_there({3, 4})});
  const std::string text =
      R"(graph { %x: f32[3, 4] = placeholder "x" %h = get_attr "history" %y = aten::sin(%x) plumb::pipe_split()
    %old = aten::clone(%h) %z = aten::cos(%y) plumb::pipe_split() %d = aten::detach(%z) %n = aten::neg(%d)
    %w = aten::copy_(%h, %n) %s = aten::add.Tensor(%z, %old) %l = aten::sum(%s) output(%l) })";
  EXPECT_THAT(message_of([&] { pipeline(*model(text, state), refuse()); }), HasSubstr("can live in one stage only"));
  auto pipe = expect_equals_whole(*model(text, state), {}, x34(), 3);
  EXPECT_THAT(pipe->notes(), testing::Contains(HasSubstr("a cut was moved to before")));
}

TEST(Memory, ABufferThatIsSentIsSentAsItWas) {
  State state;
  state.add({"count", AttrKind::Buffer, zeros_there({4})});
  const std::string text =
      R"(graph { %x: f32[3, 4] = placeholder "x" %c = get_attr "count" %c1 = aten::add_.Tensor(%c, 1) %a = aten::mul.Tensor(%x, %c1) plumb::pipe_split()
    %m = aten::mul.Tensor(%a, %c1) %l = aten::sum(%m) output(%l) })";
  auto pipe = expect_equals_whole(*model(text, state), refuse(), x34(), 2);
  const auto sent = pipe->stage(0)->run({ones_there({3, 4})});
  for (const auto& v : sent) {
    EXPECT_FALSE(v.toTensor().is_alias_of(pipe->stage(0)->state().get("count").tensor))
        << "the next microbatch would change it on its way";
  }
}

}  // namespace
}  // namespace plumb
