#include <gtest/gtest.h>

#include <map>

#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/scale/residual.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {
namespace {

using namespace testing_models;

// Returns the value behind splits and nodes of other transforms.
const Value* origin(const Value* value) {
  const Node* node = value->producer();
  while (node->is_op("plumb::residual_split") || node->is_op("plumb::simulate_format") || node->is_op("plumb::track")) {
    value = node->input(0);
    node = value->producer();
  }
  return value;
}

std::multiset<std::string> operands(const Node* node) {
  std::multiset<std::string> names;
  for (const Value* value : node->inputs()) names.insert(origin(value)->name());
  return names;
}

std::shared_ptr<GraphModule> random_module(std::mt19937& random, int nodes, int reach) {
  Graph graph = random_graph(random, nodes, reach);
  State state;
  for (const Node* node : graph.attributes()) parameter(state, node->target(), randn_there({4, 4}));
  const size_t inputs = graph.placeholders().size();
  return std::make_shared<GraphModule>(std::move(graph), std::move(state), TreeSpec::positional_inputs(inputs),
                                       TreeSpec::leaf());
}

TEST(RandomGraphs, KeepTheirOperandsUnderEveryTransform) {
  std::mt19937 random(21);
  for (int round = 0; round < 150; ++round) {
    auto module = random_module(random, 5 + static_cast<int>(random() % 80), 2 + static_cast<int>(random() % 10));
    auto changed = track_scales(simulate_fp8(unit_scale(module)));
    changed->lint();
    std::map<std::string, const Node*> now;
    for (const Node* node : changed->graph().nodes()) {
      for (const Value* value : node->results()) now[value->name()] = node;
    }
    for (const Node* node : module->graph().nodes()) {
      for (const Value* value : node->results()) {
        ASSERT_TRUE(now.count(value->name())) << value->name();
        EXPECT_EQ(operands(now[value->name()]), operands(node))
            << node->describe() << to_string(module->graph()) << to_string(changed->graph());
      }
    }
    if (HasFailure()) return;
  }
}

TEST(RandomGraphs, PairEverySplitWithOneAddOfItsTau) {
  std::mt19937 random(22);
  for (int round = 0; round < 150; ++round) {
    auto module = random_module(random, 5 + static_cast<int>(random() % 80), 2 + static_cast<int>(random() % 10));
    auto scaled = unit_scale(module);
    size_t adds = 0, splits = 0;
    for (const Node* node : scaled->graph().nodes()) {
      if (node->is_op("plumb::residual_split")) {
        ++splits;
        ASSERT_EQ(node->result(1)->uses().size(), 1u) << "only the add uses the skip side";
        const Node* add = node->result(1)->uses()[0].user;
        ASSERT_TRUE(add->is_op("plumb::residual_add"));
        EXPECT_EQ(add->input(1), node->result(1));
        EXPECT_EQ(add->arg("tau"), node->arg("tau"));
      }
      adds += node->is_op("plumb::residual_add");
    }
    EXPECT_EQ(adds, splits);
    EXPECT_EQ(adds, scaled->reports.back().count(ReportKind::Residual));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace plumb
