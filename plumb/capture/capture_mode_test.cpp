#include "plumb/capture/capture_mode.h"

#include <gtest/gtest.h>

#include <string>

namespace plumb {
namespace {

std::string text(const std::optional<CaptureMode>& mode) {
  if (!mode) return "none";
  std::string flags = mode->skip_compute ? "skip" : "compute";
  if (mode->open_composites) flags += " open";
  if (mode->tell_libraries) flags += " tell";
  if (mode->guard_values) flags += " guard";
  return flags;
}

constexpr AllowedModes kPlain{}, kLibraries{true, true}, kGuards{true, false, true}, kAll{true, true, true, true};

TEST(CaptureMode, BeginsWithTheCheapest) {
  EXPECT_EQ(text(first_mode(kAll, false)), "skip");
  EXPECT_EQ(text(first_mode({false}, false)), "compute");
}

TEST(CaptureMode, GuardsAtOnceWhereItIsAskedTo) {
  EXPECT_EQ(text(first_mode(kGuards, true)), "skip guard");
  EXPECT_EQ(text(first_mode(kAll, true)), "skip tell guard");
}

TEST(CaptureMode, ComputesWhenValuesAreNeeded) {
  EXPECT_EQ(text(next_mode({true}, RetryReason::NeedsValues, kPlain)), "compute");
  EXPECT_EQ(text(next_mode({true, true}, RetryReason::NeedsValues, kPlain)), "compute open");
  EXPECT_EQ(text(next_mode({false}, RetryReason::NeedsValues, kAll)), "none");
}

TEST(CaptureMode, OpensCompositesOnce) {
  EXPECT_EQ(text(next_mode({true}, RetryReason::NeedsComposites, kPlain)), "skip open");
  EXPECT_EQ(text(next_mode({false}, RetryReason::NeedsComposites, kPlain)), "compute open");
  EXPECT_EQ(text(next_mode({true, true}, RetryReason::NeedsComposites, kAll)), "none");
}

TEST(CaptureMode, TellsLibrariesBeforeItGuards) {
  EXPECT_EQ(text(next_mode({false, true}, RetryReason::LibraryBranches, kAll)), "skip tell");
  EXPECT_EQ(text(next_mode({true, false, true}, RetryReason::LibraryBranches, kAll)), "skip tell guard");
  EXPECT_EQ(text(next_mode({true, false, true}, RetryReason::LibraryBranches, kLibraries)), "none");
}

TEST(CaptureMode, TellsLibrariesNoMoreWhereTheirOtherWayFails) {
  EXPECT_EQ(text(next_mode({true, false, true}, RetryReason::LibraryFails, kAll)), "skip guard");
  EXPECT_EQ(text(next_mode(first_mode(kAll, true), RetryReason::LibraryFails, kAll)), "skip guard");
  EXPECT_EQ(text(next_mode({true, false, true}, RetryReason::LibraryFails, kLibraries)), "none");
}

TEST(CaptureMode, GuardsValuesOnlyWhereThatIsAllowed) {
  EXPECT_EQ(text(next_mode({false}, RetryReason::DataDependent, kGuards)), "skip guard");
  EXPECT_EQ(text(next_mode({false}, RetryReason::DataDependent, kPlain)), "none");
  EXPECT_EQ(text(next_mode({false}, RetryReason::DataDependent, kLibraries)), "none");
  EXPECT_EQ(text(next_mode(first_mode(kAll, true), RetryReason::DataDependent, kAll)), "none");
}

}  // namespace
}  // namespace plumb
