#include "plumb/partition/balance.h"

#include <gmock/gmock.h>

#include "plumb/partition/describe_cut.h"
#include "plumb/partition/partition_testing.h"

namespace plumb {
namespace {

using namespace partition_testing;
using testing::HasSubstr;

// A chain of operators with given costs.
struct Chain {
  std::shared_ptr<GraphModule> module;
  GraphCost cost;
};

Chain chain(const std::vector<double>& seconds, const std::vector<int64_t>& rows = {}) {
  std::string text = "graph { %x: f32[1] = placeholder \"x\" %v0: f32[1] = aten::neg(%x)";
  Chain c;
  c.cost.nodes.resize(1);
  for (size_t i = 0; i < seconds.size(); ++i) {
    const int64_t n = rows.empty() ? 1 : rows[i];
    if (i)
      text +=
          " %v" + std::to_string(i) + ": f32[" + std::to_string(n) + "] = aten::neg(%v" + std::to_string(i - 1) + ")";
    c.cost.nodes.push_back({seconds[i], 2 * seconds[i], 0, 0, 4 * n});
  }
  text += " output(%v" + std::to_string(seconds.size() - 1) + ") }";
  c.cost.nodes.emplace_back();
  c.module = model(text);
  return c;
}

std::vector<size_t> ops(const Balance& b) {
  std::vector<size_t> n;
  for (const auto& s : b.stages) n.push_back(s.num_ops);
  return n;
}

// Returns the best by trying every cut.
double best_of_all(const std::vector<double>& seconds, size_t stages) {
  double best = 1e30;
  std::vector<size_t> cut(stages - 1);
  std::function<void(size_t, size_t, double)> go = [&](size_t from, size_t left, double slowest) {
    if (left == 1) {
      double sum = 0;
      for (size_t i = from; i < seconds.size(); ++i) sum += 3 * seconds[i];
      best = std::min(best, std::max(slowest, sum));
      return;
    }
    double sum = 0;
    for (size_t to = from + 1; to + left - 1 <= seconds.size(); ++to) {
      sum += 3 * seconds[to - 1];
      go(to, left - 1, std::max(slowest, sum));
    }
  };
  go(0, stages, 0);
  return best;
}

TEST(Balance, FindsTheBestCut) {
  at::manual_seed(0);
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<double> seconds;
    for (int i = 0; i < 12; ++i) seconds.push_back(rand_there({1}).item<double>());
    Chain c = chain(seconds);
    for (int stages : {1, 2, 3, 5}) {
      BalanceOptions options;
      options.stages = stages;
      options.bytes_per_second = 1e18;
      EXPECT_NEAR(balance(*c.module, c.cost, options).slowest(), best_of_all(seconds, stages), 1e-9);
    }
  }
}

TEST(Balance, CountsWhatIsSent) {
  // Even costs: the middle would be best, but a large value crosses there.
  Chain c = chain({1, 1, 1, 1, 1, 1}, {1, 1, 100000000, 1, 1, 1});
  BalanceOptions options;
  options.bytes_per_second = 1e8;
  const Balance b = balance(*c.module, c.cost, options);
  EXPECT_THAT(ops(b), testing::AnyOf(testing::ElementsAre(2, 4), testing::ElementsAre(4, 2)));
  options.bytes_per_second = 1e18;
  EXPECT_THAT(ops(balance(*c.module, c.cost, options)), testing::ElementsAre(3, 3));
}

TEST(Balance, KeepsMemoryLimits) {
  Chain c = chain({3, 1, 1, 1}, {10, 10, 10, 10});
  BalanceOptions options;
  options.bytes_per_second = 1e18;
  EXPECT_THAT(ops(balance(*c.module, c.cost, options)), testing::ElementsAre(1, 3));
  options.memory_limits = {1000, 80};
  EXPECT_THAT(ops(balance(*c.module, c.cost, options)), testing::ElementsAre(2, 2));
  options.memory_limits = {50};
  EXPECT_THAT(message_of([&] { balance(*c.module, c.cost, options); }),
              HasSubstr("no cut into 2 stages keeps the memory limits"));
  options.memory_limits = {1, 2, 3};
  EXPECT_THAT(message_of([&] { balance(*c.module, c.cost, options); }), HasSubstr("3 memory limits for 2 stages"));
  options = {};
  options.stages = 5;
  EXPECT_THAT(message_of([&] { balance(*c.module, c.cost, options); }),
              HasSubstr("3 places for a cut, 5 stages need 4"));
}

TEST(Balance, CutsAGptByMeasuredAndByEstimatedCosts) {
  auto module = gpt(4, true, false);
  const auto before = module->deep_copy();
  const auto inputs = gpt_inputs();
  at::manual_seed(3);
  const auto random = rand_there({1});
  at::manual_seed(3);
  const GraphCost measured = measure_cost(*module, inputs, 2);
  EXPECT_TRUE(same(rand_there({1}), random)) << "measuring drew from the generator";
  for (const Attr& attr : module->state())
    EXPECT_TRUE(same(attr.tensor.detach(), before->state().get(attr.name).tensor.detach()) &&
                !attr.tensor.grad().defined());
  EXPECT_GT(measured.forward(), 0);
  EXPECT_GT(measured.backward(), 0);
  const GraphCost estimated = estimate_cost(*module, gpt_inputs());
  EXPECT_EQ(measured.flops(), estimated.flops()) << "shapes on the meta device are those of the run";
  EXPECT_THAT(message_of([&] { estimate_cost(*module); }), HasSubstr("does not say the shapes"));
  for (const GraphCost* cost : {&measured, &estimated}) {
    BalanceOptions options;
    options.stages = 3;
    const Balance b = balance(*module, *cost, options);
    double slowest = 0, total = 0;
    for (const BalancedStage& s : b.stages) {
      slowest = std::max(slowest, s.forward + s.backward + s.communication);
      total += s.forward + s.backward + s.communication;
    }
    EXPECT_DOUBLE_EQ(b.slowest(), slowest);
    EXPECT_DOUBLE_EQ(b.total(), total);
    EXPECT_LT(slowest, total * (1 - 1e-9)) << "one stage has everything";
    auto pipe = expect_equals_whole(*module, b.options, gpt_inputs(), 3);
    for (int s = 1; s < 3; ++s) EXPECT_NE(pipe->stage(s)->graph().find_value(b.stages[s].first_node), nullptr);
    EXPECT_THAT(b.report(), HasSubstr("slowest stage"));
  }
}

// A router chooses by the values of a tensor with a gradient, without grad mode.
TEST(Balance, MeasuresAndCutsAroundViewsMadeWithoutGradMode) {
  State state;
  parameter(state, "gate.weight", {4, 4});
  parameter(state, "expert.weight", {4, 4});
  auto module = model(R"(graph {
    %x: f32[2, 3, 4] = placeholder "x"
    %wg = get_attr "gate.weight"
    %g = aten::linear(%x, %wg)
    %s = aten::sigmoid(%g)
    %v = aten::view(%s, [-1, 4]) no_grad
    %k, %i = aten::topk(%v, 2) no_grad
    %p = aten::mul.Tensor(%v, 2.0)
    %flat = aten::view(%s, [-1, 4])
    %chosen = aten::gather(%flat, 1, %i)
    %we = get_attr "expert.weight"
    %e = aten::linear(%x, %we)
    %sum = aten::sum(%chosen)
    %q = aten::sum(%p)
    %t = aten::add.Tensor(%sum, %q)
    %es = aten::sum(%e)
    %loss = aten::mul.Tensor(%t, %es)
    output(%loss)
  })",
                      state);
  const std::vector<c10::IValue> inputs{randn_there({2, 3, 4})};
  const GraphCost cost = measure_cost(*module, inputs, 2);
  EXPECT_GT(cost.backward(), 0);
  size_t operators = 0;
  for (const Node* node : module->graph().nodes()) operators += node->is_call();
  for (size_t before = 1; before < operators; ++before) {
    SplitOptions options;
    options.cut_before = {before};
    expect_equals_whole(*module, options, inputs, 2);
  }
}

