#include "plumb/exported/exported.h"

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <torch/autograd.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include "plumb/exported/programs_testing.h"
#include "plumb/tensors/parameter_tag.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using namespace plumb::testing;  // NOLINT

c10::IValue fresh(const c10::IValue& v) { return v.isTensor() ? c10::IValue(v.toTensor().detach().clone()) : v; }

// Runs a program on Python's inputs and compares everything with what Python computed.
void expect_same_as_python(GraphModule& module, const c10::impl::GenericDict& expected) {
  std::vector<c10::IValue> inputs;
  for (const c10::IValue& v : items(expected.at("inputs"))) inputs.push_back(fresh(v));
  torch::manual_seed(7);
  const auto outputs = module.run(inputs);
  const auto want = items(expected.at("outputs"));
  ASSERT_EQ(outputs.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(same(outputs[i], want[i])) << "output " << i;

  std::vector<at::Tensor> roots, grads;
  for (const c10::IValue& v : outputs) {
    if (v.isTensor() && v.toTensor().requires_grad()) roots.push_back(v.toTensor());
  }
  for (const c10::IValue& v : items(expected.at("output_gradients"))) grads.push_back(v.toTensor());
  if (!grads.empty()) {
    ASSERT_EQ(roots.size(), grads.size());
    torch::autograd::backward(roots, grads);
  }
  for (const auto& entry : expected.at("gradients").toGenericDict()) {
    const Attr& attr = module.state().get(entry.key().toStringRef());
    ASSERT_TRUE(attr.tensor.grad().defined()) << attr.name;
    EXPECT_TRUE(same(attr.tensor.grad(), entry.value())) << "gradient of " << attr.name;
  }
  for (const auto& entry : expected.at("buffers").toGenericDict()) {
    const Attr* attr = module.state().find(entry.key().toStringRef());
    if (attr) EXPECT_TRUE(same(attr->tensor, entry.value())) << "buffer " << attr->name;
  }
  const auto after = items(expected.at("inputs_after"));
  size_t tensors = 0;
  for (const c10::IValue& v : after) tensors += v.isTensor();
  if (tensors == inputs.size()) {
    for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(same(inputs[i], after[i])) << "input " << i << " afterwards";
  }
}

class Programs : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  std::string path(const std::string& ending) const { return programs() / (GetParam() + ending); }
};

TEST_P(Programs, ComputeWhatPythonComputes) {
  const Expected expected(GetParam());
  for (const auto& one : expected.cases()) {
    ExportedProgram program = load_pt2(path(".pt2"));
    expect_same_as_python(*program.module, one);
  }
}

TEST_P(Programs, ComputeTheSameAfterSavingAndLoading) {
  const Expected expected(GetParam());
  for (const auto& one : expected.cases()) {
    save_pt2(load_pt2(path(".pt2")), path(".again.pt2"));
    ExportedProgram program = load_pt2(path(".again.pt2"));
    expect_same_as_python(*program.module, one);
  }
}

TEST_P(Programs, HaveTheSameGraphAndStateAfterSavingAndLoading) {
  ExportedProgram before = load_pt2(path(".pt2"));
  save_pt2(before, path(".again.pt2"));
  ExportedProgram after = load_pt2(path(".again.pt2"));
  EXPECT_EQ(to_string(after.module->graph()), to_string(before.module->graph()));
  EXPECT_EQ(after.module->in_spec(), before.module->in_spec());
  EXPECT_EQ(after.module->out_spec(), before.module->out_spec());
  EXPECT_EQ(after.ranges, before.ranges);
  EXPECT_EQ(after.guards, before.guards);
  EXPECT_EQ(after.sample_inputs, before.sample_inputs);
  ASSERT_EQ(after.module->state().size(), before.module->state().size());
  for (const Attr& attr : before.module->state()) {
    const Attr& other = after.module->state().get(attr.name);
    EXPECT_EQ(other.kind, attr.kind);
    EXPECT_EQ(other.persistent, attr.persistent);
    EXPECT_EQ(other.tensor.requires_grad(), attr.tensor.requires_grad());
    EXPECT_EQ(other.tensor.strides(), attr.tensor.strides());
    EXPECT_TRUE(same(other.tensor, attr.tensor)) << attr.name;
  }
}

