// A device for tests: "testdevice", two of them, on torch's PrivateUse1. Its memory is the host's, mapped twice.
// Tensors hold the address that may not be accessed, so that code that takes it for CPU memory is stopped by the
// processor (SIGSEGV); kernels use the other one. Operators run the CPU's kernels on copies, backwards in autograd's
// threads for the device; a copy waits for the earlier work of its stream (streams.h). Random numbers are the CPU
// generator's, from a state of the device's own.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "tests/device/arena.h"
#include "tests/device/streams.h"
#include "tests/device/strict_backend.h"

namespace {

using at::Tensor;
using plumb_test::Arena;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// --- memory

thread_local c10::DeviceIndex current_device = 0;

struct Allocator final : c10::DeviceAllocator {
  // Reports to the profiler, as CUDA's allocator does.
  static void report(void* address, int64_t bytes) {
    c10::reportMemoryUsageToProfiler(address, bytes, Arena::get().live(), Arena::get().live(), {kDevice, 0});
  }
  static void release(void* address) { report(address, -int64_t(Arena::get().release(address))); }
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes ? Arena::get().allocate(bytes) : nullptr;
    if (at) report(at, int64_t(bytes));
    return {at, at, at ? &release : nullptr, c10::Device(kDevice, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(Arena::get().host(to), Arena::get().host(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  // Counts both devices: they share their memory.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[size_t(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes.current = int64_t(Arena::get().live());
    bytes.peak = int64_t(Arena::get().peak());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

// Memory of the host, where copies to and from the device end; nothing but a name here.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    ++buffers;
    return c10::GetCPUAllocator()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  std::atomic<int64_t> buffers = 0;
};
PinnedAllocator pinned;

// The tensor's memory as the CPU sees it; of a CPU tensor itself.
Tensor on_host(const Tensor& t) {
  if (t.is_cpu()) return t;
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(Arena::get().host(t.const_data_ptr()), t.sizes(), t.strides(), options);
}

c10::Stream stream_of(const Tensor& t) { return plumb_test::current_stream(t.device().index()); }

// Waits for what this thread's stream of t's device has to do, and makes sure that t's memory may be used then.
void before_access(const Tensor& t, bool writes) {
  if (!t.is_privateuseone() || t.numel() == 0) return;
  plumb_test::drain(stream_of(t));
  const size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size());
  plumb_test::check_access(Arena::get().host(t.const_data_ptr()), bytes, writes);
}

// --- devices and streams

// How often the host has read the device's memory, or waited for it: in whatever is not the device's own work.
std::atomic<int64_t> host_reads = 0;
thread_local bool working = false;

// Below it nothing is the host's doing.
struct Working {
  Working() : before(std::exchange(working, true)) {}
  ~Working() { working = before; }
  const bool before;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no ", device);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  static c10::DeviceIndex index_of(c10::Device device) { return device.index() < 0 ? current_device : device.index(); }
  c10::Stream getStream(c10::Device device) const override { return plumb_test::current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDevice, index_of(device)});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, index_of(device)}, 1);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return plumb_test::exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return plumb_test::is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!working) ++host_reads;
    plumb_test::drain(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (!working) ++host_reads;
    for (c10::StreamId id = 0; id < 2; ++id) plumb_test::drain(c10::Stream(c10::Stream::UNSAFE, {kDevice, index}, id));
  }
  using Event = std::shared_future<void>;  // ready when it was reached
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = plumb_test::marker(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!queryEvent(event)) plumb_test::enqueue(stream, [e = *static_cast<Event*>(event)] { e.wait(); });
  }
  bool queryEvent(void* event) const override {
    return !event || static_cast<Event*>(event)->wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void synchronizeEvent(void* event) const override {
    if (!working) ++host_reads;
    if (event) static_cast<Event*>(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- random numbers

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index)
      : GeneratorImpl({kDevice, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        own(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { own.set_offset(offset); }
  uint64_t get_offset() const override { return own.get_offset(); }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return own.seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->own = own.clone();
    return copy;
  }
  mutable at::Generator own;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const at::Generator generators[kDevices] = {at::make_generator<DeviceGenerator>(0),
                                                     at::make_generator<DeviceGenerator>(1)};
  return generators[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr larger = allocator.allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes()))
      allocator.copy_data(larger.mutable_get(), storage.data(), kept);
    larger.unsafe_set_device(storage.device());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
};

// --- operators that are not the CPU's on copies

struct OnDevice {
  explicit OnDevice(std::optional<at::Device> device) : before(current_device) {
    if (device && device->index() >= 0) current_device = device->index();
  }
  ~OnDevice() { current_device = before; }
  c10::DeviceIndex before;
};

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice on(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           at::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (!working && to.is_cpu()) ++host_reads;
  if (from.device() == to.device() && !plumb_test::is_idle(stream_of(to))) {  // the host goes on
    plumb_test::enqueue(stream_of(to), [from, to] { on_host(to).copy_(on_host(from)); });
    return to;
  }
  before_access(from, false);
  before_access(to, true);
  on_host(to).copy_(on_host(from));
  return to;
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = size_t(self.storage_offset() + self.numel()) * self.element_size();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& x) {
  if (!working) ++host_reads;
  before_access(x, false);
  return on_host(x).item();
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && size.size() != 0) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}
Tensor& set_whole(Tensor& self, at::Storage source) {
  const auto count = int64_t(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Nothing is done later than it is asked for.
void record_stream(Tensor&, c10::Stream) {}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  const Working work;
  const Tensor b = bias && bias->defined() ? bias->cpu() : Tensor();
  return at::convolution(input.cpu(), weight.cpu(), b, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  const Working work;
  const int64_t outputs = weight.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto [x, w, b] = at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), at::IntArrayRef{outputs}, stride,
                                            padding, dilation, transposed, output_padding, groups, mask);
  const auto back = [&](const Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {back(x), back(w), back(b)};
}

// torch's schema does not say that these statistics are written, so that copies of them would be lost.
std::tuple<Tensor, Tensor, Tensor> native_batch_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const std::optional<Tensor>& mean,
                                                     const std::optional<Tensor>& var, bool training, double momentum,
                                                     double eps) {
  const Working work;
  before_access(input, false);
  const auto here = [](const std::optional<Tensor>& t) {
    return t && t->defined() ? std::optional(on_host(*t)) : std::nullopt;
  };
  const auto [result, saved_mean, saved_rstd] =
      at::native_batch_norm(on_host(input), here(weight), here(bias), here(mean), here(var), training, momentum, eps);
  return {result.to(input.device()), saved_mean.to(input.device()), saved_rstd.to(input.device())};
}

// Draws from the device's generator in place of the CPU's.
class Draws {
 public:
  Draws(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    c10::DeviceIndex index = current_device;
    auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[stack->size() - arguments.size() + i];
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone())
        index = value.toTensor().device().index();
      if (value.isGenerator() && value.toGenerator().device().type() == kDevice) {
        value = value.toGenerator().get<DeviceGenerator>()->own;
        return;
      }
    }
    own_ = &default_generator(index).get<DeviceGenerator>()->own;
    swap();
  }
  ~Draws() {
    if (own_) swap();
  }
  Draws(const Draws&) = delete;

 private:
  void swap() {
    auto cpu = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(cpu.mutex());
    const Tensor state = cpu.get_state();
    cpu.set_state(own_->get_state());
    own_->set_state(state);
  }
  at::Generator* own_ = nullptr;
};

