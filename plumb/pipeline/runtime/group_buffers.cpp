#include "plumb/pipeline/runtime/group_buffers.h"

#include <ATen/ATen.h>

#include "plumb/pipeline/runtime/gradients.h"

namespace plumb {
namespace {

Tensors values_of(const std::vector<NamedTensor>& buffers) {
  Tensors values;
  for (const auto& b : buffers) values.push_back(b.tensor.detach().clone());
  return values;
}

// Norms save their statistics for the backward and do not read them there: no version may change, as none does where
// their kernels write them.
void put(const std::vector<NamedTensor>& buffers, const Tensors& values) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers.size(); i++) buffers[i].tensor.variable_data().copy_(values[i]);
}

}  // namespace

GroupBuffers::GroupBuffers(std::vector<NamedTensor> buffers, int groups, int microbatches)
    : buffers_(std::move(buffers)), groups_(groups), size_(microbatches / groups) {}

void GroupBuffers::begin_step() {
  before_ = values_of(buffers_);
  by_group_.assign(groups_, {});
  now_ = -1;
}

void GroupBuffers::keep() {
  if (now_ >= 0) by_group_[now_] = values_of(buffers_);
}

void GroupBuffers::begin_microbatch(int microbatch) {
  const int group = microbatch / size_;
  if (group == now_ || buffers_.empty()) return;
  keep();
  const Tensors& held = by_group_[group];
  put(buffers_, held.empty() ? before_ : held);
  now_ = group;
}

Tensors GroupBuffers::sums() {
  keep();
  Tensors sums;
  for (size_t i = 0; i < buffers_.size(); i++) {
    Tensors parts;
    for (const Tensors& values : by_group_) parts.push_back(values.empty() ? before_[i] : values[i]);
    sums.push_back(buffers_[i].tensor.is_floating_point() ? tree_sum(std::move(parts)) : parts[0]);
  }
  return sums;
}

void GroupBuffers::finish_step(const Tensors& sums, int groups_of_all) {
  Tensors means;
  for (const at::Tensor& sum : sums) means.push_back(sum.is_floating_point() ? sum / groups_of_all : sum);
  put(buffers_, means);
}

}  // namespace plumb
