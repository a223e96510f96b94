#include "plumb/training/step/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "plumb/pipeline/transport/broadcast.h"

namespace plumb {
namespace {

constexpr int64_t kBlock = 4096;

// Eight sums beside each other, so that the compiler may use vectors, then one after the other.
template <class T>
double block_sum(const T* values, int64_t count) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int k = 0; k < 8; ++k) {
      const auto v = static_cast<double>(values[i + k]);
      sums[k] += v * v;
    }
  }
  for (; i < count; ++i) sums[i % 8] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double sum = 0;
  for (const double s : sums) sum += s;
  return sum;
}

template <class T>
double sum_blocks(const at::Tensor& flat) {
  const T* values = flat.const_data_ptr<T>();
  double sum = 0;
  for (int64_t i = 0; i < flat.numel(); i += kBlock) sum += block_sum(values + i, std::min(kBlock, flat.numel() - i));
  return sum;
}

}  // namespace

std::vector<ModelParameter> trained_parameters(const GraphModule& model, const Pipe& pipe) {
  std::map<std::string, int> first_stage;
  for (int s = 0; s < pipe.num_stages(); ++s) {
    for (const Attr& attr : pipe.stage(s)->state()) {
      if (attr.kind == AttrKind::Parameter) first_stage.emplace(attr.name, s);
    }
  }
  std::vector<ModelParameter> all;
  std::map<const c10::TensorImpl*, size_t> known;
  for (const Attr& attr : model.state()) {
    if (attr.kind != AttrKind::Parameter || !attr.tensor.requires_grad()) continue;
    const auto [it, is_new] = known.emplace(attr.tensor.unsafeGetTensorImpl(), all.size());
    if (is_new) all.push_back({attr.name, -1, attr.name});
    const auto held = first_stage.find(attr.name);
    ModelParameter& parameter = all[it->second];
    if (held == first_stage.end() || (parameter.stage >= 0 && held->second >= parameter.stage)) continue;
    parameter.stage = held->second;
    parameter.held_as = attr.name;
  }
  std::erase_if(all, [](const ModelParameter& p) { return p.stage < 0; });
  return all;
}

void share_numbers(const ProcessGroup& group, const std::vector<int>& owners, std::vector<double>& values) {
  if (group.size() == 1 || values.empty()) return;
  for (int rank = 0; rank < group.size(); ++rank) {
    std::vector<double> theirs;
    for (size_t i = 0; i < values.size(); ++i) {
      if (owners[i] == rank) theirs.push_back(values[i]);
    }
    if (theirs.empty()) continue;
    broadcast(group, at::from_blob(theirs.data(), {static_cast<int64_t>(theirs.size())}, at::kDouble), rank);
    auto next = theirs.begin();
    for (size_t i = 0; i < values.size(); ++i) {
      if (owners[i] == rank) values[i] = *next++;
    }
  }
}

int64_t of_rank_0(const ProcessGroup& group, int64_t number) {
  const at::Tensor told = at::full({1}, number, at::kLong);
  broadcast(group, told, 0);
  return told.item<int64_t>();
}

double sum_of_squares(const at::Tensor& tensor) {
  if (tensor.is_complex()) return sum_of_squares(at::view_as_real(tensor.detach().resolve_conj()));
  if (!tensor.is_cpu()) return tensor.detach().to(at::kDouble).square().sum().item<double>();
  at::Tensor flat = tensor.detach().contiguous().reshape({-1});
  if (flat.scalar_type() == at::kDouble) return sum_blocks<double>(flat);
  if (flat.scalar_type() != at::kFloat) flat = flat.to(at::kFloat);
  return sum_blocks<float>(flat);
}

double clip_gradients(const NamedTensors& parameters, double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (max_norm == 0 || !(factor < 1)) return 1;
  at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : parameters) {
    if (tensor.grad().defined()) tensor.grad().mul_(factor);
  }
  return factor;
}

void PassSum::take(double weight) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = parameters_[i].second.mutable_grad();
    if (!grad.defined()) continue;
    if (weight != 1) grad.mul_(weight);
    at::Tensor& sum = sums_[i];
    sum = sum.defined() ? sum.add_(grad) : grad;
    grad.reset();
  }
}

void PassSum::give(int64_t passes) {
  at::NoGradGuard no_grad;
  for (auto& [i, sum] : sums_) parameters_[i].second.mutable_grad() = sum.div_(static_cast<double>(passes));
  sums_.clear();
}

}  // namespace plumb
