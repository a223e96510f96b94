// Faults that the ranks of a group report to each other through its store, beside their messages.
#pragma once

#include <optional>
#include <string>

#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

// The known reason why a message did not come.
struct Cause {
  int rank = -1;  // the rank at fault
  std::string text;
};

// A store that does not respond is not asked again: its rank is lost or stopped, and most calls would wait for ever.
class FailureStore {
 public:
  explicit FailureStore(ProcessGroup group) : group_(std::move(group)) {}

  void publish(const Cause& cause);
  // Returns the cause that a rank has published, the suspect's first.
  std::optional<Cause> find(int suspect);
  // Publishes that this rank's wait for `peer` has timed out.
  void publish_late(int peer);
  // Returns the rank that keeps all waiting: the peer, or the rank that the peer has waited for, and so on. If the
  // store does not respond, that is world rank 0, which serves it.
  int last_waited_for(int peer);
  // Notes that the connection to `peer` is closed. World rank 0 takes its store along.
  void note_closed(int peer);

 private:
  // Lost: another request would print c10d's warnings each time. Silent: lost because it did not respond: it is
  // stopped.
  enum class Reach : uint8_t { Answers, Lost, Silent };

  template <class Ask>
  auto ask(Ask question);

  const ProcessGroup group_;
  Reach reach_ = Reach::Answers;
};

}  // namespace plumb