TEST_P(Programs, HaveATextThatRoundTrips) {
  const std::string text = to_string(load_pt2(path(".pt2")).module->graph());
  EXPECT_EQ(to_string(parse_graph(text)), text);
}

INSTANTIATE_TEST_SUITE_P(Zoo, Programs, ::testing::ValuesIn(program_names()),
                         [](const auto& info) { return info.param; });

TEST(Exported, PythonLoadsAndRunsWhatPlumbWrote) {
  for (const std::string& name : program_names())
    save_pt2(load_pt2(programs() / (name + ".pt2")), programs() / (name + ".back.pt2"));
  std::string said;
  EXPECT_EQ(python("'" + programs_script().string() + "' check '" + programs().string() + "'", &said), 0) << said;
  EXPECT_THAT(said, HasSubstr("programs are the same"));
}

TEST(Exported, TrainsAndKeepsTheNewWeightsUnderTheirNames) {
  ExportedProgram program = load_pt2(programs() / "gpt_tied.pt2");
  const auto inputs = items(Expected("gpt_tied").cases()[0].at("inputs"));
  std::map<std::string, at::Tensor> before;
  for (const auto& item : program.module->named_parameters()) before[item.key()] = item.value().detach().clone();
  torch::optim::AdamW optimizer(program.module->parameters(), torch::optim::AdamWOptions(1e-2));
  double first = 0, last = 0;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = program.module->run(inputs)[1].toTensor();
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  EXPECT_LT(last, first / 2);
  const std::string path = programs() / "gpt_tied.trained.pt2";
  save_pt2(program, path);
  ExportedProgram after = load_pt2(path);
  for (const auto& item : program.module->named_parameters()) {
    EXPECT_TRUE(same(after.module->state().get(item.key()).tensor, item.value())) << item.key();
    EXPECT_FALSE(same(before.at(item.key()), item.value())) << item.key();
  }
  EXPECT_TRUE(same(after.module->run(inputs)[1], program.module->run(inputs)[1]));
}

TEST(Exported, TiedWeightsAreOneTensorWithTwoNames) {
  const auto state = load_pt2(programs() / "gpt_tied.pt2").module->state();
  EXPECT_TRUE(state.get("tok.weight").tensor.is_same(state.get("head.weight").tensor));
  const auto untied = load_pt2(programs() / "gpt.pt2").module->state();
  EXPECT_FALSE(untied.get("tok.weight").tensor.is_same(untied.get("head.weight").tensor));
}

TEST(Exported, KeepsTagsOfParameters) {
  ExportedProgram program = load_pt2(programs() / "gpt_tied.pt2");
  const ParameterData tied{MupType::Weight, std::nullopt}, deep{MupType::Bias, 6, 12};
  tag(program.module->state().get("tok.weight").tensor, tied);
  std::string other;
  for (const Attr& attr : program.module->state()) {
    if (attr.kind == AttrKind::Parameter && !parameter_data(attr.tensor)) other = attr.name;
  }
  tag(program.module->state().get(other).tensor, deep);
  const std::string path = programs() / "gpt_tied.tagged.pt2";
  save_pt2(program, path);
  const auto state = load_pt2(path).module->state();
  EXPECT_EQ(parameter_data(state.get("tok.weight").tensor), tied);
  EXPECT_EQ(parameter_data(state.get("head.weight").tensor), tied);
  EXPECT_EQ(parameter_data(state.get(other).tensor), deep);
  size_t tagged = 0;
  for (const Attr& attr : state) tagged += parameter_data(attr.tensor).has_value();
  EXPECT_EQ(tagged, 3u);
}

