#include "plumb/transforms/module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/transforms/fold/fold.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/formats/use_fp8.h"
#include "plumb/transforms/track/track_scales.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

TEST(TransformedModule, NoTransformTakesANullPointer) {
  const std::shared_ptr<GraphModule> none;
  const std::function<void()> transforms[] = {[&] { unit_scale(none); }, [&] { unit_scale_preserving(none); },
                                              [&] { fold(none); },       [&] { simulate_fp8(none); },
                                              [&] { use_fp8(none); },    [&] { track_scales(none); }};
  for (const auto& transform : transforms) EXPECT_THAT(message_of(transform), testing::HasSubstr("a null pointer"));
}

}  // namespace
}  // namespace plumb
