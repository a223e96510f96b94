#include "plumb/transforms/scale/residual.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "plumb/transforms/models_testing.h"

namespace plumb {
namespace {

using testing_models::random_graph;

std::vector<Node*> adds_of(const Graph& graph) {
  std::vector<Node*> adds;
  for (Node* node : graph.nodes()) {
    if (node->is_op("aten::add.Tensor")) adds.push_back(node);
  }
  return adds;
}

ResidualAnalysis analyze(const Graph& graph) {
  return find_residual_adds(graph, adds_of(graph), [](const Node* node) { return node->is_op("aten::softmax"); });
}

// The definition, with the set of ancestors of every value.
struct Definition {
  std::map<const Value*, std::set<const Value*>> ancestors;

  explicit Definition(const Graph& graph) {
    for (const Node* node : graph.nodes()) {
      std::set<const Value*> all;
      if (!node->is_op("aten::zeros_like")) {
        for (const Value* input : node->inputs()) {
          all.insert(input);
          all.insert(ancestors[input].begin(), ancestors[input].end());
        }
      }
      for (const Value* value : node->results()) ancestors[value] = all;
    }
  }
  bool depends(const Value* value, const Value* on) const { return ancestors.at(value).count(on) > 0; }
  // The node is computed from `skip`, and `residual` is a result of it or computed from one.
  bool on_branch(const Node* node, const Value* skip, const Value* residual) const {
    bool from = false, to = false;
    if (node->is_op("aten::zeros_like")) return false;
    for (const Value* input : node->inputs()) from = from || input == skip || depends(input, skip);
    for (const Value* result : node->results()) to = to || result == residual || depends(residual, result);
    return from && to;
  }
};

// A path leads from the skip over a softmax to the residual, and behind the softmax along no other add's branch.
bool has_attention(const Graph& graph, const ResidualAdd& branch, const std::vector<ResidualAdd>& adds) {
  std::set<const Value*> from{branch.skip}, over;
  for (const Node* node : graph.nodes()) {
    if (node->is_op("aten::zeros_like")) continue;
    bool reached = false, passed = false;
    for (const Value* input : node->inputs()) {
      reached |= from.count(input) > 0;
      const bool closes = std::any_of(adds.begin(), adds.end(),
                                      [&](const ResidualAdd& add) { return add.add == node && add.residual == input; });
      passed |= !closes && over.count(input) > 0;
    }
    passed |= reached && node->is_op("aten::softmax");
    for (const Value* result : node->results()) {
      if (reached) from.insert(result);
      if (passed) over.insert(result);
    }
  }
  return over.count(branch.residual) > 0;
}

void expect_as_defined(const Graph& graph) {
  const Definition definition(graph);
  const ResidualAnalysis found = analyze(graph);
  std::vector<ResidualAdd> expected;
  for (Node* add : adds_of(graph)) {
    Value* l = add->input(0);
    Value* r = add->input(1);
    if (l == r) continue;
    if (definition.depends(l, r)) std::swap(l, r);
    if (!definition.depends(r, l)) continue;
    expected.push_back({add, l, r, false, -1});
  }
  for (ResidualAdd& e : expected) e.attention = has_attention(graph, e, expected);
  ASSERT_EQ(found.adds.size(), expected.size()) << to_string(graph);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found.adds[i].add, expected[i].add);
    EXPECT_EQ(found.adds[i].skip, expected[i].skip);
    EXPECT_EQ(found.adds[i].residual, expected[i].residual);
    EXPECT_EQ(found.adds[i].attention, expected[i].attention) << expected[i].add->describe() << to_string(graph);
    int parent = -1;
    for (size_t k = 0; k < expected.size() && parent < 0; ++k) {
      if (expected[k].skip == expected[i].skip &&
          definition.on_branch(expected[i].add, expected[k].skip, expected[k].residual))
        parent = static_cast<int>(k);
    }
    EXPECT_EQ(found.adds[i].parent, parent) << expected[i].add->describe() << to_string(graph);
  }
  for (const Node* node : graph.nodes()) {
    bool inside = false;
    for (const auto& e : expected) inside = inside || definition.on_branch(node, e.skip, e.residual);
    EXPECT_EQ(found.inside.count(node) > 0, inside) << node->describe() << to_string(graph);
    for (const Value* input : node->inputs()) {
      int innermost = -1;
      for (size_t k = 0; k < expected.size() && innermost < 0; ++k) {
        if (expected[k].skip == input && definition.on_branch(node, input, expected[k].residual))
          innermost = static_cast<int>(k);
      }
      int got = -1;
      if (auto at = found.branch_of.find(input); at != found.branch_of.end()) {
        if (auto it = at->second.find(node); it != at->second.end()) got = it->second;
      }
      EXPECT_EQ(got, innermost) << node->describe() << " uses %" << input->name() << to_string(graph);
    }
  }
}