TEST(Balance, CountsFlopsOfProducts) {
  State state;
  parameter(state, "w", {16, 8});
  parameter(state, "k", {4, 3, 3, 3});
  auto flops = [&](const std::string& text) { return estimate_cost(*model(text, state)).flops(); };
  EXPECT_EQ(flops("graph { %x: f32[5, 8] = placeholder \"x\" %w = get_attr \"w\" %y: f32[5, 16] = aten::linear(%x, %w) "
                  "output(%y) }"),
            2.0 * 5 * 8 * 16);
  EXPECT_EQ(flops("graph { %x: f32[2, 3, 8, 8] = placeholder \"x\" %k = get_attr \"k\" %y: f32[2, 4, 6, 6] = "
                  "aten::conv2d(%x, %k) output(%y) }"),
            2.0 * 2 * 4 * 36 * 27);
  EXPECT_EQ(flops("graph { %x: f32[5, 8] = placeholder \"x\" %y: f32[8, 5] = aten::t(%x) output(%y) }"), 0.0);
}

TEST(Balance, NeverCutsThroughWrittenMemory) {
  const std::string text =
      R"(graph { %x: f32[4] = placeholder "x" %a: f32[4] = aten::mul.Tensor(%x, 3) %v: f32[2, 2] = aten::view(%a, [2, 2]) %b: f32[4] = aten::neg(%x)
    %r: f32[4] = aten::mul_.Tensor(%a, 2) %m: f32[2, 2] = aten::mul.Tensor(%v, 2) %l: f32[] = aten::sum(%m) output(%l, %b, %r) })";
  auto module = model(text);
  BalanceOptions options;
  options.stages = 2;
  const Balance b = balance(*module, estimate_cost(*module), options);
  at::manual_seed(0);
  auto pipe = expect_equals_whole(*module, b.options, {randn_there({4}).requires_grad_()}, 2);
  EXPECT_TRUE(pipe->notes().empty()) << "a cut had to be moved";
}

