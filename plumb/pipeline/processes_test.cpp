#include "plumb/pipeline/processes_testing.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace plumb::testing_processes {
namespace {

namespace fs = std::filesystem;

std::map<std::string, std::function<int()>>& roles() {
  static std::map<std::string, std::function<int()>> all;
  return all;
}

void wait_until(const std::function<bool()>& done) {
  while (!done()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

// Says that a rank has come to meet().
fs::path file_of(int rank) { return fs::path(setting("FOLDER")) / std::to_string(rank); }

}  // namespace

Role::Role(const std::string& name, std::function<int()> run) { roles()[name] = std::move(run); }

std::string setting(const std::string& name, const std::string& otherwise) {
  const char* value = std::getenv(("PLUMB_TEST_" + name).c_str());
  return value == nullptr ? otherwise : value;
}

int number_setting(const std::string& name, int otherwise) {
  const auto text = setting(name);
  return text.empty() ? otherwise : std::stoi(text);
}

void meet() {
  const fs::path own = file_of(std::atoi(std::getenv("RANK")));
  std::ofstream(own.string() + ".part") << ::getpid();
  fs::rename(own.string() + ".part", own);
  for (int rank = 0; rank < std::atoi(std::getenv("WORLD_SIZE")); rank++)
    wait_until([&] { return fs::exists(file_of(rank)); });
}

void wait_for_end_of(int rank) {
  pid_t process = 0;
  std::ifstream(file_of(rank)) >> process;
  wait_until([&] { return ::kill(process, 0) != 0; });
}

void report(const std::string& key, const std::string& value) {
  std::printf("%s=%s\n", key.c_str(), value.c_str());
  std::fflush(stdout);
}

Run run_role(const std::string& role, int num_processes, std::map<std::string, std::string> settings,
             std::chrono::milliseconds patience) {
  Run run;
  run.reports.resize(num_processes);
  run.errors.resize(num_processes);
  std::string folder = (fs::temp_directory_path() / "plumb_role_XXXXXX").string();
  EXPECT_NE(::mkdtemp(folder.data()), nullptr);
  LaunchOptions options;
  options.num_processes = num_processes;
  options.patience = patience;
  options.environment = {{"PLUMB_TEST_ROLE", role}, {"PLUMB_TEST_FOLDER", folder}, {"OMP_NUM_THREADS", "1"}};
  for (const auto& [key, value] : settings) options.environment.emplace_back("PLUMB_TEST_" + key, value);
  options.on_line = [&](int rank, bool is_stderr, const std::string& line) {
    const auto equals = line.find('=');
    if (is_stderr) {
      run.errors[rank] += line + "\n";
    } else if (equals != std::string::npos) {
      run.reports[rank][line.substr(0, equals)] = line.substr(equals + 1);
    }
  };
  run.result = launch_local(options);
  fs::remove_all(folder);
  return run;
}

}  // namespace plumb::testing_processes

int main(int argc, char** argv) {
  using namespace plumb::testing_processes;
  // One thread here as in the processes this starts: how a batch norm's sums are split over threads changes their bits.
  at::set_num_threads(1);
  const auto role = setting("ROLE");
  if (!role.empty()) {
    try {
      return roles().at(role)();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      return 1;
    }
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
