#include "plumb/pipeline/runtime/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/core/mix_bits.h"
#include "plumb/numerics/hash.h"

namespace plumb {

namespace {

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a + b;
}

}  // namespace

at::Tensor tree_sum(Tensors parts) {
  if (parts.empty()) return {};
  for (; parts.size() > 1; parts.resize((parts.size() + 1) / 2)) {
    for (size_t i = 0; i < parts.size(); i += 2)
      parts[i / 2] = i + 1 < parts.size() ? sum_of(parts[i], parts[i + 1]) : parts[i];
  }
  return parts[0];
}

GradientAccumulator::GradientAccumulator(std::vector<int> order, std::set<int> shared, bool separate_step_grads,
                                         int groups, std::function<void(const std::string&)> changed)
    : order_(std::move(order)),
      shared_(std::move(shared)),
      separate_step_grads_(separate_step_grads || groups > 1),
      groups_(groups),
      changed_(std::move(changed)) {
  in_order_ = std::ranges::is_sorted(order_);
  std::ranges::sort(order_);
}

// While it lives, `.grad` of shared parameters is this stage's.
struct GradientAccumulator::OwnGradients {
  explicit OwnGradients(GradientAccumulator& stage) : stage_(stage) { stage_.swap_own(); }
  ~OwnGradients() { stage_.swap_own(); }
  GradientAccumulator& stage_;
};

void GradientAccumulator::begin_step(std::vector<NamedTensor> parameters) {
  parameters_ = std::move(parameters);
  next_ = 0;
  out_of_order_.clear();
  before_.assign(parameters_.size(), {});
  own_.assign(parameters_.size(), {});
  sums_.assign(groups_ > 1 ? parameters_.size() : 0, {});
  for (size_t i = 0; i < parameters_.size(); i++) {
    const auto& p = parameters_[i].tensor;
    if (!p.requires_grad() || !is_separate(i)) continue;
    before_[i] = p.grad();
    p.mutable_grad() = at::Tensor();
  }
  const OwnGradients own(*this);
  keep_hashes();
}

// Hashes the step's gradients of parameter `i`, wherever they wait for the next microbatch. A sparse one has no hash.
uint64_t GradientAccumulator::hash_of_sums(size_t i) const {
  uint64_t all = 0;
  const auto add = [&](const at::Tensor& sum) {
    if (sum.defined() && sum.layout() == at::kStrided) all = mix_seeds(all, hash_of(sum));
  };
  add(parameters_[i].tensor.grad());
  if (groups_ > 1) std::ranges::for_each(sums_[i], add);
  for (const auto& [m, early] : out_of_order_) add(early[i]);
  return all;
}

void GradientAccumulator::keep_hashes() {
  if (!changed_) return;
  hashes_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) hashes_.push_back(hash_of_sums(i));
}

void GradientAccumulator::check_hashes() const {
  if (!changed_) return;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (hash_of_sums(i) != hashes_[i]) changed_(parameters_[i].name);
}

void GradientAccumulator::swap_own() {
  for (int i : shared_) {
    std::swap(parameters_[i].tensor.mutable_grad(), own_[i]);
  }
}

void GradientAccumulator::swap_with(Tensors& gradients) const {
  for (size_t i = 0; i < parameters_.size(); i++) {
    const auto& p = parameters_[i].tensor;
    if (p.requires_grad()) std::swap(p.mutable_grad(), gradients[i]);
  }
}

void GradientAccumulator::reduce(const std::function<void()>& reduction) {
  const OwnGradients own(*this);
  check_hashes();
  reduction();
  keep_hashes();
}

void GradientAccumulator::accumulate(int m, const std::function<void()>& backward) {
  const OwnGradients own(*this);
  check_hashes();
  if (in_order_ || order_[next_] == m) {
    backward();
    end_microbatch();
  } else {
    Tensors gradients(parameters_.size());
    swap_with(gradients);
    backward();
    swap_with(gradients);
    out_of_order_[m] = std::move(gradients);
  }
  at::NoGradGuard no_grad;
  while (!out_of_order_.empty() && next_ < order_.size() && out_of_order_.begin()->first == order_[next_]) {
    auto& early = out_of_order_.begin()->second;
    for (size_t i = 0; i < parameters_.size(); i++) {
      if (!early[i].defined()) continue;
      const auto& p = parameters_[i].tensor;
      if (p.grad().defined()) {
        p.mutable_grad().add_(early[i]);
      } else {
        p.mutable_grad() = early[i];
      }
    }
    out_of_order_.erase(out_of_order_.begin());
    end_microbatch();
  }
  keep_hashes();
}

// At the end of a group its sum goes to those of the tree, and two of one level become one of the next: at most as many
// are kept as the number of groups so far has bits. After the last group all become one.
void GradientAccumulator::end_microbatch() {
  next_++;
  const size_t size = order_.size() / static_cast<size_t>(groups_);
  if (groups_ == 1 || next_ % size != 0) return;
  const bool last = next_ == order_.size();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); i++) {
    const auto& p = parameters_[i].tensor;
    if (!p.requires_grad()) continue;
    const bool shared = is_shared(i);
    auto& sums = sums_[i];
    at::Tensor sum = p.grad();
    p.mutable_grad() = at::Tensor();
    for (size_t before = next_ / size - 1; !shared && !sums.empty() && (before % 2 == 1 || last); before /= 2) {
      sum = sum_of(sums.back(), sum);
      sums.pop_back();
    }
    if (last && !shared) {
      p.mutable_grad() = sum;
    } else {
      sums.push_back(sum);
    }
  }
}

Tensors GradientAccumulator::group_gradients(int index) const {
  return groups_ > 1 ? sums_[index] : Tensors{step_gradient(index)};
}

at::Tensor GradientAccumulator::step_gradient(int index) const {
  return is_shared(index) ? own_[index] : parameters_[index].tensor.grad();
}

void GradientAccumulator::set_step_gradient(int index, const at::Tensor& gradient) {
  if (is_shared(index)) {
    own_[index] = gradient.defined() ? gradient.clone() : gradient;
  } else {
    parameters_[index].tensor.mutable_grad() = gradient;
  }
}

void GradientAccumulator::finish_step(int divisor) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); i++) {
    const auto& p = parameters_[i].tensor;
    if (!p.requires_grad()) continue;
    const bool shared = is_shared(i);
    at::Tensor gradient = shared ? own_[i] : p.grad();
    if (gradient.defined() && divisor > 1) gradient.div_(divisor);
    if (before_[i].defined()) gradient = gradient.defined() ? before_[i].add_(gradient) : before_[i];
    if (shared || before_[i].defined()) {
      // Stages of one rank that hold the very same tensor come here with equal gradients; the first one's stays.
      if (shared && !before_[i].defined() && p.grad().defined()) continue;
      p.mutable_grad() = gradient;
    }
  }
  before_.clear();
}

void GradientAccumulator::end_step() noexcept {
  for (size_t i = 0; i < before_.size(); i++) {
    const auto& p = parameters_[i].tensor;
    // Another stage here may hold the very same shared tensor, and what it was.
    const bool shared = is_shared(i);
    if (before_[i].defined() || (p.requires_grad() && separate_step_grads_ && !shared)) p.mutable_grad() = before_[i];
  }
  before_.clear();
  own_.clear();
  sums_.clear();
  out_of_order_.clear();
  parameters_.clear();
}

}  // namespace plumb
