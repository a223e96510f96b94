#include "plumb/capture/call_recorder.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Recording {
  CaptureRequest request;
  ModuleStateGuard guard{request.state, request.inputs};
  CallRecorder recorder{request, guard};
};

TEST(CallRecorder, MakesAnUnknownTensorAConstantOnce) {
  Recording r;
  const at::Tensor c = at::ones({2});
  const int value = r.recorder.look_up(c, "aten::add");
  EXPECT_EQ(r.recorder.look_up(c, "aten::mul"), value);
  ASSERT_EQ(r.recorder.attributes.size(), 1u);
  EXPECT_EQ(r.recorder.attributes[0].name, "_constant_0");
  EXPECT_THAT(r.recorder.notes, ElementsAre(HasSubstr("first used by aten::add")));
}

TEST(CallRecorder, RefusesATensorOfUnknownPastThatCarriesAGradient) {
  Recording r;
  const at::Tensor y = at::ones({2}).requires_grad_() * 2;
  EXPECT_THAT(message_of([&] { r.recorder.look_up(y, "aten::add"); }), HasSubstr("of unknown origin"));
  EXPECT_EQ(r.recorder.refusal->kind(), ErrorKind::Capture);
}

TEST(CallRecorder, SaysByADetachThatAKnownTensorWasCutFromAutograd) {
  Recording r;
  const at::Tensor x = at::ones({2}).requires_grad_();
  r.recorder.add_input(x, x);
  const at::Tensor cut = x.variable_data();
  EXPECT_EQ(r.recorder.look_up(cut, "aten::add"), 1);
  ASSERT_EQ(r.recorder.records.size(), 1u);
  EXPECT_EQ(operator_name(r.recorder.records[0].op), "plumb::data");
}

TEST(CallRecorder, KeepsWhetherAnArgumentIsMadeOfConstantsAlone) {
  Recording r;
  const at::Tensor x = at::ones({2}), c = at::ones({2});
  r.recorder.add_input(x, x);
  bool from_constants = true;
  r.recorder.argument(c10::IValue(std::vector<at::Tensor>{c, c}), "aten::cat", from_constants);
  EXPECT_TRUE(from_constants);
  r.recorder.argument(c10::IValue(std::vector<at::Tensor>{c, x}), "aten::cat", from_constants);
  EXPECT_FALSE(from_constants);
}

TEST(CallRecorder, DropsCallsSinceAMarkAndKeepsThoseBefore) {
  Recording r;
  const at::Tensor a = at::ones({2}), b = at::ones({2});
  const int kept = r.recorder.emit("aten::alias", {RecordedArg{r.recorder.look_up(a, "")}}, at::ones({2}), true);
  const auto mark = r.recorder.mark();
  const at::Tensor gone = at::ones({2});
  r.recorder.emit("aten::alias", {RecordedArg{kept}}, gone, true);
  r.recorder.drop_since(mark);
  EXPECT_EQ(r.recorder.records.size(), 1u);
  EXPECT_EQ(r.recorder.values.find(gone).value, -1);
  EXPECT_NE(r.recorder.producer(RecordedArg{kept}), nullptr);
}

TEST(CallRecorder, RefusesATensorMadeToRequireGradInside) {
  Recording r;
  const at::Tensor x = at::ones({2});
  r.recorder.emit("aten::alias", {RecordedArg{r.recorder.look_up(x, "")}}, x, false);
  const at::Tensor source = at::ones({2}).requires_grad_();
  x.mul_(source);
  EXPECT_THAT(message_of([&] { r.recorder.look_up(x, "aten::add"); }), HasSubstr("made to require grad inside"));
}

TEST(CallRecorder, RefusesGeneratorsAndStorages) {
  Recording r;
  bool from_constants = true;
  const c10::IValue generator(at::detail::createCPUGenerator());
  EXPECT_THAT(message_of([&] { r.recorder.argument(generator, "aten::rand", from_constants); }),
              HasSubstr("random generator of its own"));
  const c10::IValue storage(at::ones({2}).storage());
  EXPECT_THAT(message_of([&] { r.recorder.argument(storage, "aten::set_", from_constants); }),
              HasSubstr("raw storage"));
}

TEST(CallRecorder, RefusesNamingModuleAndLine) {
  Recording r;
  r.request.locate = [] { return std::make_shared<const SourceLocation>(SourceLocation{"net.py", 3, "forward"}); };
  r.request.in_library = [](const SourceLocation& at) { return at.file == "net.py"; };
  r.recorder.module_stack = {{"layers.0", "Gate"}};
  EXPECT_THAT(message_of([&] { r.recorder.refuse("it branches", "do not", ErrorKind::DataDependent); }),
              HasSubstr("it branches\n  at: layers.0 (net.py:3"));
  EXPECT_TRUE(r.recorder.refused_in_library);
  EXPECT_EQ(r.recorder.refusal->kind(), ErrorKind::DataDependent);
}

// Captures a function of a [2, 2] tensor, and holds a replay against it. Returns the text of the error, if any.
std::string verified(const std::function<at::Tensor(at::Tensor)>& function) {
  torch::nn::Module none;
  return message_of([&] { capture_call(none, function, {.verify = true}, at::rand({2, 2})); });
}

at::Tensor filled_by_accessor(at::Tensor made) {
  made.accessor<float, 2>()[0][1] = 3;
  return made;
}

TEST(SeenMemory, OfTheResultOfAnOperatorIsNotToBeWrittenByAnAccessor) {
  const auto refused = HasSubstr("written outside of torch's sight");
  EXPECT_THAT(verified([](at::Tensor x) { return x * filled_by_accessor(at::zeros({2, 2})); }), refused);
  EXPECT_THAT(verified([](at::Tensor x) { return x * filled_by_accessor(at::ones_like(x)).t(); }), refused);
  EXPECT_THAT(verified([](at::Tensor x) { return filled_by_accessor(x.detach() * 2); }), refused) << "an output";
}

TEST(SeenMemory, MayBeWrittenByOperators) {
  EXPECT_EQ(verified([](at::Tensor x) {
              at::Tensor mask = at::zeros({2, 2});
              mask.select(0, 1).fill_(2);
              mask.view({-1}).detach().mul_(3);
              return x * mask + mask.t();
            }),
            "no error");
  EXPECT_EQ(verified([](at::Tensor x) { return x * torch::tensor({{1.F, 2.F}}); }), "no error");
}

TEST(CallRecorder, CopiesWhatTheForwardMakesOfMemoryOfItsOwn) {
  const auto forward = [](at::Tensor x) {
    std::vector<float> row{1, 2};
    const at::Tensor made = torch::from_blob(row.data(), {2}).mul_(3);
    const at::Tensor y = x * made;
    row = {7, 7};  // as memory that is given back has other values
    return y;
  };
  torch::nn::Module none;
  std::vector<std::string> notes;
  const auto graph = capture_call(none, forward, {.notes = &notes}, at::ones({2}));
  for (int run = 0; run < 2; ++run) EXPECT_TRUE(at::equal((*graph)(at::ones({2})), at::tensor({3.F, 6.F})));
  EXPECT_THAT(notes, ElementsAre(HasSubstr("copy of memory that no tensor owns")));
}

}  // namespace
}  // namespace plumb