TEST(Residual, FindsOnRandomGraphsWhatTheDefinitionSays) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const Graph graph = random_graph(random, 5 + static_cast<int>(random() % 60), 2 + static_cast<int>(random() % 12));
    expect_as_defined(graph);
    if (HasFailure()) return;
  }
}

TEST(Residual, FindsMoreAddsThanFitOneSweep) {
  std::mt19937 random(11);
  for (int round = 0; round < 4; ++round) {
    const Graph graph = random_graph(random, 500, 3 + round * 30);
    expect_as_defined(graph);
    if (HasFailure()) return;
  }
}

TEST(Residual, IsNotFoundWhereTwoBranchesMeet) {
  const Graph graph = parse_graph(R"(graph { %x = placeholder "x" %a = aten::relu(%x) %b = aten::neg(%x)
    %s = aten::add.Tensor(%a, %b) output(%s) })");
  EXPECT_TRUE(analyze(graph).adds.empty());
}

TEST(Residual, IsNotFoundWhereAValueIsAddedToItself) {
  const Graph graph = parse_graph(R"(graph { %x = placeholder "x" %s = aten::add.Tensor(%x, %x) output(%s) })");
  EXPECT_TRUE(analyze(graph).adds.empty());
}

TEST(Residual, DoesNotTakeAShapeForADependency) {
  const Graph graph = parse_graph(R"(graph { %x = placeholder "x" %n = aten::randn_like(%x)
    %s = aten::add.Tensor(%x, %n) output(%s) })");
  EXPECT_TRUE(analyze(graph).adds.empty());
}

TEST(Residual, SeesAttentionOnlyOnTheBranchItself) {
  const Graph graph = parse_graph(R"(graph { %x = placeholder "x" %m = placeholder "memory"
    %gate = aten::softmax.int(%m, -1) %f = aten::mul.Tensor(%x, %gate) %s = aten::add.Tensor(%x, %f)
    %g = aten::softmax.int(%s, -1) %t = aten::add.Tensor(%g, %s) output(%t) })");
  const auto found = analyze(graph);
  ASSERT_EQ(found.adds.size(), 2u);
  EXPECT_FALSE(found.adds[0].attention);
  EXPECT_TRUE(found.adds[1].attention);
}

TEST(Residual, SeesNoAttentionOfALayerOnABranchAroundTheLayer) {
  const Graph graph = parse_graph(R"(graph { %x = placeholder "x" %u = aten::relu(%x) %a = aten::softmax.int(%u, -1)
    %s = aten::add.Tensor(%u, %a) %t = aten::add.Tensor(%x, %s) output(%t) })");
  const auto found = analyze(graph);
  ASSERT_EQ(found.adds.size(), 2u);
  EXPECT_TRUE(found.adds[0].attention);
  EXPECT_FALSE(found.adds[1].attention);
}

TEST(Residual, IsFoundInAHundredThousandNodes) {
  // Skips of every length at once, all from one chain: blocks of 4 nodes, and one add for each that closes far away.
  Graph graph;
  std::vector<Value*> chain{graph.placeholder("x")->result()};
  size_t residual = 0;
  while (graph.size() < 100'000) {
    Value* x = chain.back();
    Value* f = graph.call("aten::relu", {graph.call("aten::neg", {x})->result()})->result();
    Value* y = graph.call("aten::add.Tensor", {x, f})->result();
    const size_t far = chain.size() / 2;
    Value* z = graph.call("aten::add.Tensor", {y, chain[far]})->result();
    residual += 2;
    chain.push_back(z);
  }
  graph.output({chain.back()});
  EXPECT_EQ(analyze(graph).adds.size(), residual);
}

}  // namespace
}  // namespace plumb
