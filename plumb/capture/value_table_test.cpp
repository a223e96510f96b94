#include "plumb/capture/call_recorder.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace plumb {
namespace {

int add_and_bind(ValueTable& table, const at::Tensor& t) {
  const int value = table.add(t, RecordedValue::Result);
  table.bind(t, value);
  return value;
}

TEST(ValueTable, FindsATensorByItsObject) {
  ValueTable table;
  const at::Tensor x = at::ones({2}), y = at::ones({2});
  const int value = add_and_bind(table, x);
  EXPECT_EQ(table.find_object(x), value);
  EXPECT_FALSE(table.find(x).by_memory);
  EXPECT_EQ(table.find(y).value, -1);
}

TEST(ValueTable, FindsAnotherObjectThatShowsTheSameMemoryInTheSameWay) {
  ValueTable table;
  const at::Tensor x = at::ones({2, 3});
  const int value = add_and_bind(table, x);
  const at::Tensor same = x.view({2, 3});
  EXPECT_EQ(table.find_object(same), -1);
  EXPECT_EQ(table.find(same).value, value);
  EXPECT_TRUE(table.find(same).by_memory);
}

TEST(ValueTable, TakesOtherViewsOfTheMemoryForOtherTensors) {
  ValueTable table;
  const at::Tensor x = at::ones({2, 2});
  add_and_bind(table, x);
  EXPECT_EQ(table.find(x.t()).value, -1);
  EXPECT_EQ(table.find(x[0]).value, -1);
  EXPECT_EQ(table.find(x.view(at::kInt)).value, -1);
}

TEST(ValueTable, TakesTheLatestValueOfAMemory) {
  ValueTable table;
  const at::Tensor x = at::ones({2});
  add_and_bind(table, x);
  const at::Tensor again = x.view({2});
  const int later = add_and_bind(table, again);
  EXPECT_EQ(table.find(x.view({2})).value, later);
}

TEST(ValueTable, KeepsTheAddressOfATensorThatIsGone) {
  ValueTable table;
  for (int i = 0; i < 100; ++i) add_and_bind(table, at::ones({4}));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(table.find(at::ones({4})).value, -1);
}

TEST(ValueTable, LeavesTheUseCountAlone) {
  ValueTable table;
  const at::Tensor x = at::ones({4});
  add_and_bind(table, x);
  EXPECT_EQ(x.use_count(), 1);
}

TEST(ValueTable, MarksEveryValueOfAWrittenStorageAndNoOther) {
  ValueTable table;
  const at::Tensor x = at::ones({4}), part = x.slice(0, 0, 2), y = at::ones({4});
  const int a = add_and_bind(table, x), b = add_and_bind(table, part), c = add_and_bind(table, y);
  table.mark_written(part);
  EXPECT_TRUE(table[a].written);
  EXPECT_TRUE(table[b].written);
  EXPECT_FALSE(table[c].written);
}

TEST(ValueTable, ForgetsDroppedResultsAndKeepsConstants) {
  ValueTable table;
  const at::Tensor x = at::ones({2}), y = at::ones({2}), c = at::ones({2});
  const int kept = add_and_bind(table, x);
  const size_t before = table.size();
  add_and_bind(table, y);
  const int constant = table.add(c, RecordedValue::Attribute);
  table.bind(c, constant);
  table.drop_results(before);
  EXPECT_EQ(table.find(x).value, kept);
  EXPECT_EQ(table.find(y).value, -1);
  EXPECT_EQ(table.find(c).value, constant);
}

TEST(ValueTable, ATensorIsAgainWhatItWasBeforeResultsThatWereDropped) {
  ValueTable table;
  const at::Tensor x = at::ones({2});
  const int kept = add_and_bind(table, x);
  const size_t before = table.size();
  table.bind(x, table.add(x, RecordedValue::Result));  // as of an operator that returns its argument
  table.bind(x, table.add(x, RecordedValue::Result));
  table.drop_results(before);
  EXPECT_EQ(table.find(x).value, kept);
  EXPECT_EQ(table.find(x.detach()).value, kept);
}

}  // namespace
}  // namespace plumb
