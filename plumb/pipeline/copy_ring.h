// Every rank gives the next one a copy of its state, while the next step computes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "plumb/pipeline/process_group.h"

namespace plumb {

// A ring over connections of its own, so that a large copy does not stand before a step's messages. Ranks give in the
// same order, each once an edge.
class CopyRing {
 public:
  // All ranks of `group` make it together.
  explicit CopyRing(const ProcessGroup& group);
  // Ends what is under way; waits for nobody.
  ~CopyRing();
  CopyRing(const CopyRing&) = delete;

  // Begins to send `bytes`, a contiguous byte tensor that nobody changes until finish(), and to receive those of the
  // rank before; returns at once. `edge`: the same on all ranks.
  void begin(std::int64_t edge, at::Tensor bytes);
  // What the rank before gave to the last begin(). Undefined if there was none since the last finish(). Raises
  // Error(Communication) if a neighbour is lost, late, or gave at another edge.
  at::Tensor finish();

 private:
  struct Way;
  std::shared_ptr<Way> way_;
  std::future<at::Tensor> running_;
};

}  // namespace plumb
