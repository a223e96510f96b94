// The device that tests run on: PLUMB_TEST_DEVICE in the environment, or the CPU.
#pragma once

#include <c10/core/Device.h>

namespace plumb {

// "testdevice" is tests/device/test_device.cpp, which is loaded for it.
c10::Device test_device();

}  // namespace plumb