TEST(Exported, AFileKeepsTheModeThatItsForwardReads) {
  ExportedProgram program = load_pt2(programs() / "linear.pt2");
  program.module->eval();
  program.module->train();  // nothing in it depends on the mode
  const std::string path = programs() / "linear.mode.pt2";
  for (const bool training : {true, false}) {
    program.module->set_made_in_training(training);
    program.module->set_mode_read_at("model.py:3");
    save_pt2(program, path);
    const auto module = load_pt2(path).module;
    EXPECT_EQ(module->is_training(), training);
    module->train(training);
    const Error error = error_of([&] { module->train(!training); });
    EXPECT_EQ(error.kind(), ErrorKind::InvalidState);
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("cannot change to"), HasSubstr("model.py:3")));
    EXPECT_EQ(error_of([&] { module->deep_copy()->train(!training); }).kind(), ErrorKind::InvalidState)
        << "a copy, too";
  }
}

TEST(Exported, KeepsModulePathsAndSourceLines) {
  ExportedProgram program = load_pt2(programs() / "gpt.pt2");
  size_t linears = 0;
  for (const Node* node : program.module->graph().nodes()) {
    if (!node->is_op("aten::linear")) continue;
    ++linears;
    EXPECT_THAT(node->meta().module_path(), ::testing::AnyOf(::testing::StartsWith("blocks."), "head"));
    ASSERT_TRUE(node->meta().source);
    EXPECT_THAT(node->meta().source->file, ::testing::EndsWith("gpt.py"));
    EXPECT_GT(node->meta().source->line, 0);
  }
  EXPECT_EQ(linears, 9u);
}

TEST(Exported, NoGradRegionsAreAFlagOnTheirNodes) {
  ExportedProgram program = load_pt2(programs() / "modes.pt2");
  size_t off = 0, on = 0;
  for (const Node* node : program.module->graph().nodes()) {
    if (node->is_call()) ++(node->meta().grad_enabled ? on : off);
  }
  EXPECT_GE(off, 4u);
  EXPECT_GE(on, 4u);
}

TEST(Exported, RefusesConstantInputsOfAnotherValue) {
  ExportedProgram program = load_pt2(programs() / "values.pt2");
  auto inputs = items(Expected("values").cases()[0].at("inputs"));
  program.module->run(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isInt() && !inputs[i].isDouble()) continue;
    auto other = inputs;
    other[i] = inputs[i].isInt() ? c10::IValue(41) : c10::IValue(41.0);
    EXPECT_THAT(error_of([&] { program.module->run(other); }).what(), HasSubstr("fixed to"));
  }
}

TEST(Exported, RefusesSizesThatDoNotFitTheSymbols) {
  ExportedProgram program = load_pt2(programs() / "derived_sizes.pt2");
  program.module->run({torch::randn({5, 2}), torch::randn({10, 2})});
  EXPECT_THAT(error_of([&] { program.module->run({torch::randn({5, 2}), torch::randn({9, 2})}); }).what(),
              HasSubstr("= 10"));
  EXPECT_THAT(error_of([&] { program.module->run({torch::randn({1, 2}), torch::randn({2, 2})}); }).what(),
              HasSubstr(">= 2"));
  EXPECT_THAT(error_of([&] { program.module->run({torch::randn({5, 3}), torch::randn({10, 3})}); }).what(),
              HasSubstr("input 'x'"));
}

