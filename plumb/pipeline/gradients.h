// Keeps a stage's gradients in microbatch order, and what was in `.grad` before a step apart from the step's own share.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <vector>

#include "plumb/pipeline/stage.h"

namespace plumb {

class GradientKeeper {
 public:
  // `order`: the microbatches in the order in which the table accumulates them. `shared`: parameters (by index) whose
  // step gradient is summed over copies. `apart`: the step's gradients are not simply added to those that were there
  // before, but divided, or summed over replicas, at its end.
  GradientKeeper(std::vector<int> order, std::set<int> shared, bool apart);

  void begin_step(std::vector<NamedTensor> parameters);
  // Runs `backward`, which accumulates microbatch `m` into `.grad`. Microbatches that come too early are set aside and
  // added when their turn has come.
  void accumulate(int m, const std::function<void()>& backward);

  // Of the step so far; undefined if there is none.
  at::Tensor step_gradient(int index) const;
  void set_step_gradient(int index, const at::Tensor& gradient);

  // Divides by `divisor` and joins the step's gradients with what was there before.
  void finish_step(int divisor);
  // After a failure, too: `.grad` holds what it holds, nothing is set aside.
  void end_step() noexcept;

 private:
  std::vector<int> order_;  // sorted: the order of accumulation
  bool in_order_;
  std::set<int> shared_;
  bool apart_;
  std::vector<NamedTensor> parameters_;
  Tensors before_;  // by parameter, where it is kept apart
  Tensors own_;     // gradients of shared parameters of this stage: another stage here may hold the very same tensor
  size_t next_ = 0;
  std::map<int, Tensors> early_;
};

}  // namespace plumb
