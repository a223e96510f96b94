// The few functions of CUDA's driver that start a kernel, opened at run time (libcuda.so.1, of the GPU's driver).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace plumb::cuda {

class Driver {
 public:
  // Throws Error(Unsupported) that says what is missing.
  static const Driver& get();

  // "sm_90", of device `index`.
  std::string architecture(int index) const;

  // Returns "13000": the newest CUDA that it serves.
  std::string version() const;

  // Returns a function of a binary, for device `index`; it stays loaded. Throws Error(ExecutionFailed) with the
  // driver's reason.
  void* load(int index, const std::vector<char>& binary, const char* name) const;

  // Torch's current stream on device `index`, as the driver has it. Through the C interface that torch keeps for
  // compiled models: c10::Stream::native_handle is not in every torch that plumb takes.
  void* current_stream(int index) const;

  // arguments: a pointer to each. `stream`: the driver's handle. Throws Error(ExecutionFailed).
  void launch(void* function, int64_t blocks, int threads, void* stream, void** arguments) const;

 private:
  Driver();
  void check(int result, const std::string& what) const;
  // Makes the device's context, which torch has made, current: a thread that has not used the device yet has none.
  void use(int index) const;

  int32_t (*stream_)(int32_t, void**);
  int (*init_)(unsigned);
  int (*error_)(int, const char**);
  int (*device_)(int*, int);
  int (*attribute_)(int*, int, int);
  int (*version_)(int*);
  int (*current_)(void**);
  int (*retain_)(void**, int);
  int (*set_current_)(void*);
  int (*load_)(void**, const void*);
  int (*function_)(void**, void*, const char*);
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
};

}  // namespace plumb::cuda
