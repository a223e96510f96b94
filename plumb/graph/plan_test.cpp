#include "plumb/graph/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/graph_module.h"
#include "plumb/graph/pass.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

using testing::HasSubstr;

at::Tensor run1(const std::string& text, const State& state, std::vector<c10::IValue> inputs) {
  Graph g = parse_graph(text);
  lint(g);
  return Plan(g, state).run(std::move(inputs))[0].toTensor();
}

TEST(Plan, RunsWithGradientsEqualToEagers) {
  at::manual_seed(0);
  State state;
  at::Tensor w = at::randn({4, 3}).requires_grad_(), b = at::randn({4}).requires_grad_();
  state.add({"fc.weight", AttrKind::Parameter, w});
  state.add({"fc.bias", AttrKind::Parameter, b});
  at::Tensor x = at::randn({5, 3}).requires_grad_();
  at::Tensor y = run1(R"(graph {
    %x = placeholder "x"
    %w = get_attr "fc.weight"
    %b = get_attr "fc.bias"
    %l = aten::linear(%x, %w, %b)
    %g = aten::gelu(%l)
    %m = aten::mul.Tensor(%g, %l)
    output(%m)
  })",
                      state, {x});
  y.sum().backward();
  at::Tensor gx = x.grad().clone(), gw = w.grad().clone(), gb = b.grad().clone();
  x.mutable_grad() = w.mutable_grad() = b.mutable_grad() = at::Tensor();
  at::Tensor l = at::linear(x, w, b);
  at::Tensor eager = at::gelu(l) * l;
  eager.sum().backward();
  EXPECT_TRUE(at::equal(y, eager));
  EXPECT_TRUE(at::equal(gx, x.grad()) && at::equal(gw, w.grad()) && at::equal(gb, b.grad()));
}

TEST(Plan, TreatsANumberForATensorAsEagerTreatsAPythonNumber) {
  const std::string text =
      "graph { %x = placeholder \"x\" %m = aten::mul.Tensor(%x, 1.1) %a = aten::add.Tensor(%m, 3) output(%a) }";
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
    at::Tensor x = at::arange(7).to(dtype);
    at::Tensor y = run1(text, State(), {x}), eager = x * 1.1 + 3;
    EXPECT_EQ(y.scalar_type(), eager.scalar_type());
    EXPECT_TRUE(at::equal(y, eager)) << dtype;
  }
}

TEST(Plan, CastsANumberOnceForFloatsAndStaysEqual) {
  at::manual_seed(3);
  Graph g = parse_graph(R"(graph { %x: f32[100000] = placeholder "x"
    %a: f32[100000] = aten::mul.Tensor(%x, 1.0001) %b: f32[100000] = aten::div.Tensor(%a, 0.3)
    %c: f32[100000] = aten::sub.Tensor(%b, 1e-3, alpha=2) %d = aten::add.Tensor(%c, 7) output(%d) })");
  at::Tensor x = at::randn({100000}).requires_grad_();
  at::Tensor y = Plan(g, State()).run({x})[0].toTensor();
  y.backward(at::ones_like(y));
  at::Tensor grad = x.grad().clone();
  x.mutable_grad() = at::Tensor();
  at::Tensor eager = at::sub(x * 1.0001 / 0.3, 1e-3, 2) + 7;
  eager.backward(at::ones_like(y));
  EXPECT_TRUE(at::equal(y, eager));
  EXPECT_TRUE(at::equal(grad, x.grad()));
}

TEST(Plan, HonorsNoGradPerNodeAndTheCallersMode) {
  const std::string text =
      R"(graph { %x = placeholder "x" %a = aten::neg(%x) no_grad %b = aten::relu(%x) output(%a, %b) })";
  at::Tensor x = at::ones({2}).requires_grad_();
  Graph g = parse_graph(text);
  auto out = Plan(g, State()).run({x});
  EXPECT_FALSE(out[0].toTensor().requires_grad());
  EXPECT_TRUE(out[1].toTensor().requires_grad());
  at::NoGradGuard guard;
  out = Plan(g, State()).run({x});
  EXPECT_FALSE(out[1].toTensor().requires_grad());
  EXPECT_FALSE(at::GradMode::is_enabled());
}

