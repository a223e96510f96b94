#include "plumb/pipeline/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace plumb {

GradientKeeper::GradientKeeper(std::vector<int> order, std::set<int> shared, bool apart)
    : order_(std::move(order)), shared_(std::move(shared)), apart_(apart) {
  in_order_ = std::is_sorted(order_.begin(), order_.end());
  std::sort(order_.begin(), order_.end());
}

void GradientKeeper::begin_step(std::vector<NamedTensor> parameters) {
  parameters_ = std::move(parameters);
  next_ = 0;
  early_.clear();
  before_.assign(parameters_.size(), {});
  own_.assign(parameters_.size(), {});
  for (size_t i = 0; i < parameters_.size(); i++) {
    const auto& p = parameters_[i].tensor;
    if (!p.requires_grad() || !(apart_ || shared_.count(static_cast<int>(i)))) continue;
    before_[i] = p.grad();
    p.mutable_grad() = at::Tensor();
  }
}

void GradientKeeper::accumulate(int m, const std::function<void()>& backward) {
  auto swap_own = [&] {
    for (int i : shared_) {
      const auto& p = parameters_[i].tensor;
      at::Tensor held = p.grad();
      p.mutable_grad() = own_[i];
      own_[i] = held;
    }
  };
  swap_own();
  if (in_order_ || order_[next_] == m) {
    backward();
    next_++;
  } else {
    Tensors held;
    for (const auto& p : parameters_) {
      held.push_back(p.tensor.requires_grad() ? p.tensor.grad() : at::Tensor());
      if (p.tensor.requires_grad()) p.tensor.mutable_grad() = at::Tensor();
    }
    backward();
    auto& early = early_[m];
    for (size_t i = 0; i < parameters_.size(); i++) {
      const auto& p = parameters_[i].tensor;
      early.push_back(p.requires_grad() ? p.grad() : at::Tensor());
      if (p.requires_grad()) p.mutable_grad() = held[i];
    }
  }
  at::NoGradGuard no_grad;
  while (!early_.empty() && next_ < order_.size() && early_.begin()->first == order_[next_]) {
    auto& early = early_.begin()->second;
    for (size_t i = 0; i < parameters_.size(); i++) {
      if (!early[i].defined()) continue;
      const auto& p = parameters_[i].tensor;
      if (p.grad().defined()) {
        p.mutable_grad().add_(early[i]);
      } else {
        p.mutable_grad() = early[i];
      }
    }
    early_.erase(early_.begin());
    next_++;
  }
  swap_own();
}

at::Tensor GradientKeeper::step_gradient(int index) const {
  return shared_.count(index) ? own_[index] : parameters_[index].tensor.grad();
}

void GradientKeeper::set_step_gradient(int index, const at::Tensor& gradient) {
  if (shared_.count(index)) {
    own_[index] = gradient.defined() ? gradient.clone() : gradient;
  } else {
    parameters_[index].tensor.mutable_grad() = gradient;
  }
}

void GradientKeeper::finish_step(int divisor) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); i++) {
    const auto& p = parameters_[i].tensor;
    if (!p.requires_grad()) continue;
    const bool shared = shared_.count(static_cast<int>(i)) > 0;
    at::Tensor gradient = shared ? own_[i] : p.grad();
    if (gradient.defined() && divisor > 1) gradient.div_(divisor);
    if (before_[i].defined()) gradient = gradient.defined() ? before_[i].add_(gradient) : before_[i];
    if (shared || before_[i].defined()) {
      // Stages of one rank that hold the very same tensor come here with equal gradients; the first one's stays.
      if (shared && !before_[i].defined() && p.grad().defined()) continue;
      p.mutable_grad() = gradient;
    }
  }
  before_.assign(parameters_.size(), {});
}

void GradientKeeper::end_step() noexcept {
  for (size_t i = 0; i < before_.size(); i++) {
    if (before_[i].defined() && !parameters_[i].tensor.grad().defined())
      parameters_[i].tensor.mutable_grad() = before_[i];
  }
  before_.clear();
  own_.clear();
  early_.clear();
  parameters_.clear();
}

}  // namespace plumb