// torch's fallback gives operators that fill a tensor another one than they would make; they resize it and warn.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("was resized since it had shape") == std::string::npos) before->process(warning);
  }
  c10::WarningHandler* const before = c10::WarningUtils::get_warning_handler();
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  // Results that depend on values make the host wait on any device.
  static const auto& waits =
      *new std::set<std::string>{"aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2"};
  if (!working && waits.count(op.schema().name())) ++host_reads;
  const Working work;
  const Draws draws(op, stack);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// --- for Python's torch.testdevice

void manual_seed(int64_t seed) {
  for (c10::DeviceIndex i = 0; i < kDevices; ++i) {
    auto generator = default_generator(i);
    std::lock_guard lock(generator.mutex());
    generator.set_current_seed(uint64_t(seed));
  }
}
Tensor get_rng_state(int64_t index) { return default_generator(c10::DeviceIndex(index)).get_state(); }
void set_rng_state(const Tensor& state, int64_t index) {
  at::Generator(default_generator(c10::DeviceIndex(index))).set_state(state);
}
int64_t reads_by_host() { return host_reads; }
int64_t pinned_buffers() { return pinned.buffers; }
int64_t get_device() { return current_device; }
// Waits until autograd's threads let go of the last backward: a thread that asks for Python's lock as Python ends
// aborts the process. This backward begins in a thread that has nothing of Python's.
void finish_backward() {
  const auto of = [](int i) { at::ones({}, at::Device(at::kPrivateUse1, i)).requires_grad_().mul(2).backward(); };
  for (int i = 0; i < kDevices; ++i) std::async(std::launch::async, of, i).get();
}
// x, after a time in which the device computes and the host goes on.
Tensor compute(const Tensor& x, double seconds) {
  const Tensor from = x.detach().contiguous(), to = at::empty_like(from);
  plumb_test::enqueue(stream_of(to), [from, to, seconds] {
    const double begin = plumb_test::clock_now();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    plumb_test::check_access(Arena::get().host(from.const_data_ptr()), from.nbytes(), false);
    plumb_test::check_access(Arena::get().host(to.const_data_ptr()), to.nbytes(), true);
    on_host(to).copy_(on_host(from));
    plumb_test::note_activity("compute", begin, plumb_test::clock_now());
  });
  return to;
}
// Values of the device go through the strict backend in this group from now on.
void use_strict_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t timeout_ms) {
  group->setBackend(kDevice, c10d::ProcessGroup::BackendType::CUSTOM,
                    plumb_test::make_strict_backend(group->getStore(), group->getRank(), group->getSize(),
                                                    std::chrono::milliseconds(timeout_ms)));
}
void set_device(int64_t index) { Guard().setDevice({kDevice, c10::DeviceIndex(index)}); }

