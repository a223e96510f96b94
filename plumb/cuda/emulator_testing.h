// Runs kernels' texts on this machine: g++ compiles them, a loop goes over blocks and, within a phase, over threads.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "plumb/cuda/launch.h"
#include "tests/test_device.h"

namespace plumb::cuda {

// Runs generated kernels on the CPU. A test makes its calls first with nothing loaded: their texts are noted and ATen's
// operators run instead. compile() makes one library of all of them; from then on they run. A text that was not noted
// stays unloaded, and is counted.
class Emulator : public Machine {
 public:
  Emulator() {
    std::string folder = (std::filesystem::temp_directory_path() / "plumb_kernels_XXXXXX").string();
    if (!mkdtemp(folder.data())) throw std::runtime_error("no temporary folder");
    folder_ = folder;
    use_machine(this);
  }
  ~Emulator() override {
    use_machine(nullptr);
    std::error_code none;
    std::filesystem::remove_all(folder_, none);
  }

  void* loaded(const std::string& text) override {
    const auto [at, added] = kernels_.try_emplace(text);
    at->second.text = &at->first;
    if (!at->second.run) ++declined;
    return at->second.run ? &at->second : nullptr;
  }

  bool checks_kernels() override { return checks && compiled; }

  void start(void* kernel, int64_t blocks, void** arguments) override {
    if (blocks < 1 || blocks > INT32_MAX)
      throw std::runtime_error("no GPU starts " + std::to_string(blocks) + " blocks");
    ++started;
    const auto* known = static_cast<Kernel*>(kernel);
    const auto run = [&] { known->run(arguments, blocks); };
    open_test_device(true);
    try {
      instead ? instead(*known->text, run, arguments) : run();
    } catch (...) {
      open_test_device(false);
      throw;
    }
    open_test_device(false);
  }

  void compile() {
    const std::string source = folder_ + "/kernels.cpp", library = folder_ + "/kernels.so";
    std::ofstream out(source);
    out << "#include \"plumb/cuda/pass.cuh\"\n#include \"plumb/cuda/blocks.cuh\"\n"
           "#include \"plumb/cuda/dropout.cuh\"\n#include \"plumb/cuda/hash.cuh\"\n"
        << "#include <type_traits>\n#include <utility>\n#define __global__\n#define __grid_constant__\n"
        << "#define __launch_bounds__(n)\n"
        << "extern \"C\" bool backwards = false;\n"
        << "template <class... A> void run(void (*kernel)(A...), void** a, int64_t blocks) {\n"
        << "  for (int64_t b = 0; b < blocks; ++b) {\n"
        << "    plumb::cuda_kernel::emulated_grid() = {backwards ? blocks - 1 - b : b, blocks, backwards};\n"
        << "    [&]<std::size_t... I>(std::index_sequence<I...>) {\n"
        << "      kernel(*static_cast<std::remove_cvref_t<A>*>(a[I])...);\n    }(std::index_sequence_for<A...>());\n  "
           "}\n}\n";
    int number = 0;
    for (auto& [text, kernel] : kernels_) {
      kernel.number = number++;
      const std::string n = std::to_string(kernel.number);
      out << "#define entry entry_" << n << "\n"
          << text << "#undef entry\nextern \"C\" void run_" << n << "(void** a, int64_t blocks) { run(entry_" << n
          << ", a, blocks); }\n";
    }
    out.close();
    const char *compiler = std::getenv("PLUMB_EMULATOR_COMPILER"), *more = std::getenv("PLUMB_EMULATOR_FLAGS");
    const std::string command = std::string(compiler ? compiler : "g++") +  // another: for another machine
                                " -std=c++20 -O1 -ffp-contract=off -shared -fPIC -w " +
                                std::string(more ? more : "") +  // sanitizers
                                " -I " PLUMB_SOURCE_DIR " -o " + library + " " + source + " 2>" + folder_ + "/log";
    if (std::system(command.c_str()) != 0) {
      std::ifstream log(folder_ + "/log");
      throw std::runtime_error(std::string(std::istreambuf_iterator<char>(log), {}));
    }
    void* opened = dlopen(library.c_str(), RTLD_NOW);
    if (!opened) throw std::runtime_error(dlerror());
    for (auto& [text, kernel] : kernels_)
      kernel.run = reinterpret_cast<Run>(dlsym(opened, ("run_" + std::to_string(kernel.number)).c_str()));
    backwards_ = static_cast<bool*>(dlsym(opened, "backwards"));
    declined = started = 0;
    compiled = true;
  }

  // From now on the last block and thread come first, or last again.
  void run_backwards(bool wanted) { *backwards_ = wanted; }

  int declined = 0, started = 0;  // since compile()
  bool compiled = false, checks = false;
  // Runs in the place of a kernel, if it is not empty: the kernel's text, the kernel, its arguments.
  using Instead = std::function<void(const std::string& text, const std::function<void()>& run, void** arguments)>;
  Instead instead;

 private:
  using Run = void (*)(void**, int64_t);
  struct Kernel {
    int number = 0;
    Run run = nullptr;
    const std::string* text = nullptr;
  };
  // The test device's memory is no program's but a kernel's.
  static void open_test_device(bool open) {
    if (test_device().is_privateuseone())
      reinterpret_cast<void (*)(bool)>(dlsym(RTLD_DEFAULT, "plumb_test_device_open"))(open);
  }

  std::map<std::string, Kernel> kernels_;
  std::string folder_;
  bool* backwards_ = nullptr;
};

// Runs `calls` for their texts, compiles, and runs them again: this time none may be declined.
template <class Calls>
void emulated(Emulator& emulator, const Calls& calls) {
  calls();
  emulator.compile();
  calls();
}

}  // namespace plumb::cuda
