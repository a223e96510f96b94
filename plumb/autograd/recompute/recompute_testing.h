// Helper of tests on results that are not kept.
#pragma once

#include <gtest/gtest.h>

#include "plumb/autograd/recompute/recompute_recipe.h"

// Skips a test where every result is kept (kCanFill).
#define PLUMB_SKIP_IF_ALL_IS_KEPT() \
  if (!plumb::kCanFill<c10::StorageImpl>) GTEST_SKIP() << "torch before 2.12 cannot fill an emptied storage again"