struct Register {
  Register() {
    c10::register_privateuse1_backend("testdevice");
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} at_load;

}  // namespace

// For kernels that a test runs in the place of the device's (plumb/cuda/emulator_testing.h).
extern "C" void plumb_test_device_open(bool wanted) { Arena::get().open(wanted); }

at::Tensor plumb_test::memory_of(const at::Tensor& tensor) { return on_host(tensor); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("native_batch_norm", native_batch_norm);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m){
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
    AT_FORALL_LOWER_PRECISION_FP(LOWER) AT_FORALL_FP32(FLOAT32)} TORCH_LIBRARY(plumb_test_device, m) {
  m.def("manual_seed(int seed) -> ()", manual_seed);
  m.def("get_rng_state(int index) -> Tensor", get_rng_state);
  m.def("set_rng_state(Tensor state, int index) -> ()", set_rng_state);
  m.def("get_device() -> int", get_device);
  m.def("host_reads() -> int", reads_by_host);
  m.def("pinned_buffers() -> int", pinned_buffers);
  m.def("finish_backward() -> ()", finish_backward);
  m.def("compute(Tensor x, float seconds) -> Tensor", compute);
  m.def("activities() -> str", plumb_test::activities);
  m.def("set_device(int index) -> ()", set_device);
  m.def("use_strict_backend(__torch__.torch.classes.c10d.ProcessGroup group, int timeout_ms) -> ()",
        use_strict_backend);
}
