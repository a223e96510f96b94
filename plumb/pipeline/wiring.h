// From a layout to who sends what to whom.
//
// Values go straight from the stage that makes them to each stage that uses them. The gradient of a value with several
// users goes from the last user to the one before, which adds its own, and so on to the maker: as many messages as one
// from each user, but the sum is formed in the order in which autograd forms it in one process, so it is the same bit
// for bit.
#pragma once

#include <vector>

#include "plumb/pipeline/layout.h"

namespace plumb {

struct StageWiring {
  // Inputs of the stage without repetitions, and for each input its place here.
  std::vector<ValueSource> sources;
  std::vector<int> source_of_input;

  struct Bundle {
    int stage;                 // at the other end
    std::vector<int> indices;  // of values, in an order both ends share
  };
  std::vector<Bundle> values_out;  // outputs, to later stages, ascending
  std::vector<Bundle> values_in;   // sources, from earlier stages, ascending
  std::vector<Bundle> grads_out;   // sources whose gradient goes to an earlier stage, descending

  struct GradBundle {
    int stage;
    struct Target {
      bool output;  // gradient of output `index`, or gradient that source `index` has already
      int index;
    };
    std::vector<Target> targets;
  };
  std::vector<GradBundle> grads_in;
  std::vector<bool> output_used;  // by a later stage
};

std::vector<StageWiring> connect_stages(const PipelineLayout& layout);

}  // namespace plumb
