// A graph compiled for execution: registers instead of maps, operator handles resolved, constants boxed, every value
// dropped after its last use. Running it is a loop over boxed dispatcher calls, with autograd as in eager.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/state.h"

namespace plumb {

class Plan {
 public:
  // The plan refers to the state's tensors as they are now (the tensor objects, so in-place updates are seen). One that
  // is made under a dispatch mode of Python's is for runs under such a mode.
  Plan(const Graph& graph, const State& state);
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  // Flat inputs in placeholder order -> flat outputs. An operator's exception comes back as an Error that names the
  // node, its module path and source line.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs) const;

 private:
  struct Impl;
  friend class PlanCompiler;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plumb
