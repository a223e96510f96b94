#include "plumb/core/error.h"

#include <gtest/gtest.h>

namespace plumb {
namespace {

TEST(Error, SaysWhatWhereAndRemedyOnLinesOfTheirOwn) {
  Error error(ErrorKind::Capture, "aten::item takes a value out of a tensor", "net.gate (model.py:7)",
              "use torch.where");
  EXPECT_STREQ(error.what(),
               "aten::item takes a value out of a tensor\n  at: net.gate (model.py:7)\n  try: use torch.where");
  EXPECT_EQ(error.kind(), ErrorKind::Capture);
}

TEST(Error, NamesItsKind) {
  EXPECT_EQ(to_string(ErrorKind::InvalidArgument), "InvalidArgument");
  EXPECT_EQ(to_string(ErrorKind::GuardFailed), "GuardFailed");
  EXPECT_EQ(to_string(ErrorKind::Internal), "Internal");
}

TEST(Error, LeavesEmptyPartsOut) { EXPECT_STREQ(Error(ErrorKind::BadFile, "truncated").what(), "truncated"); }

}  // namespace
}  // namespace plumb