TEST(Plan, DropsEveryValueAfterItsLastUse) {
  // Ten times 4 MiB in a row: only neighbors may live at once.
  Graph g;
  Value* v = g.placeholder("x")->result();
  for (int i = 0; i < 10; ++i) v = g.call("aten::neg", {v})->result();
  g.output({g.call("aten::sum", {v})->result()});
  at::NoGradGuard guard;
  at::Tensor x = at::ones({1 << 20});
  auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(x.storage().unsafeGetStorageImpl()));
  std::vector<c10::IValue> in{std::move(x)};
  x = at::Tensor();
  auto out = Plan(g, State()).run(std::move(in));
  EXPECT_TRUE(weak.expired()) << "the plan kept its input alive";
  EXPECT_EQ(out[0].toTensor().item<float>(), 1 << 20);
}

TEST(Plan, UsesOneValueTwiceInOneNode) {
  EXPECT_EQ(run1("graph { %x = placeholder \"x\" %r = aten::neg(%x) %a = aten::mul.Tensor(%r, %r) output(%a) }",
                 State(), {at::full({}, 3.0)})
                .item<double>(),
            9.0);
  EXPECT_EQ(run1("graph { %x = placeholder \"x\" %r = aten::neg(%x) %c = aten::cat([%r, %x, %r]) %s = aten::sum(%c) "
                 "output(%s) }",
                 State(), {at::ones({2})})
                .item<double>(),
            -2.0);
}

TEST(Plan, ReturnsInputsAndConstantsAsTheyAre) {
  Graph g = parse_graph("graph { %x = placeholder \"x\" output(%x, None, 3, %x) }");
  at::Tensor x = at::ones({2});
  auto out = Plan(g, State()).run({x});
  EXPECT_TRUE(out[0].toTensor().is_same(x) && out[3].toTensor().is_same(x));
  EXPECT_TRUE(out[1].isNone());
  EXPECT_EQ(out[2].toInt(), 3);
}

TEST(Plan, NamesTheNodeAndLineOfAFailure) {
  Graph g = parse_graph(R"(graph { %x = placeholder "x" %w = get_attr "fc.weight"
    %l = aten::linear(%x, %w) in "fc":"Linear" at "model.py":12:"forward" output(%l) })");
  State state;
  state.add({"fc.weight", AttrKind::Parameter, at::ones({4, 3})});
  try {
    Plan(g, state).run({at::ones({5, 7})});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("node %l (aten::linear)"));
    EXPECT_THAT(e.where(), HasSubstr("fc (model.py:12)"));
  }
  try {
    Plan(g, State());
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("'fc.weight'"));
  }
}

TEST(GraphModule, ShowsParametersUnderTheirFullNames) {
  State state;
  at::Tensor tied = at::ones({2, 2}).requires_grad_();
  state.add({"embed.weight", AttrKind::Parameter, tied});
  state.add({"layers.0.bias", AttrKind::Parameter, at::zeros({2}).requires_grad_()});
  state.add({"layers.0.mean", AttrKind::Buffer, at::zeros({2})});
  state.add({"head.weight", AttrKind::Parameter, tied});
  state.add({"scale", AttrKind::Parameter, at::ones({}).requires_grad_()});
  GraphModule m(
      parse_graph("graph { %x = placeholder \"x\" %w = get_attr \"scale\" %y = aten::mul.Tensor(%x, %w) output(%y) }"),
      state, TreeSpec::positional_inputs(1), TreeSpec::leaf());
  auto params = m.named_parameters();
  EXPECT_EQ(params.size(), 4u);
  ASSERT_TRUE(params.contains("layers.0.bias"));
  EXPECT_TRUE(params["embed.weight"].is_same(params["head.weight"]));
  EXPECT_TRUE(m.named_buffers().contains("layers.0.mean"));
  EXPECT_EQ(m(at::full({}, 3.0f)).item<float>(), 3);
  tag(tied, {MupType::Output});
  auto copy = m.deep_copy();
  EXPECT_EQ(parameter_data(copy->named_parameters()["head.weight"]), (ParameterData{MupType::Output}));
  EXPECT_FALSE(copy->named_parameters()["embed.weight"].is_same(tied));
  EXPECT_TRUE(copy->named_parameters()["embed.weight"].is_same(copy->named_parameters()["head.weight"]));
  auto clone = std::dynamic_pointer_cast<GraphModule>(m.clone());
  ASSERT_TRUE(clone);
  EXPECT_EQ(to_string(clone->graph()), to_string(m.graph()));
  EXPECT_FALSE(clone->named_parameters()["embed.weight"].is_same(tied));
  EXPECT_NO_THROW(m.lint());
  EXPECT_THROW(m.set_state({{"scale", at::zeros({})}, {"scael", at::ones({})}}), Error);
  EXPECT_EQ(m.parameters().size(), 4u);
  EXPECT_EQ(m.state().get("scale").tensor.item<float>(), 1);
}

