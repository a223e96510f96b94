#include "plumb/graph/graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/graph/node_set.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TensorMeta f32(std::vector<int64_t> sizes) {
  TensorMeta m;
  m.sizes = std::move(sizes);
  m.strides = contiguous_strides(m.sizes);
  return m;
}

TEST(Graph, FillsInTheSchemasDefaults) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Node* add = g.call("aten::add.Tensor", {x, x});
  ASSERT_EQ(add->args().size(), 3u);
  EXPECT_EQ(add->arg("alpha").constant().toInt(), 1);
  EXPECT_EQ(add->num_inputs(), 2u);
  EXPECT_EQ(x->uses().size(), 2u);
  EXPECT_THAT(x->users(), ElementsAre(add));
}

TEST(Graph, RefusesArgumentsThatDoNotFitTheSchema) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  EXPECT_THAT(message_of([&] { g.call("aten::relu", {x, x}); }), HasSubstr("takes 1 arguments, got 2"));
  EXPECT_THAT(message_of([&] { g.call("aten::sum.dim_IntList", {x, "three"}); }), HasSubstr("argument 'dim'"));
  EXPECT_THAT(message_of([&] { g.call("aten::linear", {x}); }), HasSubstr("argument 'weight' is missing"));
  EXPECT_THAT(message_of([&] { g.call("aten::add.Tensr", {x, x}); }), HasSubstr("one of its overloads"));
  for (const Arg& nothing : {Arg(), Arg(c10::IValue(at::Tensor()))}) {
    EXPECT_THAT(message_of([&] { g.call("aten::copy", {nothing, x}); }), HasSubstr("'self' takes Tensor, got None"));
    EXPECT_THAT(message_of([&] { g.call("aten::cat", {Arg::List{x, nothing}}); }), HasSubstr("got None"));
    EXPECT_TRUE(g.call("aten::linear", {3, 4, nothing})->arg("bias").is_none()) << "None for what may be left out";
  }
  EXPECT_EQ(x->uses().size(), 0u) << "a refused call leaves no uses behind";
}

TEST(Graph, SaysWhichNodeHasNoSuchInput) {
  Graph g;
  const Node* numbers = g.call("aten::add.Tensor", {g.placeholder("x")->result(), 3});
  EXPECT_EQ(numbers->input(0)->name(), "x");
  EXPECT_THAT(message_of([&] { numbers->input(1); }), HasSubstr("node %add (aten::add.Tensor) has 1 inputs, not 2"));
}

TEST(TensorMeta, CountsElementsOfAbsurdSizesWithoutOverflow) {
  EXPECT_EQ((TensorMeta{.sizes = {2, 3, 4}}).numel(), 24);
  EXPECT_EQ((TensorMeta{.sizes = {INT64_MAX, INT64_MAX, 0}}).numel(), 0);
  EXPECT_EQ((TensorMeta{.sizes = {INT64_MAX, 3}}).numel(), INT64_MAX >> 20);
}

TEST(Graph, RepeatsASingleIntForAnIntListOfFixedLength) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Node* pool = g.call("aten::max_pool2d", {x, 3});
  EXPECT_EQ(pool->arg("kernel_size").constant().toIntVector(), (std::vector<int64_t>{3, 3}));
}

TEST(Graph, MovesEveryUseOfAValue) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Value* y = g.placeholder("y")->result();
  Node* cat = g.call("aten::cat", {Arg::List{x, y, x}});
  Node* add = g.call("aten::add.Tensor", {x, y});
  g.output({cat->result(), add->result(), x});
  g.replace_all_uses_with(x, y);
  EXPECT_FALSE(x->has_uses());
  EXPECT_EQ(y->uses().size(), 6u);
  EXPECT_NO_THROW(lint(g));
  EXPECT_EQ(cat->arg(0).list()[2].value(), y);
}

TEST(Graph, LeavesUsesByTheExceptedNodeAlone) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Node* relu = g.call("aten::relu", {x});
  Node* add = g.call("aten::add.Tensor", {x, x});
  g.output({add->result(), relu->result()});
  g.replace_all_uses_with(x, relu->result(), relu);
  EXPECT_EQ(relu->input(0), x);
  EXPECT_EQ(add->input(0), relu->result());
  EXPECT_NO_THROW(lint(g));
}

TEST(Graph, InsertsBeforeAndAfterWithoutLosingTheOrder) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Node* last = g.call("aten::relu", {x});
  g.output({last->result()});
  Node* before = last;
  // Halving a gap of 2^32 runs out after 32 insertions: the positions are renumbered on the way.
  for (int i = 0; i < 200; ++i) {
    auto here = g.inserting_before(before);
    before = g.call("aten::neg", {x});
  }
  EXPECT_NO_THROW(lint(g));
  EXPECT_TRUE(before->is_before(last));
  auto here = g.inserting_after(last);
  Node* after = g.call("aten::neg", {last->result()});
  EXPECT_TRUE(last->is_before(after));
  EXPECT_EQ(g.last(), g.output_node());
}

TEST(Graph, RefusesToEraseWhatIsUsed) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Node* relu = g.call("aten::relu", {x});
  g.output({relu->result()});
  EXPECT_THAT(message_of([&] { g.erase(relu); }), HasSubstr("%relu is used by the output node"));
}

