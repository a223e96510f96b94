#include "plumb/graph/graph_store.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace plumb {
namespace {

TEST(GraphStore, LetsGoOfTheOneThatWasUnusedForLongest) {
  GraphStore<std::string, std::shared_ptr<int>> store(2);
  EXPECT_EQ(store.find("a"), nullptr);
  const auto a = store.add("a", std::make_shared<int>(1));
  store.add("b", std::make_shared<int>(2));
  ASSERT_NE(store.find("a"), nullptr);
  EXPECT_EQ(*store.find("a"), a);
  store.add("c", std::make_shared<int>(3));
  EXPECT_EQ(store.find("b"), nullptr);
  EXPECT_EQ(store.size(), 2U);
  EXPECT_EQ(*store.find("a"), a);
}

}  // namespace
}  // namespace plumb
