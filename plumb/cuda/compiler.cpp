#include "plumb/cuda/compiler.h"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "plumb/core/error.h"
#include "plumb/cuda/kernel_texts.h"

namespace plumb::cuda {

namespace fs = std::filesystem;

// Functions of nvrtc.h; a result of zero is success.
struct Compiler::Functions {
  using Program = void*;
  int (*version)(int*, int*);
  int (*count_architectures)(int*);
  int (*list_architectures)(int*);
  const char* (*error)(int);
  int (*create)(Program*, const char* text, const char* name, int headers, const char* const* texts,
                const char* const* names);
  int (*destroy)(Program*);
  int (*compile)(Program, int options, const char* const* values);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*binary_size)(Program, size_t*);
  int (*binary)(Program, char*);
};

namespace {

std::vector<fs::path> files_like(const fs::path& folder, const std::string& prefix) {
  std::vector<fs::path> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none))
    if (entry.path().filename().string().starts_with(prefix)) found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

// site-packages/torch/lib/libc10.so: wheels of NVIDIA's libraries lie beside torch.
fs::path packages_folder() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&c10::GetCPUAllocator), &info) || !info.dli_fname) return {};
  return fs::path(info.dli_fname).parent_path().parent_path().parent_path();
}

// "libnvrtc.so.13" and the like, the preferred version first.
std::vector<fs::path> candidates(int major) {
  if (const char* named = std::getenv("PLUMB_NVRTC"); named && *named) return {named};
  std::vector<fs::path> found;
  auto look_in = [&](const fs::path& folder) {
    auto files = files_like(folder, "libnvrtc.so.");
    found.insert(found.end(), files.rbegin(), files.rend());
  };
  std::error_code none;
  const fs::path packages = packages_folder();
  if (!packages.empty()) {
    for (const auto& entry : fs::directory_iterator(packages / "nvidia", none)) look_in(entry.path() / "lib");
    look_in(packages / "torch" / "lib");
  }
  look_in("/usr/local/cuda/lib64");
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) found.emplace_back(name);
  const std::string wanted = "libnvrtc.so." + std::to_string(major);
  std::stable_partition(found.begin(), found.end(),
                        [&](const fs::path& file) { return file.filename().string().starts_with(wanted); });
  return found;
}

template <class F>
void find_function(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) throw Error(ErrorKind::Unsupported, std::string("it has no function ") + name);
}

}  // namespace

void Compiler::load(const std::string& path) {
  // Its second library is found beside it only if it is open already.
  if (fs::path(path).has_parent_path())
    for (const auto& builtins : files_like(fs::path(path).parent_path(), "libnvrtc-builtins.so."))
      dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* why = dlerror();
    throw Error(ErrorKind::Unsupported, why ? why : "it cannot be opened");
  }
  auto functions = std::make_unique<Functions>();
  find_function(library, "nvrtcVersion", functions->version);
  find_function(library, "nvrtcGetNumSupportedArchs", functions->count_architectures);
  find_function(library, "nvrtcGetSupportedArchs", functions->list_architectures);
  find_function(library, "nvrtcGetErrorString", functions->error);
  find_function(library, "nvrtcCreateProgram", functions->create);
  find_function(library, "nvrtcDestroyProgram", functions->destroy);
  find_function(library, "nvrtcCompileProgram", functions->compile);
  find_function(library, "nvrtcGetProgramLogSize", functions->log_size);
  find_function(library, "nvrtcGetProgramLog", functions->log);
  find_function(library, "nvrtcGetCUBINSize", functions->binary_size);
  find_function(library, "nvrtcGetCUBIN", functions->binary);
  int major = 0, minor = 0, count = 0;
  if (functions->version(&major, &minor) != 0 || functions->count_architectures(&count) != 0 || count <= 0 ||
      count > 1000)
    throw Error(ErrorKind::Unsupported, "it does not say what it compiles for");
  architectures_.resize(size_t(count));
  if (functions->list_architectures(architectures_.data()) != 0)
    throw Error(ErrorKind::Unsupported, "it does not say what it compiles for");
  path_ = path;
  version_ = std::to_string(major) + "." + std::to_string(minor);
  functions_ = std::move(functions);
}

Compiler Compiler::open(int major) {
  std::string tried;
  for (const auto& file : candidates(major)) {
    try {
      Compiler compiler;
      compiler.load(file.string());
      return compiler;
    } catch (const Error& error) {
      tried += "\n  " + file.string() + ": " + error.message();
    }
  }
  throw Error(ErrorKind::Unsupported, "CUDA kernels need NVRTC, and none could be opened:" + tried, "",
              "install the wheel nvidia-cuda-nvrtc, or set PLUMB_NVRTC to the path of libnvrtc.so");
}

bool Compiler::knows(const std::string& architecture) const {
  if (!architecture.starts_with("sm_")) return false;
  const int number = std::atoi(architecture.c_str() + 3);
  return std::find(architectures_.begin(), architectures_.end(), number) != architectures_.end();
}

std::vector<std::string> Compiler::options(const std::string& architecture) {
  // No contraction: a multiplication and an addition round apart, as on the CPU.
  return {"--gpu-architecture=" + architecture, "-std=c++20", "--device-as-default-execution-space", "--fmad=false",
          "--disable-warnings"};
}

std::vector<char> Compiler::compile(const std::string& text, const std::string& architecture) const {
  std::vector<const char*> texts, names, values;
  for (const Header& header : kernel_headers()) {
    texts.push_back(header.text);
    names.push_back(header.name);
  }
  const auto chosen = options(architecture);
  for (const auto& option : chosen) values.push_back(option.c_str());
  auto fail = [&](int code, const std::string& log) {
    throw Error(ErrorKind::ExecutionFailed, "NVRTC " + version_ + " cannot compile a kernel for " + architecture +
                                                ": " + functions_->error(code) + (log.empty() ? "" : "\n" + log));
  };
  Functions::Program program = nullptr;
  if (const int code =
          functions_->create(&program, text.c_str(), "plumb.cu", int(texts.size()), texts.data(), names.data()))
    fail(code, "");
  struct Destroy {
    const Functions* functions;
    Functions::Program* program;
    ~Destroy() { functions->destroy(program); }
  } destroy{functions_.get(), &program};
  size_t size = 0;
  if (const int code = functions_->compile(program, int(values.size()), values.data())) {
    std::string log;
    if (functions_->log_size(program, &size) == 0 && size > 1) {
      log.resize(size);
      functions_->log(program, log.data());
    }
    fail(code, log.substr(0, 4000));
  }
  if (const int code = functions_->binary_size(program, &size)) fail(code, "");
  std::vector<char> binary(size);
  if (const int code = functions_->binary(program, binary.data())) fail(code, "");
  return binary;
}

}  // namespace plumb::cuda
