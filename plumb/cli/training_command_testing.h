// Trainings of the real program: their events, and runs that are stopped and go on.
#pragma once

#include <map>
#include <vector>

#include "plumb/cli/command_testing.h"

namespace {

class Train : public Command {
 protected:
  // Returns the values of a key over the events of a run with --json.
  static std::vector<double> values(const Ended& run, const char* key = "loss") {
    EXPECT_EQ(run.code, 0) << run.err;
    std::vector<double> found;
    std::istringstream lines(run.out);
    for (std::string line; std::getline(lines, line);) {
      const Json event = Json::parse(line);
      if (event.contains(key)) found.push_back(event[key].get<double>());
    }
    return found;
  }
  static std::string options_of(const Ended& run) {
    return Json::parse(run.out.substr(0, run.out.find('\n')))["options"].get<std::string>();
  }
  static std::string base() {
    return "train lm.pt2 --data tokens.bin --steps 5 --lr 0.01 --threads 1 --seed 3 --json ";
  }
};

class Checkpoints : public Train {
 protected:
  void SetUp() override { fs::remove_all(folder() / "run"); }
  // Expects two programs of the same weights to be the same file, byte for byte.
  static void expect_same_weights() {
    EXPECT_TRUE(read(folder() / "whole.pt2") == read(folder() / "other.pt2"));
    EXPECT_TRUE(fs::exists(folder() / "whole.pt2"));
  }
  static std::string job() {
    return base() + "--steps 9 --microbatches 4 --clip 0.4 --rate cosine --warmup 2 --weight-decay 0.1 ";
  }
  // Returns losses by step. A step that was computed twice has the later one, which must equal the first.
  static std::vector<double> by_step(const std::vector<Ended>& runs) {
    std::map<int, double> losses;
    for (const Ended& run : runs) {
      std::istringstream lines(run.out);
      for (std::string line; std::getline(lines, line);) {
        const Json event = Json::parse(line);
        if (!event.contains("loss")) continue;
        const auto [it, is_new] = losses.emplace(event["step"].get<int>(), event["loss"].get<double>());
        EXPECT_EQ(it->second, event["loss"].get<double>()) << "step " << it->first;
      }
    }
    std::vector<double> list;
    for (const auto& [step, loss] : losses) list.push_back(loss);
    return list;
  }
};

}  // namespace