// A message closes the gaps of a split's parts, and what multiplies them may then round otherwise.
TEST(Balance, CutsBesideValuesWithGapsWhereItCan) {
  std::string text = "graph { %x: f32[4, 6] = placeholder \"x\" %a: f32[4, 6] = aten::relu(%x)";
  text += " [%b: f32[4, 3]{6, 1}, %c: f32[4, 3]{6, 1}] = aten::split.Tensor(%a, 3, 1)";
  text += " %d: f32[4, 3] = aten::add.Tensor(%b, %c) %e: f32[4, 3] = aten::relu(%d) output(%e) }";
  const auto module = model(text);
  GraphCost cost;
  cost.nodes.resize(module->graph().size());
  for (const size_t i : {1, 2, 3, 4}) cost.nodes[i] = {1, 1, 0, 0, 96};
  EXPECT_EQ(ops(balance(*module, cost, {.stages = 2})), (std::vector<size_t>{3, 1})) << "not 2, 2, which is quicker";
  EXPECT_EQ(ops(balance(*module, cost, {.stages = 3})), (std::vector<size_t>{1, 2, 1})) << "not 2, 1, 1";
  EXPECT_EQ(ops(balance(*module, cost, {.stages = 4})), (std::vector<size_t>{1, 1, 1, 1})) << "there is no other place";
}

TEST(Balance, CutsBesideTruthValuesThatNoFileTakes) {
  std::string text = "graph { %x: f32[4] = placeholder \"x\" %a: f32[4] = aten::relu(%x)";
  text += " %n: int = aten::sym_size.int(%a, 0) %ge: bool = plumb::sym_ge.bool(%n, 0)";
  text += " aten::_assert_scalar(%ge, \"below\") %b: f32[4] = aten::relu(%a) output(%b) }";
  const auto module = model(text);
  GraphCost cost;
  cost.nodes.resize(module->graph().size());
  for (const size_t i : {1, 2, 3, 4, 5}) cost.nodes[i] = {i == 4 ? 2.0 : 1.0, 0, 0, 0, 16};
  EXPECT_EQ(ops(balance(*module, cost, {.stages = 2})), (std::vector<size_t>{2, 3})) << "not 3, 2, which is quicker";
}

TEST(Balance, HandlesLongGraphs) {
  std::vector<double> seconds(20000, 1.0);
  Chain c = chain(seconds);
  BalanceOptions options;
  options.stages = 8;
  options.bytes_per_second = 1e18;
  const Balance b = balance(*c.module, c.cost, options);
  EXPECT_LT(b.slowest(), 3.0 * 2500 * 1.02);
  EXPECT_EQ(pipeline(*c.module, b.options)->num_stages(), 8);
}

TEST(DescribeCut, SaysOfAChainWhatBalancingSaid) {
  const Chain c = chain(std::vector<double>(6, 0), {8, 8, 2, 8, 8, 8});
  const GraphCost cost = estimate_cost(*c.module);
  BalanceOptions options;
  options.stages = 3;
  options.seconds_per_message = 1e-3;
  const Balance expected = balance(*c.module, cost, options);
  const Balance found = describe_cut(*pipeline(*c.module, expected.options), options);
  ASSERT_EQ(found.stages.size(), 3u);
  for (size_t s = 0; s < 3; ++s) {
    const BalancedStage &a = found.stages[s], &b = expected.stages[s];
    EXPECT_EQ(a.first_node, b.first_node);
    EXPECT_EQ(a.first_op, b.first_op);
    EXPECT_EQ(a.num_ops, b.num_ops);
    EXPECT_EQ(a.bytes_in, b.bytes_in);
    EXPECT_EQ(a.bytes_out, b.bytes_out);
    EXPECT_EQ(a.memory, b.memory);
    EXPECT_DOUBLE_EQ(a.forward, b.forward);
    EXPECT_DOUBLE_EQ(a.communication, b.communication);
  }
  EXPECT_EQ(found.report(), expected.report());
}

TEST(DescribeCut, CountsTiedParametersOnceAStage) {
  State state;
  parameter(state, "w", {4, 4});
  state.add({"v", AttrKind::Parameter, state.get("w").tensor});
  auto pipe = pipeline(
      *model(R"(graph { %x: f32[2, 4] = placeholder "x" %w: f32[4, 4] = get_attr "w" %v: f32[4, 4] = get_attr "v"
    %a: f32[2, 4] = aten::linear(%x, %w) %b: f32[2, 4] = aten::linear(%a, %v) plumb::pipe_split() %c: f32[2, 4] = aten::linear(%b, %w)
    %d: f32[2, 4] = aten::mul.Tensor(%a, %c) output(%d) })",
             state));
  const Balance found = describe_cut(*pipe);
  EXPECT_EQ(found.stages[0].parameter_bytes, 64);
  EXPECT_EQ(found.stages[1].parameter_bytes, 64) << "a copy of its own";
  EXPECT_EQ(found.stages[1].bytes_in, 64) << "%a and %b";
  EXPECT_EQ(found.stages[0].bytes_out, 64);
}

}  // namespace
}  // namespace plumb
