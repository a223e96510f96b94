// Accumulates a stage's gradients in microbatch order, and separates the step's gradients from earlier ones.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "plumb/pipeline/runtime/stage.h"

namespace plumb {

class GradientAccumulator {
 public:
  // `order`: the microbatches in the order in which the table accumulates them. `shared`: parameters (by index) whose
  // step gradient is summed over copies. `separate_step_grads`: the step's gradients are not simply added to those that
  // were there before, but divided, or summed over replicas, at its end. `groups`: number of groups of equally many
  // microbatches, each summed in order and then pairwise in a binary tree (tree_sum), with one sum kept for
  // each level; those of shared parameters are kept apart. `changed`: PipelineOptions::gradient_changed.
  GradientAccumulator(std::vector<int> order, std::set<int> shared, bool separate_step_grads, int groups = 1,
                      std::function<void(const std::string& parameter)> changed = nullptr);

  void begin_step(std::vector<NamedTensor> parameters);
  // Runs `backward`, which accumulates microbatch `m` into `.grad`. Microbatches that come too early are set aside and
  // added when their turn has come.
  void accumulate(int m, const std::function<void()>& backward);
  // Runs `reduction`, which may change the step's complete gradients in `.grad`.
  void reduce(const std::function<void()>& reduction);

  int groups() const { return groups_; }
  // Returns the gradients of a shared parameter, by group.
  Tensors group_gradients(int index) const;
  // Returns the step's gradient so far; undefined if there is none. A shared parameter of several groups has one after
  // set_step_gradient().
  at::Tensor step_gradient(int index) const;
  void set_step_gradient(int index, const at::Tensor& gradient);

  // Divides by `divisor` and joins the step's gradients with what was there before.
  void finish_step(int divisor);
  // Called after a failure: `.grad` is again what was there before the step, where that was kept; all else is dropped.
  void end_step() noexcept;

 private:
  struct OwnGradients;
  void swap_own();
  void swap_with(Tensors& gradients) const;
  void end_microbatch();
  uint64_t hash_of_sums(size_t i) const;
  void keep_hashes();
  void check_hashes() const;
  bool is_shared(size_t i) const { return shared_.contains(static_cast<int>(i)); }
  bool is_separate(size_t i) const { return separate_step_grads_ || is_shared(i); }

  std::vector<int> order_;  // sorted: the order of accumulation
  bool in_order_;
  std::set<int> shared_;
  bool separate_step_grads_;
  std::vector<NamedTensor> parameters_;
  Tensors before_;  // by parameter, where step gradients are separate
  Tensors own_;     // gradients of shared parameters of this stage: another stage here may hold the very same tensor
  size_t next_ = 0;
  std::map<int, Tensors> out_of_order_;
  int groups_;
  std::vector<Tensors> sums_;  // by parameter, of several groups: those of the tree so far, or of shared ones by group
  std::function<void(const std::string& parameter)> changed_;
  std::vector<uint64_t> hashes_;  // with changed_: of each parameter's sums when they were last written
};

// Returns the sum of tensors of which some may be undefined, neighbors first: ((0 + 1) + (2 + 3)) + 4. Changes none.
at::Tensor tree_sum(Tensors parts);

}  // namespace plumb
