#include "plumb/cuda/launch.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/cuda/driver.h"
#include "plumb/cuda/kernel_texts.h"
#include "plumb/cuda/kernels.h"
#include "plumb/cuda/self_check.h"

namespace plumb::cuda {
namespace {

// A device's architecture and the kernels that were loaded for it.
struct DeviceState {
  bool usable = true;
  std::string architecture;
  std::unordered_map<std::string, void*> functions;  // by text
};

// A kernel's text with all that it includes.
std::string source_of(const std::string& text) {
  std::string all = text;
  for (const Header& header : kernel_headers()) all += std::string("\n--- ") + header.name + "\n" + header.text;
  return all;
}

std::mutex& state_mutex() {
  static std::mutex mutex;
  return mutex;
}

const Compiler& compiler() {
  static const Compiler opened =
      Compiler::open(at::hasCUDA() ? int(at::detail::getCUDAHooks().versionCUDART() / 1000) : 0);
  return opened;
}

Machine*& machine_for_tests() {
  static Machine* machine = nullptr;
  return machine;
}

bool are_wanted() {
  const char* asked = std::getenv("PLUMB_CUDA_KERNELS");
  return !asked || std::string(asked) != "0";
}

const CubinCache& cache_of_user() {
  static const CubinCache cache = CubinCache::of_user();
  return cache;
}

double patience() {
  const char* given = std::getenv("PLUMB_COMPILER_PATIENCE");
  const double seconds = given ? std::atof(given) : 60;
  return seconds > 0 ? seconds : 60;
}

// Returns the key of a verdict on a kernel: everything that the verdict depends on.
std::string verdict_key(c10::Device device, const std::string& text) {
  const Driver& driver = Driver::get();
  return "right\n" + driver.architecture(device.index()) + " " + driver.version() + "\n" + source_of(text);
}

// The caller holds the mutex: two threads that need one kernel compile it once.
void* function_of(DeviceState& state, int index, const std::string& text) {
  if (auto it = state.functions.find(text); it != state.functions.end()) return it->second;
  if (!are_wanted()) throw Error(ErrorKind::Unsupported, "PLUMB_CUDA_KERNELS=0");
  const Driver& driver = Driver::get();
  if (state.architecture.empty()) state.architecture = driver.architecture(index);
  if (!compiler().knows(state.architecture))
    throw Error(ErrorKind::Unsupported,
                "NVRTC " + compiler().version() + " (" + compiler().path() + ") does not know " + state.architecture);
  const auto binary = compiled(compiler(), cache_of_user(), text, state.architecture, patience());
  return state.functions[text] = driver.load(index, binary, kEntry);
}

}  // namespace

std::vector<char> compiled(const Compiler& compiler, const CubinCache& cache, const std::string& text,
                           const std::string& architecture, double patience) {
  std::string key = "NVRTC " + compiler.version();
  for (const auto& option : Compiler::options(architecture)) key += " " + option;
  key += "\n" + source_of(text);
  if (auto kept = cache.read(key)) return *kept;
  // A compiler that hangs keeps its thread, and what the thread needs.
  std::packaged_task<std::vector<char>()> task(
      [compiler, text, architecture] { return compiler.compile(text, architecture); });
  auto compiling = task.get_future();
  std::thread(std::move(task)).detach();
  if (compiling.wait_for(std::chrono::duration<double>(patience)) != std::future_status::ready)
    throw Error(ErrorKind::ExecutionFailed,
                "the compiler took longer than " + str(patience) + " seconds (PLUMB_COMPILER_PATIENCE)");
  auto binary = compiling.get();
  cache.write(key, binary);
  return binary;
}

int pack_of(const at::Tensor& x, std::initializer_list<const at::Tensor*> tensors) {
  const int n = 16 / int(x.element_size());
  for (const at::Tensor* t : tensors)
    if (t->defined() && reinterpret_cast<uintptr_t>(t->const_data_ptr()) % (n * t->element_size()) != 0) return 1;
  return n;
}

void use_machine(Machine* machine) { machine_for_tests() = machine; }

void* loaded(c10::Device device, const std::string& text) {
  if (is_off(device, text)) return nullptr;
  if (Machine* machine = machine_for_tests()) return machine->loaded(text);
  const c10::DeviceGuard guard(device);
  static std::map<int, DeviceState> states;
  std::lock_guard<std::mutex> lock(state_mutex());
  DeviceState& state = states[device.index()];
  if (!state.usable) return nullptr;
  try {
    return function_of(state, device.index(), text);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::ExecutionFailed) {
      turn_off(device, text, error.message());
      return nullptr;
    }
    state.usable = false;
    TORCH_WARN_ONCE("plumb's CUDA kernels are not used, torch's operators do the same, slower: ", error.message());
    return nullptr;
  }
}

bool checks_kernels() {
  Machine* machine = machine_for_tests();
  return machine ? machine->checks_kernels() : true;
}

bool was_right(c10::Device device, const std::string& text) {
  return !machine_for_tests() && cache_of_user().read(verdict_key(device, text));
}

void note_right(c10::Device device, const std::string& text) {
  if (!machine_for_tests()) cache_of_user().write(verdict_key(device, text), {'1'});
}

void start(c10::Device device, void* kernel, int64_t blocks, std::vector<void*> arguments) {
  if (Machine* machine = machine_for_tests()) return machine->start(kernel, blocks, arguments.data());
  const c10::DeviceGuard guard(device);
  const Driver& driver = Driver::get();
  driver.launch(kernel, blocks, kThreadsOfBlock, driver.current_stream(device.index()), arguments.data());
}

namespace {

class Noting : public Machine {
 public:
  explicit Noting(c10::DeviceType kind) : kind_(kind) {
    use_machine(this);
    register_device_kernels(kind, &numerics_kernels());
    pointwise_parts::register_pointwise_kernels(kind, &pointwise_kernels());
  }
  ~Noting() override {
    pointwise_parts::register_pointwise_kernels(kind_, nullptr);
    register_device_kernels(kind_, nullptr);
    use_machine(nullptr);
  }
  Noting(const Noting&) = delete;
  Noting& operator=(const Noting&) = delete;

  void* loaded(const std::string& text) override {
    const std::lock_guard<std::mutex> guard(lock_);  // backward passes have threads of their own
    texts.push_back(text);
    return nullptr;
  }
  void start(void*, int64_t, void**) override {}

  std::vector<std::string> texts;

 private:
  const c10::DeviceType kind_;
  std::mutex lock_;
};

}  // namespace

std::vector<std::string> noted_kernels(c10::DeviceType kind, const std::function<void()>& call) {
  if (kind == at::kCUDA) throw Error(ErrorKind::InvalidArgument, "kernels of CUDA tensors run, they are not noted");
  Noting noting(kind);
  call();
  return std::move(noting.texts);
}

}  // namespace plumb::cuda
