#include "tests/test_device.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <set>
#include <string>

#include "plumb/graph/graph_module.h"
#include "plumb/partition/move.h"

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

void move_there(torch::nn::Module& module) {
  if (test_device().is_cpu()) return;
  std::set<c10::TensorImpl*> done;
  auto move = [&](at::Tensor& t) {
    if (!done.insert(t.unsafeGetTensorImpl()).second) return;
    t.unsafeGetTensorImpl()->shallow_copy_from(t.detach().to(test_device()).getIntrusivePtr());
  };
  for (at::Tensor& t : module.parameters()) move(t);
  for (at::Tensor& t : module.buffers()) move(t);
}

void move_there(GraphModule& module) {
  if (test_device().is_cpu()) return;
  std::map<c10::TensorImpl*, at::Tensor> moved;
  const std::vector<Attr> attrs = module.state().attrs();
  for (const Attr& attr : attrs) {
    if (!attr.tensor.defined()) continue;
    at::Tensor& to = moved[attr.tensor.unsafeGetTensorImpl()];
    if (!to.defined()) to = there(attr.tensor);
    module.state().set(attr.name, to, attr.kind);
  }
  rewrite_devices(module.graph(), test_device());
  module.sync_module();
}

// Before a backward pass: autograd makes the threads of the devices that there are by then.
[[maybe_unused]] static const c10::Device kLoadedAtStart = test_device();

}  // namespace plumb
