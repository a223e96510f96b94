#include "plumb/operators/dispatch_keys.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "plumb/autograd/recompute/recompute_facts.h"

namespace plumb {
namespace {

constexpr const char* kLookAtKeys = "torch changed: look at plumb/operators/dispatch_keys.h";

TEST(DispatchKeys, AreStillSpareKeysOfTorch) {
  EXPECT_STREQ(c10::toString(kCaptureKey), "TESTING_ONLY_GenericMode") << kLookAtKeys;
  EXPECT_STREQ(c10::toString(kRecomputeKey), "TESTING_ONLY_GenericWrapper") << kLookAtKeys;
  std::set<std::string> own;
  for (const RecomputeFacts& facts : recompute_facts()) {
    std::istringstream names{std::string(facts.names)};
    for (std::string name; names >> name;) own.insert(std::string(facts.space) + "::" + name);
  }
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op) continue;
    EXPECT_FALSE(op->hasKernelForDispatchKey(kCaptureKey)) << c10::toString(name) << ": " << kLookAtKeys;
    if (!own.contains(c10::toString(name)))
      EXPECT_FALSE(op->hasKernelForDispatchKey(kRecomputeKey)) << c10::toString(name) << ": " << kLookAtKeys;
  }
}

}  // namespace
}  // namespace plumb