TEST(GraphModule, ACopyOfTensorsThatOverlapHasTensorsThatOverlap) {
  const at::Tensor flat = at::arange(12.), apart = at::arange(2.);
  State state;
  state.add({"row", AttrKind::Parameter, flat.slice(0, 3, 9).requires_grad_()});
  state.add({"table", AttrKind::Buffer, flat.slice(0, 3, 9).view({2, 3}).t().detach()});
  state.add({"rest", AttrKind::Buffer, flat.slice(0, 10, 12)});
  state.add({"apart", AttrKind::Buffer, apart});
  const State copy = state.deep_copy();
  for (const Attr& attr : state) {
    const at::Tensor& twin = copy.get(attr.name).tensor;
    EXPECT_TRUE(at::equal(twin, attr.tensor) && twin.sizes() == attr.tensor.sizes()) << attr.name;
    EXPECT_EQ(twin.requires_grad(), attr.tensor.requires_grad()) << attr.name;
    EXPECT_FALSE(twin.is_alias_of(attr.tensor)) << attr.name;
  }
  copy.get("row").tensor.detach().fill_(7);
  EXPECT_TRUE(at::equal(copy.get("table").tensor, at::full({3, 2}, 7.)));
  EXPECT_TRUE(at::equal(copy.get("rest").tensor, at::arange(10., 12.)));
  EXPECT_TRUE(at::equal(flat, at::arange(12.)));
}

TEST(GraphModule, TakesAnotherBufferAndLeavesTheOneThatOthersHold) {
  State state;
  state.add({"scale", AttrKind::Buffer, at::full({}, 2.0f)});
  const at::Tensor before = state.get("scale").tensor;
  const auto make = [&] {
    return GraphModule(
        parse_graph(
            "graph { %x = placeholder \"x\" %w = get_attr \"scale\" %y = aten::mul.Tensor(%x, %w) output(%y) }"),
        state, TreeSpec::positional_inputs(1), TreeSpec::leaf());
  };
  GraphModule one = make(), other = make();
  for (const auto& tensor : {at::full({}, 5.0f), at::full({}, 7.0f, at::kMeta)}) {
    one.set_state({{"scale", tensor}});
    EXPECT_TRUE(one.named_buffers()["scale"].is_same(tensor));
  }
  EXPECT_EQ(before.item<float>(), 2);
  EXPECT_EQ(other(at::full({}, 3.0f)).item<float>(), 6);
}

TEST(GraphModule, ThatWasMovedFromSaysSo) {
  State state;
  state.add({"scale", AttrKind::Parameter, at::ones({}).requires_grad_()});
  GraphModule m(
      parse_graph("graph { %x = placeholder \"x\" %w = get_attr \"scale\" %y = aten::mul.Tensor(%x, %w) output(%y) }"),
      state, TreeSpec::positional_inputs(1), TreeSpec::leaf());
  EXPECT_EQ(m(at::full({}, 3.0f)).item<float>(), 3);
  GraphModule to(std::move(m));
  EXPECT_EQ(to(at::full({}, 3.0f)).item<float>(), 3);
  EXPECT_EQ(to.parameters().size(), 1u);
  for (const auto& use :
       {+[](GraphModule& from) { from.run({}); }, +[](GraphModule& from) { from.plan(); },
        +[](GraphModule& from) { from.lint(); }, +[](GraphModule& from) { run_pass(find_pass("dead_code"), from); }}) {
    try {
      use(m);  // NOLINT(bugprone-use-after-move)
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::InvalidGraph);
      EXPECT_THAT(e.what(), HasSubstr("use the one that it was moved to"));
    }
  }
  EXPECT_THROW(m.set_state({{"scale", at::zeros({})}}), Error);
  m.sync_module();
  m = std::move(to);
  EXPECT_EQ(m(at::full({}, 3.0f)).item<float>(), 3);
}

TEST(GraphModule, RefusesInputsOfAnotherSignature) {
  GraphModule m(parse_graph("graph { %x: f32[\"s0\"=2, 3] = placeholder \"x\" %y = aten::neg(%x) output(%y) }"),
                State(), TreeSpec::positional_inputs(1), TreeSpec::leaf());
  EXPECT_NO_THROW(m(at::ones({7, 3})));
  for (const at::Tensor& wrong : {at::ones({2, 4}), at::ones({2, 3}).to(at::kDouble), at::ones({3})}) {
    try {
      m(wrong);
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_THAT(e.what(), HasSubstr("input 'x' should be f32[s0, 3]"));
    }
  }
}

