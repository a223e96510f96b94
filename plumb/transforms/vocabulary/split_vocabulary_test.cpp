#include "plumb/transforms/vocabulary/split_vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "tests/gpt_graph.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using testing_models::module_of;
using testing_models::parameter;

// A head of 11 words on (2, 3, 4) inputs and its loss. `change`: replaces a text of the graph by another.
std::shared_ptr<GraphModule> head(const std::string& from = "", const std::string& to = "") {
  std::string text = R"(graph {
    %x: f32[2, 3, 4] = placeholder "x"
    %targets: i64[6] = placeholder "targets"
    %w = get_attr "head.weight"
    %b = get_attr "head.bias"
    %h: f32[2, 3, 4] = aten::tanh(%x)
    %logits: f32[2, 3, 11] = aten::linear(%h, %w, %b)
    %flat: f32[6, 11] = aten::view(%logits, [-1, 11])
    %loss: f32[] = aten::cross_entropy_loss(%flat, %targets)
    output(%loss)
  })";
  if (!from.empty()) text.replace(text.find(from), from.size(), to);
  at::manual_seed(0);
  State state;
  parameter(state, "head.weight", at::randn({11, 4}));
  parameter(state, "head.bias", at::randn({11}));
  return module_of(text, std::move(state));
}

at::Tensor x() {
  at::manual_seed(1);
  return there(at::randn({2, 3, 4})).requires_grad_();
}
at::Tensor targets() { return there(at::tensor({0, 10, 4, -100, 5, 3}, at::kLong)); }

TEST(SplitVocabulary, KeepsLossAndGradientsUpToRounding) {
  for (const int parts : {2, 3, 4, 11}) {
    const auto whole = head();
    const auto divided = split_vocabulary(whole, parts);
    EXPECT_EQ(divided->reports.back().count(ReportKind::Replaced), 1U);
    EXPECT_EQ(divided->state().size(), 2U * static_cast<size_t>(parts));
    const at::Tensor a = x(), b = x();
    const at::Tensor want = (*whole)(a, targets()), have = (*divided)(b, targets());
    EXPECT_TRUE(at::allclose(want, have, 1e-6, 1e-6)) << parts;
    want.backward();
    have.backward();
    EXPECT_TRUE(at::allclose(a.grad(), b.grad(), 1e-5, 1e-7)) << parts;
    State gradients;
    for (const Attr& attr : divided->state()) gradients.add({attr.name, AttrKind::Parameter, attr.tensor.grad()});
    for (const Attr& attr : join_vocabulary(gradients))
      EXPECT_TRUE(at::allclose(whole->state().get(attr.name).tensor.grad(), attr.tensor, 1e-5, 1e-7)) << attr.name;
  }
}

TEST(SplitVocabulary, PartsOfAParameterAreItsRowsAndComeTogetherAgain) {
  const auto whole = head();
  const auto divided = split_vocabulary(whole, 3);
  std::vector<std::string> names;
  for (const Attr& attr : divided->state()) names.push_back(attr.name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("head.weight[0:3]", "head.weight[3:7]", "head.weight[7:11]",
                                                     "head.bias[0:3]", "head.bias[3:7]", "head.bias[7:11]"));
  const State joined = join_vocabulary(divided->state());
  EXPECT_EQ(joined.names(AttrKind::Parameter), whole->state().names(AttrKind::Parameter));
  for (const Attr& attr : joined) EXPECT_TRUE(at::equal(attr.tensor, whole->state().get(attr.name).tensor));
}

TEST(SplitVocabulary, RowsThatAreMissingAreNamed) {
  const auto divided = split_vocabulary(head(), 3);
  State some;
  for (const Attr& attr : divided->state()) {
    if (attr.name != "head.weight[3:7]") some.add(attr);
  }
  EXPECT_THAT(message_of([&] { join_vocabulary(some); }), HasSubstr("head.weight: its rows 3 to 7 are missing"));
}

TEST(SplitVocabulary, ATargetThatIsNoWordIsNoNumber) {
  const at::Tensor wrong = there(at::tensor({0, 11, 4, 1, 5, 3}, at::kLong));
  EXPECT_TRUE(at::isnan((*split_vocabulary(head(), 2))(x(), wrong)).item<bool>());
}

TEST(SplitVocabulary, LeavesAloneWhatItCannotDivideAndSaysWhy) {
  const auto reason = [](const std::shared_ptr<GraphModule>& module) {
    const auto same = split_vocabulary(module, 2);
    EXPECT_EQ(to_string(same->graph()), to_string(module->graph()));
    return same->reports.back().to_text();
  };
  EXPECT_THAT(reason(head("output(%loss)", "output(%loss, %logits)")), HasSubstr("something else reads the logits"));
  EXPECT_THAT(reason(head("output(%loss)", "output(%loss, %w)")), HasSubstr("its weight has other users"));
  EXPECT_THAT(reason(head("%flat, %targets)", "%flat, %targets, None, 1, -100, 0.1)")),
              HasSubstr("smooths its labels"));
  EXPECT_THAT(reason(head("aten::linear(%h, %w, %b)", "aten::relu(%h)")), HasSubstr("not from a linear layer"));
  EXPECT_THAT(reason(head("aten::linear(%h, %w, %b)", "aten::linear(3, %w, %b)")), HasSubstr("that of a number"));
  EXPECT_THAT(reason(head("%flat, %targets)", "3, %targets)")), HasSubstr("the loss of a number"));
  EXPECT_THAT(reason(head("aten::linear(%h, %w, %b)", "aten::linear(%h, %w, %b)\n%n = aten::zero_(%h)")),
              HasSubstr("memory is written between"));
  EXPECT_THAT(reason(head("aten::linear(%h, %w, %b)", "aten::linear(%h, %w, %b) no_grad")),
              HasSubstr("another grad mode"));
  EXPECT_THAT(reason(head("%flat: f32[6, 11] = aten::view(%logits, [-1, 11])",
                          "%flat: f32[11, 6] = aten::view(%logits, [11, 6])")),
              HasSubstr("its classes are not the rows of the weight"));
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{1}, {6, 11}, {}}) {
    const auto broadcast = head();
    broadcast->state().set("head.bias", at::ones(sizes).requires_grad_());
    EXPECT_THAT(reason(broadcast), HasSubstr("its bias has another size"));
  }
  EXPECT_THAT(reason(unit_scale(head())), HasSubstr("it is unit-scaled"));
  EXPECT_THAT(message_of([] { unit_scale(split_vocabulary(head(), 2)); }),
              HasSubstr("'head.weight[0:5]' is a part of a head that split_vocabulary divided"));
  EXPECT_THAT(message_of([] { split_vocabulary(head(), 1); }), HasSubstr("1 parts"));
  EXPECT_THAT(reason(head("%targets: i64[6]", "%targets: u8[6]")), HasSubstr("its targets are not int64"));
  EXPECT_FALSE(run_pass(find_pass("split_vocabulary"), *head(), {{"parts", "4294967298"}}));  // 2 in 32 bits
}

}  // namespace
}  // namespace plumb
