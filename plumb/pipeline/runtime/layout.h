// The values that flow between a pipeline's stages, equal on every rank. Its messages are derived from it (run_plan.h).
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plumb/partition/wire.h"

namespace plumb {

struct StageLayout {
  std::vector<ValueSource> inputs;  // in the order of the stage's inputs; stages before this one, or the model's inputs
  int num_outputs = 1;
  std::set<int> as_they_are = {};  // outputs that are not rounded on the wire
};

// One parameter that several stages hold a copy of (or the same stage under two names). Its gradients are summed over
// all copies at the end of every step.
struct TiedParameter {
  struct Copy {
    int stage = 0;
    std::string name;
    auto operator<=>(const Copy&) const = default;
  };
  std::vector<Copy> copies;
};

// The outputs of the last stage are the model's. Parameters of the same name in several stages are tied by that alone.
struct PipelineLayout {
  std::vector<StageLayout> stages;
  int num_inputs = 1;
  std::vector<TiedParameter> tied;
  // The sizes of the model's inputs that the stages were made for, by input; -1 may be any, nothing is not known. Where
  // a microbatch has others, those of its inputs travel with it (Microbatch::sizes).
  std::vector<std::optional<std::vector<int64_t>>> input_sizes;
  // A linear chain: each stage sends all outputs to the next, in order. The number of outputs may vary between
  // microbatches. Stage 0 takes nothing: it gets the model's inputs by itself.
  bool dynamic_outputs = false;
  // Formats of all values between stages but those that are to stay as they are, and of their gradients
  // (plumb/partition/wire.h).
  WireFormats wire;

  int num_stages() const { return static_cast<int>(stages.size()); }
  // Returns a layout in which stage s takes what stage s - 1 gives; stage 0 takes the model's one input.
  static PipelineLayout chain(int num_stages);
  static PipelineLayout dynamic_chain(int num_stages);
  std::string text() const;
  // Return the format of a value between stages and of its gradient; null: as it is.
  const FPFormat* value_format(const ValueSource& value) const {
    return rounds(value) ? wire_format(wire.fwd) : nullptr;
  }
  const FPFormat* gradient_format(const ValueSource& value) const {
    return rounds(value) ? wire_format(wire.bwd) : nullptr;
  }
  bool rounds(const ValueSource& value) const {
    return wire && value.stage >= 0 &&
           (dynamic_outputs || !stages[value.stage].as_they_are.count(static_cast<int>(value.index)));
  }
  // Throws Error(InvalidArgument) that names the stage and input.
  void check() const;
};

// Returns the layout of a cut graph: where values come from, which sizes of the model's inputs it was cut for, and
// which parameters are copies of each other.
PipelineLayout make_layout(const PipeTable& table);

}  // namespace plumb
