// The loop that all fuzzers share: broken inputs until the time is over.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "plumb/core/error.h"
#include "tests/fuzz/mutate.h"

namespace plumb::fuzz {

struct Options {
  double seconds = 60;
  uint64_t seed = 1;
  std::string only;                  // run this one alone
  std::vector<std::string> folders;  // with files to start from
};

inline Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.starts_with("--seconds=")) {
      options.seconds = std::atof(arg.c_str() + 10);
    } else if (arg.starts_with("--seed=")) {
      options.seed = std::strtoull(arg.c_str() + 7, nullptr, 10);
    } else if (arg.starts_with("--only=")) {
      options.only = arg.substr(7);
    } else if (std::filesystem::is_directory(arg)) {
      options.folders.push_back(arg);
    } else {
      std::fprintf(stderr, "usage: %s [--seconds=60] [--seed=1] [--only=NAME] FOLDER...\n", argv[0]);
      std::exit(2);
    }
  }
  return options;
}

inline std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void spill(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A file's name of this process, in memory where there is room for files.
inline std::string work_file(const std::string& name) {
  const char* folder = std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : "/tmp";
  return std::string(folder) + "/plumb-fuzz-" + std::to_string(::getpid()) + "-" + name;
}

// Calls `once(random)` until the time is over. An Error is a good end; any other exception, a crash, or thirty seconds
// without an end fails. `work` is the file that holds the input at work; it stays where a try failed.
inline bool run(const Options& options, const std::string& name, const std::string& work,
                const std::function<void(Random&)>& once) {
  const auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  unsigned long long tries = 0, accepted = 0;
  std::printf("%s: ", name.c_str());
  std::fflush(stdout);
  for (; elapsed() < options.seconds; ++tries) {
    Random random(options.seed * 1'000'003 + tries);
    ::alarm(30);
    try {
      once(random);
      ++accepted;
    } catch (const Error&) {
    } catch (const std::exception& e) {
      std::printf("try %llu of seed %llu ended in %s (input: %s)\n", tries,
                  static_cast<unsigned long long>(options.seed), e.what(), work.c_str());
      ::alarm(0);
      return false;
    }
  }
  ::alarm(0);
  std::filesystem::remove(work);
  std::printf("%llu inputs in %.0f s, %llu accepted, every other ended in an error\n", tries, elapsed(), accepted);
  return true;
}

}  // namespace plumb::fuzz
