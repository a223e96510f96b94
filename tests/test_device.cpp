#include "tests/test_device.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string>

namespace plumb {

c10::Device test_device() {
  static const c10::Device device = [] {
    const char* wanted = std::getenv("PLUMB_TEST_DEVICE");
    const std::string name = wanted && *wanted ? wanted : "cpu";
    if (name.starts_with("testdevice"))
      TORCH_CHECK(dlopen(PLUMB_BINARY_DIR "/libplumb_test_device.so", RTLD_NOW | RTLD_GLOBAL), dlerror());
    return c10::Device(name);
  }();
  return device;
}

}  // namespace plumb
