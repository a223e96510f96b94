#include "plumb/autograd/recompute/recompute_facts.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "plumb/operators/dispatch_keys.h"

namespace plumb {
namespace {

TEST(RecomputeFacts, NameEveryOperatorOnceAndOnesThatGiveATensorFirst) {
  std::set<std::string> seen;
  for (const RecomputeFacts& facts : recompute_facts()) {
    std::istringstream names{std::string(facts.names)};
    for (std::string name; names >> name;) {
      const std::string full = std::string(facts.space) + "::" + name;
      EXPECT_TRUE(seen.insert(full).second) << full << " stands twice";
      const size_t dot = name.find('.');
      const auto op = c10::Dispatcher::singleton().findSchema({std::string(facts.space) + "::" + name.substr(0, dot),
                                                               dot == std::string::npos ? "" : name.substr(dot + 1)});
      ASSERT_TRUE(op) << full << " is no operator: does its overload have a name?";
      EXPECT_TRUE(op->hasKernelForDispatchKey(kRecomputeKey)) << full;
      EXPECT_FALSE(op->schema().is_mutable() && facts.cheap) << full << " writes";
      EXPECT_FALSE(op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                   !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
          << full << " is made of others, whose nodes save for themselves";
      EXPECT_EQ(op->schema().returns().at(0).type()->kind(), c10::TypeKind::TensorType) << full;
      EXPECT_FALSE(facts.cheap && op->hasTag(at::Tag::nondeterministic_seeded)) << full << " draws";
    }
  }
  EXPECT_GT(seen.size(), 50u);
}

}  // namespace
}  // namespace plumb