TEST(GraphModule, TakesKeywordsAndReturnsStructure) {
  TreeSpec in = TreeSpec::tuple({TreeSpec::tuple({TreeSpec::leaf()}), TreeSpec::dict({"scale"}, {TreeSpec::leaf()})});
  GraphModule m(
      parse_graph(
          R"(graph { %x = placeholder "x" %s = placeholder "scale" %y = aten::mul.Tensor(%x, %s) output(%y, %x) })"),
      State(), in, TreeSpec::dict({"y", "x"}, {TreeSpec::leaf(), TreeSpec::leaf()}));
  auto out = m.forward({at::ones({2})}, {{"scale", at::full({}, 4.0)}}).toGenericDict();
  EXPECT_EQ(out.at("y").toTensor().sum().item<double>(), 8.0);
  EXPECT_THROW(m.forward({at::ones({2})}), Error);
  EXPECT_THROW(m.forward({at::ones({2})}, {{"scale", at::ones({})}, {"typo", at::ones({})}}), Error);
  EXPECT_THROW(m.forward({at::ones({2})}, {{"scale", at::ones({})}, {"scale", at::ones({})}}), Error);  // given twice
  EXPECT_THROW(m.forward({at::ones({2}), at::ones({})}, {{"scale", at::ones({})}}), Error);
}

TEST(GraphModule, CalledForOneTensorSaysWhatItReturnsInstead) {
  GraphModule m(parse_graph(R"(graph { %x = placeholder "x" %y = aten::neg(%x) output(%y, %x) })"), State(),
                TreeSpec::positional_inputs(1), TreeSpec::tuple({TreeSpec::leaf(), TreeSpec::leaf()}));
  try {
    m(at::ones({2}));
    FAIL() << "two tensors are no tensor";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("the module returns (*, *), not one tensor"));
  }
}

TEST(Plan, NamesTheIndexThatATableDoesNotHave) {
  State state;
  state.add({"wte.weight", AttrKind::Parameter, at::randn({50, 4}).requires_grad_()});
  const std::string text =
      "graph { %ids = placeholder \"ids\" %w: f32[50, 4] = get_attr \"wte.weight\" %e = aten::embedding(%w, %ids) "
      "output(%e) }";
  try {
    run1(text, state, {at::full({2, 3}, 70)});
    FAIL() << "there is no row 70";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("index 70 is outside of 'wte.weight', which has the rows 0 to 49"));
  }
}

TEST(Plan, SaysAnAssertionOfTorchsAsWordsAboutTheArguments) {
  const std::string text = "graph { %x = placeholder \"x\" %y = aten::_add_relu.Scalar(%x, 1) output(%y) }";
  try {
    run1(text, State(), {at::ones({3}, at::kBool)});
    FAIL() << "torch takes it now";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::ExecutionFailed);
    EXPECT_THAT(e.what(), HasSubstr("%y"));
    EXPECT_THAT(e.what(), HasSubstr("torch's kernel does not take these arguments: Unsupported datatype for add_relu"));
    EXPECT_THAT(e.what(), testing::Not(HasSubstr("ASSERT")));
  }
}

TEST(TreeSpec, IsTorchsOwnJsonBothWays) {
  // Written by torch.utils._pytree.treespec_dumps.
  const std::string text =
      R"x([1,{"children_spec":[{"children_spec":[],"context":null,"type":null},{"children_spec":[{"children_spec":[],"context":null,"type":null}],"context":"[\"k\"]","type":"builtins.dict"}],"context":"null","type":"builtins.tuple"}])x";
  TreeSpec spec = TreeSpec::from_json(text);
  EXPECT_EQ(spec.to_string(), "(*, {k: *})");
  EXPECT_EQ(spec.to_json(), text);
  EXPECT_THROW(TreeSpec::from_json("[2, {}]"), Error);
  EXPECT_THROW(TreeSpec::from_json("nonsense"), Error);
}

TEST(TreeSpec, FlattensAndRestoresNestedValues) {
  c10::impl::GenericDict d(c10::StringType::get(), c10::AnyType::get());
  d.insert("a", at::ones({1}));
  d.insert("b", c10::ivalue::Tuple::create({c10::IValue(3), c10::IValue()}));
  TreeSpec spec;
  auto leaves = flatten(d, &spec);
  EXPECT_EQ(spec.to_string(), "{a: *, b: (*, *)}");
  ASSERT_EQ(leaves.size(), 3u);
  auto back = unflatten(spec, leaves).toGenericDict();
  EXPECT_EQ(back.at("b").toTupleRef().elements()[0].toInt(), 3);
  EXPECT_THROW(unflatten(spec, {c10::IValue(1)}), Error);
}

}  // namespace
}  // namespace plumb