TEST(Exported, WritesAGraphThatCameFromNoFile) {
  Graph g;
  TensorMeta x_type;
  x_type.sizes = {2, 3};
  x_type.strides = {3, 1};
  Value* x = g.placeholder("x", x_type)->result();
  Value* w = g.get_attr("fc.weight")->result();
  Node* sum = g.call("aten::linear", {x, w});
  sum->meta().grad_enabled = false;
  Node* product = g.call("aten::mul.Tensor", {sum->result(), Arg(2.5)});
  Node* split = g.call("aten::split.Tensor", {product->result(), 1, 0}, {2});
  Value* lambda = g.call("aten::add.Tensor", {split->result(1), split->result(0)})->result();
  lambda->rename("lambda");
  g.output({lambda, Arg(), Arg(3)});
  State state;
  state.add({"fc.weight", AttrKind::Parameter, torch::randn({4, 3}).set_requires_grad(true)});
  GraphModule module(std::move(g), std::move(state), TreeSpec::positional_inputs(1),
                     TreeSpec::tuple({TreeSpec::leaf(), TreeSpec::leaf(), TreeSpec::leaf()}));
  const std::string path = programs() / "made.pt2";
  save_pt2(module, path);
  ExportedProgram back = load_pt2(path);
  const at::Tensor in = torch::randn({2, 3});
  EXPECT_TRUE(same(back.module->run({in})[0], module.run({in})[0]));
  EXPECT_FALSE(back.module->run({in})[0].toTensor().requires_grad());
  const std::string code = "import torch; p = torch.export.load('" + path +
                           "'); y = p.module()(torch.ones(2, 3)); assert y[1] is None and y[2] == 3; print(y[0].shape)";
  std::string said;
  EXPECT_EQ(python("-c \"" + code + "\"", &said), 0) << said;
  EXPECT_THAT(said, HasSubstr("torch.Size([1, 4])"));
}

TEST(Exported, NamesATensorOfTheStateThatIsUndefined) {
  Graph g;
  g.output({g.call("aten::neg", {g.placeholder("x")->result()})->result()});
  State state;
  state.add({"norm.mean", AttrKind::Buffer, at::Tensor()});
  const GraphModule module(std::move(g), std::move(state), TreeSpec::positional_inputs(1), TreeSpec::leaf());
  const Error error = error_of([&] { save_pt2(module, programs() / "undefined.pt2"); });
  EXPECT_EQ(error.kind(), ErrorKind::Unsupported);
  EXPECT_THAT(error.what(), HasSubstr("'norm.mean'"));
}

TEST(Exported, LeavesTheOldFileWhenSavingFails) {
  const fs::path path = programs() / "kept.pt2";
  spill(path, "old");
  Graph g;
  Value* x = g.placeholder("x", std::nullopt, ValueType::Other)->result();
  g.output({x});
  GraphModule module(std::move(g), State(), TreeSpec::positional_inputs(1), TreeSpec::tuple({TreeSpec::leaf()}));
  const Error error = error_of([&] { save_pt2(module, path); });
  EXPECT_EQ(error.kind(), ErrorKind::Unsupported);
  EXPECT_THAT(error.what(), HasSubstr("%x"));
  EXPECT_EQ(slurp(path), "old");
  EXPECT_EQ(error_of([&] { save_pt2(load_pt2(programs() / "linear.pt2"), "/no/such/folder/x.pt2"); }).kind(),
            ErrorKind::CannotWrite);
  for (const auto& entry : fs::directory_iterator(programs()))
    EXPECT_THAT(entry.path().string(), ::testing::Not(::testing::EndsWith(".part")));
}

TEST(Exported, LoadsOntoTheMetaDevice) {
  LoadOptions options;
  options.device = at::Device(at::kMeta);
  ExportedProgram program = load_pt2(programs() / "linear.pt2", options);
  for (const at::Tensor& parameter : program.module->parameters()) EXPECT_TRUE(parameter.is_meta());
  for (const Node* node : program.module->graph().placeholders()) {
    EXPECT_EQ(node->result()->meta()->device, at::Device(at::kMeta));
  }
  EXPECT_EQ(program.module->state().get("0.weight").tensor.sizes(), (std::vector<int64_t>{5, 6}));
}

}  // namespace
}  // namespace plumb
