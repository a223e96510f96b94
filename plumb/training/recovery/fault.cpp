#include "plumb/training/recovery/fault.h"

#include <signal.h>

#include <algorithm>
#include <ranges>
#include <regex>

#include "plumb/core/join.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

constexpr const char* kExample =
    "--inject 'kill rank 2 at 1F3 of step 7'; kill, stop, raise, flip, rot, rot_state or rot_gradient";

// Returns the actions of a rank, the halves of overlapped ones apart.
std::vector<std::string> actions_of(const Schedule& schedule, int rank) {
  std::vector<std::string> all;
  const Schedule computing = compute_only(schedule);
  for (const Action& action : computing.rows.at(static_cast<size_t>(rank))) {
    for (const Action& part : {action.first_part(), action.second_part()}) {
      if (!part.is_idle()) all.push_back(to_string(part));
    }
  }
  return all;
}

}  // namespace

void Fault::happen() const {
  if (kind == Kind::Raise) throw Error(ErrorKind::ExecutionFailed, "injected: " + text);
  if (kind >= Kind::Flip) return;
  ::raise(kind == Kind::Kill ? SIGKILL : SIGSTOP);
}

Fault parse_fault(const std::string& text, const TrainOptions& o, const Schedule& schedule) {
  static const std::regex pattern(
      R"((kill|stop|raise|flip|rot|rot_state|rot_gradient) rank (\d{1,6}) at (\w{3,12}) of step (\d{1,12}))");
  std::smatch match;
  if (text.size() > 100 || !std::regex_match(text, match, pattern)) {
    throw UsageError("--inject " + text.substr(0, 100) + ": is no fault", kExample);
  }
  Fault fault;
  fault.text = text;
  constexpr const char* kinds[] = {"kill", "stop", "raise", "flip", "rot", "rot_state", "rot_gradient"};
  fault.kind = static_cast<Fault::Kind>(std::ranges::find(kinds, match[1].str()) - std::begin(kinds));
  fault.rank = std::stoi(match[2]);
  fault.step = std::stoll(match[4]);
  if (fault.rank >= o.processes()) {
    throw UsageError(c10::str("--inject ", text, ": there are ", o.processes(), " ranks"),
                     "a rank from 0 to " + std::to_string(o.processes() - 1));
  }
  const auto actions = actions_of(schedule, fault.rank % static_cast<int>(o.stages));
  const auto found = std::ranges::find(actions, match[3].str());
  if (found == actions.end()) {
    const std::string some = join(actions | std::views::take(12), {}, " ");
    throw UsageError(c10::str("--inject ", text, ": rank ", fault.rank, " has no action ", match[3].str()),
                     "one of " + some + (actions.size() > 12 ? " ..." : ""));
  }
  fault.stage = std::atoi(match[3].str().c_str());
  fault.action = static_cast<size_t>(found - actions.begin());
  return fault;
}

FaultTrigger::FaultTrigger(const std::vector<Fault>& faults, int rank, Membership* members,
                           std::function<void(const Fault&)> report)
    : members_(members), report_(std::move(report)) {
  if (launched_again()) return;
  std::ranges::copy_if(faults, std::back_inserter(faults_), [rank](const Fault& fault) { return fault.rank == rank; });
}

void FaultTrigger::begin_step(int64_t step) {
  step_ = step;
  done_before_ = 0;
  action_done(0);
}

void FaultTrigger::action_done(size_t done) {
  for (const Fault& fault : faults_) {
    if (fault.step != step_ || fault.action > done || (done > 0 && fault.action <= done_before_)) continue;
    if (members_ != nullptr && !members_->is_first_to(fault.text)) continue;
    report_(fault);
    fault.happen();
  }
  done_before_ = done;
}

}  // namespace plumb