TEST(Graph, RefusesNullPointersAndNodesOfOtherGraphs) {
  Graph g, other;
  Value* x = g.placeholder("x")->result();
  Value* const none = nullptr;
  Node* sum = g.call("aten::add.Tensor", {x, x});
  EXPECT_THAT(message_of([&] { g.call("aten::relu", {none}); }), HasSubstr("argument 'self' is a null pointer"));
  EXPECT_THAT(message_of([&] { g.call("aten::cat", {Arg(Arg::List{x, none})}); }), HasSubstr("is a null pointer"));
  EXPECT_THAT(message_of([&] { sum->set_arg(0, none); }), HasSubstr("argument 'self' is a null pointer"));
  EXPECT_THAT(message_of([&] { sum->set_input(1, none); }), HasSubstr("input 1 of node %add"));
  EXPECT_THAT(message_of([&] { g.output({none}); }), HasSubstr("an output of the graph is a null pointer"));
  EXPECT_THAT(message_of([&] { g.erase(nullptr); }), HasSubstr("not of this graph"));
  EXPECT_THAT(message_of([&] { other.erase(sum); }), HasSubstr("not of this graph"));
  g.output({sum->result()});
  EXPECT_NO_THROW(lint(g));
}

TEST(Graph, GivesEveryElementOfAReturnedListAValue) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Node* split = g.call("aten::split.Tensor", {x, 2}, {3});
  EXPECT_EQ(split->num_results(), 3u);
  EXPECT_THAT(split->result_layout(), ElementsAre(3));
  EXPECT_THAT(message_of([&] { g.call("aten::split.Tensor", {x, 2}); }), HasSubstr("returns a list"));
}

TEST(Graph, KnowsWhatANodeWrites) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Value* m = g.get_attr("bn.running_mean")->result();
  Value* v = g.get_attr("bn.running_var")->result();
  Node* add = g.call("aten::add_.Tensor", {x, 1});
  EXPECT_THAT(add->written_inputs(), ElementsAre(x));
  Node* train = g.call("aten::batch_norm", {x, std::nullopt, std::nullopt, m, v, true, 0.1, 1e-5, false});
  EXPECT_THAT(train->written_inputs(), ElementsAre(m, v)) << "batch_norm's schema does not say so";
  Node* eval = g.call("aten::batch_norm", {x, std::nullopt, std::nullopt, m, v, false, 0.1, 1e-5, false});
  EXPECT_FALSE(eval->writes());
  EXPECT_TRUE(g.call("aten::dropout", {x, 0.5, true})->is_random());
  EXPECT_FALSE(g.call("aten::dropout", {x, 0.5, false})->is_random());
  EXPECT_FALSE(g.call("aten::scaled_dot_product_attention", {x, x, x})->is_random());
  EXPECT_TRUE(g.call("aten::view", {x, Arg::List{-1}})->result_aliases_input());
  EXPECT_FALSE(g.call("aten::linear", {x, x})->result_aliases_input());
}

TEST(Graph, ClonesIntoAnEqualGraphOfItsOwn) {
  Graph g;
  Value* x = g.placeholder("x", f32({2, 3}))->result();
  Node* relu = g.call("aten::relu", {x});
  g.output({relu->result()});
  std::unordered_map<const Node*, Node*> map;
  Graph copy = g.clone(&map);
  EXPECT_EQ(to_string(copy), to_string(g));
  EXPECT_NO_THROW(lint(copy));
  EXPECT_NE(map.at(relu), relu);
  copy.erase(copy.output_node());
  EXPECT_NE(g.output_node(), nullptr);
}

TEST(NodeSet, KnowsItsNodesWhateverIsErasedAndMadeMeanwhile) {
  Graph g;
  Value* x = g.placeholder("x", f32({2, 3}))->result();
  NodeSet set;
  EXPECT_TRUE(set.insert(x->producer()));
  EXPECT_FALSE(set.insert(x->producer()));
  for (int i = 0; i < 100; ++i) {  // some of them where an erased one was
    Node* node = g.call("aten::relu", {x});
    EXPECT_FALSE(set.contains(node));
    EXPECT_TRUE(set.insert(node));
    EXPECT_TRUE(set.contains(node));
    g.erase(node);
  }
  Graph moved = std::move(g);
  EXPECT_TRUE(set.contains(x->producer()));
  EXPECT_TRUE(set.erase(x->producer()));
  EXPECT_FALSE(set.contains(x->producer()) || set.erase(x->producer()));
  EXPECT_FALSE(set.contains(moved.call("aten::relu", {x})));
}

TEST(Lint, FindsAMissingOutput) {
  Graph g;
  g.placeholder("x");
  EXPECT_THAT(message_of([&] { lint(g); }), HasSubstr("no output node"));
}

TEST(Lint, FindsAUseBeforeItsProducer) {
  Graph g;
  Value* x = g.placeholder("x")->result();
  Node* a = g.call("aten::relu", {x});
  Value* b = nullptr;
  {
    const auto earlier = g.inserting_before(a);
    b = g.call("aten::neg", {a->result()})->result();
  }
  g.output({b});
  EXPECT_THAT(message_of([&] { lint(g); }), HasSubstr("uses %relu before it is produced"));
}

TEST(Graph, IsBuiltCheckedPrintedAndParsedAtAHundredThousandNodes) {
  Graph g;
  Value* x = g.placeholder("x", f32({16}))->result();
  for (int i = 0; i < 100'000; ++i) {
    Node* n = g.call("aten::mul.Tensor", {x, 1.0001});
    n->result()->set_meta(f32({16}));
    x = n->result();
  }
  g.output({x});
  EXPECT_NO_THROW(lint(g));
  const std::string text = to_string(g);
  Graph again = parse_graph(text);
  EXPECT_EQ(to_string(again), text);
}

}  // namespace
}  // namespace plumb
