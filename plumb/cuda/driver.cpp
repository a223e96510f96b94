#include "plumb/cuda/driver.h"

#include <dlfcn.h>

#include "plumb/core/error.h"

namespace plumb::cuda {
namespace {

// Attributes of cuda.h: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
constexpr int kMajor = 75, kMinor = 76;

void* opened(const char* name, int flags) {
  if (void* library = dlopen(name, flags)) return library;
  const char* why = dlerror();
  throw Error(ErrorKind::Unsupported, std::string(name) + " cannot be opened: " + (why ? why : "it is not loaded"));
}

template <class F>
void find_in_driver(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function)
    throw Error(ErrorKind::Unsupported, std::string("libcuda.so.1 or libtorch_cuda.so has no function ") + name);
}

}  // namespace

Driver::Driver() {
  find_in_driver(opened("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream", stream_);
  void* library = opened("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  find_in_driver(library, "cuInit", init_);
  find_in_driver(library, "cuGetErrorString", error_);
  find_in_driver(library, "cuDeviceGet", device_);
  find_in_driver(library, "cuDeviceGetAttribute", attribute_);
  find_in_driver(library, "cuDriverGetVersion", version_);
  find_in_driver(library, "cuCtxGetCurrent", current_);
  find_in_driver(library, "cuDevicePrimaryCtxRetain", retain_);
  find_in_driver(library, "cuCtxSetCurrent", set_current_);
  find_in_driver(library, "cuModuleLoadData", load_);
  find_in_driver(library, "cuModuleGetFunction", function_);
  find_in_driver(library, "cuLaunchKernel", launch_);
  check(init_(0), "cuInit");
}

const Driver& Driver::get() {
  static const Driver driver;
  return driver;
}

void Driver::check(int result, const std::string& what) const {
  if (result == 0) return;
  const char* why = nullptr;
  error_(result, &why);
  throw Error(ErrorKind::ExecutionFailed,
              "the CUDA driver's " + what + ": " + (why ? why : "error " + std::to_string(result)));
}

void Driver::use(int index) const {
  void* context = nullptr;
  check(current_(&context), "cuCtxGetCurrent");
  if (context) return;
  int device = 0;
  check(device_(&device, index), "cuDeviceGet");
  check(retain_(&context, device), "cuDevicePrimaryCtxRetain");
  check(set_current_(context), "cuCtxSetCurrent");
}

std::string Driver::architecture(int index) const {
  int device = 0, major = 0, minor = 0;
  check(device_(&device, index), "cuDeviceGet");
  check(attribute_(&major, kMajor, device), "cuDeviceGetAttribute");
  check(attribute_(&minor, kMinor, device), "cuDeviceGetAttribute");
  return "sm_" + std::to_string(10 * major + minor);
}

std::string Driver::version() const {
  int version = 0;
  check(version_(&version), "cuDriverGetVersion");
  return std::to_string(version);
}

void* Driver::current_stream(int index) const {
  void* stream = nullptr;
  if (stream_(index, &stream) != 0)
    throw Error(ErrorKind::ExecutionFailed, "torch does not give its current stream on cuda:" + std::to_string(index));
  return stream;
}

void* Driver::load(int index, const std::vector<char>& binary, const char* name) const {
  use(index);
  void *module = nullptr, *function = nullptr;
  check(load_(&module, binary.data()), "cuModuleLoadData");
  check(function_(&function, module, name), "cuModuleGetFunction");
  return function;
}

void Driver::launch(void* function, int64_t blocks, int threads, void* stream, void** arguments) const {
  check(launch_(function, unsigned(blocks), 1, 1, unsigned(threads), 1, 1, 0, stream, arguments, nullptr),
        "cuLaunchKernel");
}

}  // namespace plumb::cuda
