// Events of a running training: one struct a kind of event. keys() visits a struct's fields under their names in JSON,
// which is made where events leave the process; the first name belongs to one kind alone.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace plumb {
namespace event {

struct Started {
  std::string options;  // TOML
  static void keys(auto& e, auto&& key) { key("options", e.options); }
};
struct Group {
  std::string group;
  std::vector<std::string> parameters;
  static void keys(auto& e, auto&& key) { key("group", e.group), key("parameters", e.parameters); }
};
// Parameters have learning rates of their own.
struct OwnRates {
  std::string why;
  static void keys(auto& e, auto&& key) { key("learning_rates", e.why); }
};
struct Resumed {
  int64_t step = 0;              // the last step that is not done again
  std::optional<int64_t> steps;  // null: the run goes on from copies in memory
  std::string folder;
  static void keys(auto& e, auto&& key) { key("resumed", e.step), key("steps", e.steps), key("folder", e.folder); }
};
struct Stepped {
  int64_t step = 0, steps = 0;
  double loss = NAN, lr = 0, norm = NAN;
  int64_t rows = 0;
  std::optional<int64_t> tokens;  // null: the model takes none
  double memory = 0;              // bytes of the largest rank
  double seconds = 0;             // since the start
  static void keys(auto& e, auto&& key) {
    key("step", e.step), key("steps", e.steps), key("loss", e.loss), key("lr", e.lr), key("norm", e.norm);
    key("rows", e.rows), key("tokens", e.tokens), key("memory", e.memory), key("seconds", e.seconds);
  }
};
struct Evaluated {
  int64_t step = 0;
  double loss = NAN;
  int64_t targets = 0;
  static void keys(auto& e, auto&& key) {
    key("eval", e.step), key("eval_loss", e.loss), key("eval_targets", e.targets);
  }
};
struct Recomputed {
  int stage = 0;
  std::string what;
  static void keys(auto& e, auto&& key) { key("stage", e.stage), key("recompute", e.what); }
};
struct CheckpointWritten {
  int64_t step = 0;
  std::string folder;
  double copied = 0, written = 0;  // seconds
  static void keys(auto& e, auto&& key) {
    key("checkpoint", e.step), key("folder", e.folder), key("copied", e.copied), key("written", e.written);
  }
};
struct CheckpointProblem {
  std::string problem;
  static void keys(auto& e, auto&& key) { key("checkpoint_problem", e.problem); }
};
struct LogProblem {
  std::string problem;
  static void keys(auto& e, auto&& key) { key("problem", e.problem); }
};
struct FaultInjected {
  std::string fault;
  static void keys(auto& e, auto&& key) { key("injected", e.fault); }
};
// A rank has computed, or holds, something wrong.
struct AuditFailed {
  int64_t step = 0;
  int rank = 0;
  std::string tensor, why;
  static void keys(auto& e, auto&& key) {
    key("audit", e.step), key("rank", e.rank), key("tensor", e.tensor), key("why", e.why);
  }
};
// The launcher replaces a lost rank.
struct Restarted {
  int64_t restart = 0, of = 0;
  int rank = 0;
  std::string why;
  static void keys(auto& e, auto&& key) {
    key("restart", e.restart), key("of", e.of), key("rank", e.rank), key("why", e.why);
  }
};
// A rank's copy of its state is on another host.
struct Copied {
  int64_t step = 0;
  int rank = 0, to = 0;
  int64_t bytes = 0;
  double seconds = 0, in_bubbles = 0;  // from the step's end on; the share that was sent while the rank waited anyway
  static void keys(auto& e, auto&& key) {
    key("copied_step", e.step), key("rank", e.rank), key("to", e.to), key("bytes", e.bytes);
    key("seconds", e.seconds), key("in_bubbles", e.in_bubbles);
  }
};
struct Interrupted {
  int64_t step = 0, steps = 0;
  int signal = 0;
  static void keys(auto& e, auto&& key) { key("interrupted", e.step), key("steps", e.steps), key("signal", e.signal); }
};
struct Saved {
  std::string path;
  static void keys(auto& e, auto&& key) { key("saved", e.path); }
};
struct Dumped {
  std::string folder, not_finite;
  static void keys(auto& e, auto&& key) { key("dumped", e.folder), key("not_finite", e.not_finite); }
};
// The verdict on number formats, after the last step that it was measured in.
struct Concluded {
  nlohmann::json verdict;  // VerdictReport::to_json()
  int64_t at_step = 0;
  std::string text;
  static void keys(auto& e, auto&& key) { key("verdict", e.verdict), key("at_step", e.at_step), key("text", e.text); }
};
struct Drew {
  std::string path;
  double bubble = 0;
  std::string conclusion;
  static void keys(auto& e, auto&& key) {
    key("drew", e.path), key("bubble", e.bubble), key("conclusion", e.conclusion);
  }
};

}  // namespace event

// The findings of --dry-run for a rank.
struct RankNeeds {
  std::vector<int> stages;
  int64_t parameters = 0;  // elements, of its stages
  double resident = 0;     // bytes of parameters, gradients and the optimizer's state
  double peak = 0;         // and of activations, at most
  NLOHMANN_DEFINE_TYPE_INTRUSIVE(RankNeeds, stages, parameters, resident, peak)
};

struct TrainNeeds {
  std::string schedule;
  double seconds = 0;  // duration of a step: the schedule simulated with the stages' measured times, times --accumulate
  double bubble = 0;   // the ranks' idle share of it
  int64_t rows = 0;    // rows of a step
  std::vector<RankNeeds> ranks;  // needs of each rank of one pipeline
  static void keys(auto& e, auto&& key) {
    key("dry_run", e.seconds), key("bubble", e.bubble), key("rows", e.rows), key("ranks", e.ranks);
  }
};

using TrainEvent =
    std::variant<event::Started, event::Group, event::OwnRates, event::Resumed, event::Stepped, event::Evaluated,
                 event::Recomputed, event::CheckpointWritten, event::CheckpointProblem, event::LogProblem,
                 event::FaultInjected, event::AuditFailed, event::Restarted, event::Copied, event::Interrupted,
                 event::Saved, event::Dumped, event::Concluded, event::Drew, TrainNeeds>;

// Returns the event as the help of --json lists it. Numbers that are not finite become null when it is printed.
nlohmann::json to_json(const TrainEvent& event);
// Inverse of to_json(). Returns null if the line is no event.
std::optional<TrainEvent> event_from_json(const nlohmann::json& line);
// Returns the first name of the event's JSON: "options", "step", "saved", ...
std::string_view kind_of(const TrainEvent& event);

}  // namespace plumb
