// Properties of every graph, tried on random ones; and that 100,000 nodes are a normal graph.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "plumb/graph/passes/passes_testing.h"
#include "tests/random_graph.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

namespace plumb {
namespace {

// Random graphs write to tensors that autograd has saved for an earlier node. The written value then depends on that
// node, which holds the tensor: a reference cycle that torch never frees, in eager mode either (x = w * 1; a =
// x.atan(); x.copy_(a)).
class Properties : public ::testing::Test {
#ifdef __SANITIZE_ADDRESS__
  __lsan::ScopedDisabler rings_;
#endif
};

const char* kPasses[] = {"dead_code", "common_subexpressions", "constant_folding", "raise", "functionalise"};

// Empty if the passes, one after the other, keep what a run of the graph shows.
std::string broken_by(const std::vector<std::string>& passes, uint32_t seed, size_t nodes) {
  RandomGraphOptions options;
  options.nodes = nodes;
  GraphModule module = random_graph(seed, options);
  const std::string before = to_string(module.graph());
  const auto inputs = sample_inputs(module.graph(), seed);
  const Seen was = observe(module, inputs);
  if (!was.error.empty()) return "the random graph does not run: " + was.error + "\n" + before;
  std::string names;
  Gradients gradients = Gradients::Equal;
  for (const std::string& pass : passes) {
    names += " " + pass;
    try {
      run_pass(find_pass(pass), module, {}, nullptr, true);
      if (run_pass(find_pass(pass), module, {}, nullptr, true))
        return pass + " is not idempotent:\n" + before + to_string(module.graph());
    } catch (const Error& e) {
      return std::string(e.what()) + "\n" + before + to_string(module.graph());
    }
    if (pass == "functionalise") gradients = Gradients::Rounded;
    const std::string now = difference(was, observe(module, inputs), gradients);
    if (!now.empty()) return "after" + names + ": " + now + "\n" + before + to_string(module.graph());
  }
  return "";
}

TEST_F(Properties, TextOfARandomGraphReadsBackTheSame) {
  EXPECT_TRUE(rc::check([](uint32_t seed) {
    GraphModule module = random_graph(seed);
    const std::string text = to_string(module.graph());
    RC_ASSERT(to_string(parse_graph(text)) == text);
    RC_ASSERT(to_string(module.graph().clone()) == text);
  }));
}

TEST_F(Properties, EveryPassKeepsOutputsGradientsAndState) {
  for (const char* pass : kPasses) {
    EXPECT_TRUE(rc::check(std::string(pass) + " keeps the meaning", [pass](uint32_t seed) {
      // Small ones first: what fails is then easy to read.
      for (size_t nodes : {4, 12, 40}) {
        const std::string broken = broken_by({pass}, seed, nodes);
        if (!broken.empty()) RC_FAIL(broken);
      }
    }));
  }
}

TEST_F(Properties, FunctionaliseHandsAGradientOnInAnotherLayoutThanEager) {
  // A transposed view is read after its memory was written: the product behind rounds its gradient in another order.
  EXPECT_EQ(broken_by({"functionalise"}, 70240720, 12), "");
}

TEST_F(Properties, RandomGraphsThatShowedFaultsKeepTheirMeaning) {
  for (size_t nodes : {12, 40}) EXPECT_EQ(broken_by({"dead_code"}, 8215338, nodes), "");
  EXPECT_EQ(broken_by({"dead_code", "common_subexpressions", "constant_folding", "raise"}, 1868576173, 30), "");
}

TEST_F(Properties, PassesKeepTheMeaningInAnyOrder) {
  EXPECT_TRUE(rc::check([](uint32_t seed) {
    std::vector<std::string> order(std::begin(kPasses), std::end(kPasses));
    for (size_t i = 0; i < 5; ++i) order.push_back(*rc::gen::elementOf(order));
    const std::string broken = broken_by(order, seed, 30);
    if (!broken.empty()) RC_FAIL(broken);
  }));
}

TEST_F(Properties, RandomGraphsHaveWhatThePassesLookFor) {
  std::map<std::string, int> changed;
  size_t writes = 0, views = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    for (const char* pass : kPasses) {
      GraphModule module = random_graph(seed);
      changed[pass] += run_pass(find_pass(pass), module, {}, nullptr, true);
    }
    const GraphModule module = random_graph(seed);
    for (const Node* node : module.graph().nodes()) {
      writes += node->writes();
      views += node->is_op("aten::select");
    }
  }
  for (const char* pass : kPasses) EXPECT_GT(changed[pass], 10) << pass;
  EXPECT_GT(writes, 60u);
  EXPECT_GT(views, 60u);
}

TEST_F(Properties, RandomGraphsAreTheSameForTheSameSeedAndLeaveTheRandomStreamAlone) {
  at::manual_seed(5);
  const double want = at::rand({1}).item<double>();
  at::manual_seed(5);
  EXPECT_EQ(to_string(random_graph(17).graph()), to_string(random_graph(17).graph()));
  EXPECT_EQ(at::rand({1}).item<double>(), want);
  EXPECT_NE(to_string(random_graph(17).graph()), to_string(random_graph(18).graph()));
}

// --- size ---
constexpr size_t kNodes = 100'000;

TensorMeta square() {
  TensorMeta m;
  m.sizes = {4, 4};
  m.strides = {4, 1};
  return m;
}

// In-place sums and writes through views down one chain, equal nodes, constants, linears in pieces, dead ends.
Graph long_graph(size_t nodes) {
  Graph g;
  Value* x = g.placeholder("x", square())->result();
  Value* w = g.get_attr("w", square())->result();
  Value* c = g.get_attr("constant_0", square())->result();
  auto typed = [](Node* node) {
    node->result()->set_meta(square());
    return node->result();
  };
  Value* h = typed(g.call("aten::sin", {x}));
  while (g.size() < nodes) {
    h = typed(g.call("aten::add_.Tensor", {h, x}));
    Node* row = g.call("aten::select.int", {h, 0, static_cast<int64_t>(g.size() % 4)});
    TensorMeta line;
    line.sizes = {4};
    line.strides = {1};
    row->result()->set_meta(line);
    g.call("aten::mul_.Tensor", {row->result(), 0.5})->result()->set_meta(line);
    Value* t = typed(g.call("aten::t", {w}));
    Value* l = typed(g.call("aten::mm", {h, t}));
    Value* k = typed(g.call("aten::neg", {c}));
    Value* k2 = typed(g.call("aten::neg", {c}));
    typed(g.call("aten::cos", {l}));
    h = typed(g.call("aten::mul.Tensor", {typed(g.call("aten::sub.Tensor", {l, k})), k2}));
  }
  g.output({h});
  return g;
}

TEST(Scale, AHundredThousandNodesAreBuiltLintedPrintedAndParsed) {
  Graph g = long_graph(kNodes);
  ASSERT_GE(g.size(), kNodes);
  EXPECT_NO_THROW(lint(g));
  const std::string text = to_string(g);
  EXPECT_EQ(to_string(parse_graph(text)), text);
}

TEST(Scale, EveryPassRunsOnAHundredThousandNodes) {
  const Graph g = long_graph(kNodes);
  for (const char* name : kPasses) {
    GraphModule module = module_of(g.clone());
    EXPECT_TRUE(run_pass(find_pass(name), module, {}, nullptr, false)) << name;
    EXPECT_NO_THROW(module.lint()) << name;
  }
}

TEST(Scale, ManyUsesAndManyWritesOfOneValueAreNoBurden) {
  // A tensor filled one element at a time, and a sum written into one place over and over.
  Graph g;
  Value* x = g.placeholder("x", square())->result();
  TensorMeta line, scalar;
  line.sizes = {50'000};
  line.strides = {1};
  Value* e = g.call("aten::empty.memory_format", {c10::IValue(line.sizes)})->result();
  e->set_meta(line);
  for (int64_t i = 0; i < line.sizes[0]; ++i) {
    Value* s = g.call("aten::select.int", {e, 0, i})->result();
    s->set_meta(scalar);
    g.call("aten::fill_.Scalar", {s, 1.0})->result()->set_meta(scalar);
  }
  Value* y = g.call("aten::mul.Tensor", {e, 2})->result();
  y->set_meta(line);
  g.output({y, x});
  for (const char* name : kPasses) {
    GraphModule module = module_of(g.clone());
    const bool changed = run_pass(find_pass(name), module, {}, nullptr, false);
    EXPECT_EQ(changed, std::string_view(name) == "constant_folding") << name;
    if (std::string_view(name) == "constant_folding") {
      EXPECT_EQ(module.graph().size(), 4u);
      EXPECT_EQ(module.run({at::ones({4, 4})})[0].toTensor().sum().item<float>(), 100'000.0f);
    }
  }
}

TEST(Scale, ManyReadsByOneNodeAndManyConstantsAreNoBurden) {
  std::string text = "graph {\n  %x: c64[2] = placeholder \"x\"\n";
  for (int i = 0; i < 50'000; ++i)
    text += "  %y" + std::to_string(i) + ": c64[2] = aten::mul.Tensor(%x, complex(" + std::to_string(i) +
            ".0, 0.0)) no_grad\n";
  text += "  output(%x";
  for (int i = 0; i < 50'000; ++i) text += ", %x";
  GraphModule module = module_of(parse_graph(text + ")\n}\n"));
  EXPECT_FALSE(run_pass(find_pass("common_subexpressions"), module));
}

}  // namespace
}  // namespace plumb
