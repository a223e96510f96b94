#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "plumb/pipeline/transport/transport_state.h"

namespace plumb {
namespace {

// A torch that is built for devices, on a machine that has none: torch 2.14 refuses to say whether device 0 is in use.
struct NoDevices final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    TORCH_CHECK(false, "there is no device ", int(index));
  }
};

// In a process of its own, since what is registered with torch stays.
TEST(ByteBufferDeathTest, IsOrdinaryMemoryWhereTorchIsBuiltForDevicesAndThereIsNone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        c10::register_privateuse1_backend("absent");
        at::RegisterPrivateUse1HooksInterface(new NoDevices);
        std::exit(byte_buffer(8).numel() == 8 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace plumb
