// Tests over real processes: this test binary starts itself again, once a rank, in a role instead of running tests.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "plumb/pipeline/launch/launch.h"

namespace plumb::testing_processes {

// A role's name, and what a process does in it; its value is the exit code.
struct Role {
  Role(const std::string& name, std::function<int()> run);
};

// Returns a variable given to the processes of a role, or `otherwise`.
std::string setting(const std::string& name, const std::string& otherwise = "");
int number_setting(const std::string& name, int otherwise);
// Waits until every process of the role has come here; one that starts may be seconds behind the others.
void meet();
// Waits until that rank's process, which has come to meet(), has ended and the launcher knows it.
void wait_for_end_of(int rank);
// Prints "key=value" for the test that started this process.
void report(const std::string& key, const std::string& value);

struct Run {
  LaunchResult result;
  std::vector<std::map<std::string, std::string>> reports;  // by rank
  std::vector<std::string> errors;                          // by rank: stderr
};

Run run_role(const std::string& role, int num_processes, std::map<std::string, std::string> settings = {},
             std::chrono::milliseconds patience = std::chrono::seconds(20));

}  // namespace plumb::testing_processes
