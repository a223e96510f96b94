// The loop that both fuzzers share: seeds in, broken copies out, until the time is over.
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
  std::vector<std::string> files;
};

inline Options parse_options(int argc, char** argv, const char* what) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.starts_with("--seconds=")) {
      options.seconds = std::atof(arg.c_str() + 10);
    } else if (arg.starts_with("--seed=")) {
      options.seed = std::strtoull(arg.c_str() + 7, nullptr, 10);
    } else if (std::filesystem::is_directory(arg)) {
      for (const auto& e : std::filesystem::directory_iterator(arg)) options.files.push_back(e.path());
    } else {
      options.files.push_back(arg);
    }
  }
  std::sort(options.files.begin(), options.files.end());
  if (options.files.empty()) {
    std::fprintf(stderr, "usage: %s [--seconds=60] [--seed=1] FILE-OR-FOLDER...   (%s)\n", argv[0], what);
    std::exit(2);
  }
  return options;
}

inline std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// Calls `once(random)` until the time is over. A plumb::Error is a good end; any other exception, a crash, or ten
// seconds without an end fails. `last` names the file that holds the input at work.
inline int run(const Options& options, const std::string& last, const std::function<bool(Random&)>& once) {
  const auto start = std::chrono::steady_clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t tries = 0, accepted = 0;
  for (; elapsed() < options.seconds; ++tries) {
    Random random(options.seed * 1'000'003 + tries);
    ::alarm(30);
    try {
      accepted += once(random);
    } catch (const Error&) {
    } catch (const std::exception& e) {
      std::fprintf(stderr, "try %llu of seed %llu ended in %s (input: %s)\n", static_cast<unsigned long long>(tries),
                   static_cast<unsigned long long>(options.seed), e.what(), last.c_str());
      return 1;
    }
  }
  ::alarm(0);
  std::printf("%llu inputs in %.0f s, %llu accepted, every other ended in an error\n",
              static_cast<unsigned long long>(tries), elapsed(), static_cast<unsigned long long>(accepted));
  return 0;
}

}  // namespace plumb::fuzz
