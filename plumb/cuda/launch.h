// Kernels by their texts: compiled or read from disk at the first use on a device, started on torch's current stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "plumb/cuda/compiler.h"
#include "plumb/cuda/cubin_cache.h"

namespace plumb::cuda {

constexpr int kThreadsOfBlock = 128;  // device.cuh's kThreads

// Takes a kernel from the cache or the compiler, and puts it into the cache. Throws Error(ExecutionFailed) if the
// compiler fails or takes longer than `patience` seconds.
std::vector<char> compiled(const Compiler& compiler, const CubinCache& cache, const std::string& text,
                           const std::string& architecture, double patience = 60);

// Returns the loaded kernel. Null where this machine cannot: without NVRTC, or on an architecture that it does not
// know, for the whole device; if the kernel does not compile within PLUMB_COMPILER_PATIENCE seconds (60) or does not
// load, for this kernel. That is said once, as a warning. PLUMB_CUDA_KERNELS=0 in the environment asks for it.
void* loaded(c10::Device device, const std::string& text);

// For self_check.h. Whether kernels are checked at all: tests' machines say so themselves. Whether an earlier process
// found a kernel right, with this device, driver and text; and notes that this one did.
bool checks_kernels();
bool was_right(c10::Device device, const std::string& text);
void note_right(c10::Device device, const std::string& text);

// Returns how many neighbors move together: 16 bytes of x's type, where the memory of all of these allows it.
int pack_of(const at::Tensor& x, std::initializer_list<const at::Tensor*> tensors);

// Replaces the GPU, for tests; null restores it.
struct Machine {
  virtual ~Machine() = default;
  virtual void* loaded(const std::string& text) = 0;
  virtual void start(void* kernel, int64_t blocks, void** arguments) = 0;
  virtual bool checks_kernels() { return false; }
};
void use_machine(Machine* machine);

// Starts a kernel of loaded(); arguments: a pointer to each. Throws Error(ExecutionFailed).
void start(c10::Device device, void* kernel, int64_t blocks, std::vector<void*> arguments);

// Returns the texts of the kernels that operators would run on CUDA tensors, of what `call` does with tensors of
// `kind`, which is not CUDA. torch's operators do the work. One call at a time.
std::vector<std::string> noted_kernels(c10::DeviceType kind, const std::function<void()>& call);

}  // namespace plumb::cuda
