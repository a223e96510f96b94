#include "plumb/transforms/scale/parameter_scaling.h"

#include <ATen/ops/std.h>

#include <algorithm>
#include <cmath>

#include "plumb/core/error.h"
#include "plumb/numerics/metrics.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/recurrent.h"

namespace plumb {

WeightScale measure_weight(const at::Tensor& weight) {
  const at::ScalarType type = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  WeightScale scale{weight.detach().to(type), 1, ""};
  if (weight.numel() < 2) {
    scale.obstacle = weight.numel() == 0 ? "it has no values" : "a single value has no standard deviation";
  } else if (!weight.is_meta()) {
    // plumb measures a plain tensor on the CPU in one pass; subclasses of Python (fake tensors) have no memory of their
    // own to read. The deviation of a constant is zero.
    const bool plain = scale.wide.is_cpu() && !scale.wide.unsafeGetTensorImpl()->is_python_dispatch();
    scale.std = plain ? measure(scale.wide).std : at::std(scale.wide).item<double>();
    if (!(std::isfinite(scale.std) && scale.std > 0)) {
      scale.obstacle = "its standard deviation is no positive number";
    }
  }
  return scale;
}

std::vector<std::string> ParameterScaling::propose(const std::vector<Proposal>& proposals) {
  at::NoGradGuard no_grad;
  std::vector<std::string> changed;
  for (const Proposal& p : proposals) {
    at::Tensor parameter = p.parameter;
    if (p.kind == ScaledKind::Weight && parameter.is_floating_point()) {
      const WeightScale scale = measure_weight(parameter);
      if (scale.obstacle.empty()) {
        parameter.copy_(scale.wide.div(scale.std));
        add({p.names, ScaledKind::Weight, scale.std, {}});
        changed.push_back(p.names.at(0));
      }
    } else if (p.kind == ScaledKind::Bias) {
      add({p.names, ScaledKind::Bias, 1, parameter.detach().clone()});
      parameter.zero_();
      changed.push_back(p.names.at(0));
    }
    remember(p.names, parameter);
  }
  return changed;
}

void ParameterScaling::remember(const std::vector<std::string>& names, const at::Tensor& parameter) {
  for (const std::string& name : names) versions_[name] = parameter._version();
}

bool ParameterScaling::untouched(const std::vector<std::string>& names, const at::Tensor& parameter) const {
  return std::ranges::all_of(names, [&](const std::string& name) {
    auto it = versions_.find(name);
    return it == versions_.end() || (it->second && parameter._version() <= *it->second);
  });
}

void ParameterScaling::mark_changed(const std::string& name) { versions_[name].reset(); }

bool ParameterScaling::rename(const std::string& before, const std::string& now) {
  auto version = versions_.find(before);
  if (version == versions_.end()) return false;
  const bool changed = !version->second;
  auto& mine = versions_.try_emplace(now, version->second).first->second;
  if (changed) mine.reset();
  if (auto it = index_.find(before); it != index_.end() && !index_.count(now)) {
    const size_t place = it->second;
    index_[now] = place;
    std::ranges::replace(scaled_[place].names, before, now);
  }
  if (confirmed_.count(before)) confirmed_.insert(now);
  return true;
}

void ParameterScaling::look_at(const std::string& name, const at::Tensor& tensor, bool buffer) {
  auto it = versions_.try_emplace(name, tensor._version()).first;
  if (it->second && tensor._version() > *it->second) it->second.reset();
  if (buffer) buffers_.insert(name);
}

void ParameterScaling::add(Scaled scaled) {
  for (const std::string& name : scaled.names) index_[name] = scaled_.size();
  scaled_.push_back(std::move(scaled));
}

ParameterScaling::Scaled* ParameterScaling::find(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (auto it = index_.find(name); it != index_.end()) return &scaled_[it->second];
  }
  return nullptr;
}

bool ParameterScaling::confirm(const std::vector<std::string>& names) {
  bool known = find(names) != nullptr;
  for (const std::string& name : names) known |= !confirmed_.insert(name).second;
  return known;
}

void ParameterScaling::refuse_frozen(const std::vector<std::string>& names) {
  const bool loaded = std::ranges::any_of(names, [&](const std::string& name) {
    auto it = versions_.find(name);
    return it != versions_.end() && !it->second;
  });
  if (frozen_by_.empty() || loaded) return;
  for (const std::string& name : names) confirmed_.erase(name);  // the next graph asks again
  throw Error(ErrorKind::InvalidState,
              "unit_scale changes the values of '" + names.at(0) +
                  "' when its module first runs, because the forward uses it otherwise than its layer says, and " +
                  frozen_by_ + " has copied the parameters before, or put other tensors in their place",
              "", "call the unit-scaled module once, on a batch, before you give it to " + frozen_by_);
}

bool ParameterScaling::write(const std::vector<std::string>& names, const at::Tensor& parameter,
                             const at::Tensor& values) {
  refuse_frozen(names);
  if (!untouched(names, parameter)) return false;
  at::NoGradGuard no_grad;
  parameter.copy_(values);
  remember(names, parameter);
  return true;
}

bool ParameterScaling::undo(const std::vector<std::string>& names, const at::Tensor& parameter) {
  Scaled* scaled = find(names);
  if (scaled && !confirmed_.count(names.at(0))) refuse_frozen(names);
  const bool back = scaled && !confirmed_.count(names.at(0)) && untouched(names, parameter);
  if (back) {
    at::NoGradGuard no_grad;
    if (scaled->kind == ScaledKind::Weight) {
      parameter.mul_(scaled->std);
    } else {
      parameter.add_(scaled->before.to(parameter.options()));
    }
    remember(names, parameter);
    forget(*scaled);
  }
  confirmed_.insert(names.begin(), names.end());
  return back;
}

bool ParameterScaling::give_back(const std::vector<std::string>& names, const at::Tensor& parameter) {
  Scaled* scaled = find(names);
  if (!scaled) return true;
  if (confirmed_.count(names.at(0))) return false;
  if (!undo(names, parameter)) forget(*scaled);
  return true;
}

void ParameterScaling::forget(Scaled& scaled) {
  const auto place = static_cast<size_t>(&scaled - scaled_.data());
  std::erase_if(index_, [&](const auto& entry) { return entry.second == place; });
  scaled = {};
}

void ParameterScaling::add_to(Report& report) const {
  std::set<std::string> named;
  for (const ReportEntry& e : report.entries()) named.insert(e.node);
  for (const Scaled& s : scaled_) {
    if (s.names.empty() || named.count(s.names[0])) continue;
    const bool weight = s.kind == ScaledKind::Weight;
    report.add({.kind = weight ? ReportKind::Weight : ReportKind::Bias,
                .node = s.names[0],
                .from = weight ? c10::str("std ", s.std) : ""});
  }
}

ParameterScaling ParameterScaling::for_copy() const {
  ParameterScaling copy = *this;
  for (auto& [name, version] : copy.versions_) {
    if (version) version = copy.buffers_.count(name);
  }
  return copy;
}

std::vector<ParameterScaling::Saved> ParameterScaling::scaled() const {
  std::vector<Saved> saved;
  for (const Scaled& s : scaled_) {
    if (s.names.empty()) continue;
    saved.emplace_back(s.names, static_cast<int>(s.kind), s.std,
                       s.before.defined() ? std::optional(s.before) : std::nullopt);
  }
  return saved;
}

std::vector<std::string> ParameterScaling::confirmed() const { return {confirmed_.begin(), confirmed_.end()}; }

std::map<std::string, bool> ParameterScaling::changed() const {
  std::map<std::string, bool> changed;
  for (const auto& [name, version] : versions_) changed[name] = !version;
  return changed;
}

ParameterScaling ParameterScaling::restore(const std::vector<Saved>& scaled, const std::vector<std::string>& confirmed,
                                           const std::map<std::string, bool>& changed) {
  ParameterScaling result;
  for (const auto& [names, kind, std, before] : scaled) {
    result.add({names, static_cast<ScaledKind>(kind), std, before.value_or(at::Tensor())});
  }
  result.confirmed_.insert(confirmed.begin(), confirmed.end());
  // Unpickling fills a tensor once at most.
  for (const auto& [name, by_somebody] : changed)
    result.versions_[name] = by_somebody ? std::nullopt : std::optional(1u);
  return result;
}

namespace {

// How a node uses a value.
enum class Role { Weight, Bias, Norm, NormBias, Other };

Role role_of(const Node* node, const Value* value, const std::function<const Equivalent*(const Node*)>& becomes) {
  if (!node->is_call()) return Role::Other;
  const std::string_view name = node->op_name();
  if (name.ends_with("_norm") && name.find("weight_norm") == std::string_view::npos) {
    // Gains and shifts of any normalization, with an equivalent or without.
    for (const char* argument : {"weight", "bias"}) {
      const Arg* arg = node->try_arg(argument);
      if (arg && arg->value() == value) return argument[0] == 'w' ? Role::Norm : Role::NormBias;
    }
    return Role::Other;
  }
  const Equivalent* equivalent = becomes(node);
  if (!equivalent) return Role::Other;
  if (equivalent->recurrent) {
    const RecurrentRole role = recurrent_role(node, value);
    return role == RecurrentRole::Weight ? Role::Weight : role == RecurrentRole::Bias ? Role::Bias : Role::Other;
  }
  for (std::string_view argument : equivalent->weights) {
    if (const Arg* arg = node->try_arg(argument); arg && arg->value() == value) return Role::Weight;
  }
  if (!equivalent->bias.empty()) {
    if (const Arg* arg = node->try_arg(equivalent->bias); arg && arg->value() == value) return Role::Bias;
  }
  return Role::Other;
}

struct Candidate {
  std::vector<std::string> names;
  std::vector<const Node*> weight_of, bias_of;
  bool norm = false, norm_bias = false;
  std::vector<const Node*> other;
};

std::string who(const Node* node) {
  const std::string where = node->meta().where();
  return node->describe() + (where.empty() ? "" : " in " + where);
}

// Returns the tensors that could be weights or biases, by the first of their names (tied names are one tensor), with
// what uses them.
std::map<std::string, Candidate> find_candidates(const Graph& graph, const State& state,
                                                 const std::function<const Equivalent*(const Node*)>& becomes) {
  std::unordered_map<const c10::TensorImpl*, std::string> first_name;
  std::map<std::string, Candidate> candidates;
  std::unordered_map<std::string, std::string> name_of;
  for (const Attr& attr : state) {
    if (attr.kind == AttrKind::Constant || !attr.tensor.defined()) continue;
    if (!attr.tensor.is_floating_point() && !attr.tensor.is_complex()) continue;
    auto [it, fresh] = first_name.try_emplace(attr.tensor.unsafeGetTensorImpl(), attr.name);
    candidates[it->second].names.push_back(attr.name);
    name_of[attr.name] = it->second;
  }
  for (const Node* node : graph.nodes()) {
    if (node->kind() != NodeKind::GetAttr) continue;
    auto name = name_of.find(node->target());
    if (name == name_of.end()) continue;
    Candidate& candidate = candidates[name->second];
    for (const Use& use : effective_uses(node->result())) {
      switch (role_of(use.user, use.user->input(use.index), becomes)) {
        case Role::Weight: candidate.weight_of.push_back(use.user); break;
        case Role::Bias: candidate.bias_of.push_back(use.user); break;
        case Role::Norm: candidate.norm = true; break;
        case Role::NormBias: candidate.norm_bias = true; break;
        case Role::Other: candidate.other.push_back(use.user); break;
      }
    }
  }
  return candidates;
}

// Takes the replacement back from operators whose weight has another use, one after the other until nothing is left to
// take back; every round takes back at least one, and what an operator's other tensors were to it becomes another use
// of them. Returns the operators and why.
std::unordered_map<const Node*, std::string> take_back_contested(std::map<std::string, Candidate>& candidates) {
  std::unordered_map<const Node*, std::string> left_alone;
  std::vector<const std::string*> open;
  std::unordered_map<const Node*, std::vector<const std::string*>> tensors_of;
  for (const auto& [name, c] : candidates) {
    open.push_back(&name);
    for (const Node* node : c.weight_of) tensors_of[node].push_back(&name);
    for (const Node* node : c.bias_of) tensors_of[node].push_back(&name);
  }
  while (!open.empty()) {
    const std::string& name = *open.back();
    open.pop_back();
    Candidate& c = candidates[name];
    if (c.weight_of.empty() || (c.other.empty() && c.bias_of.empty() && !c.norm && !c.norm_bias)) continue;
    const std::string other = !c.other.empty()     ? who(c.other[0])
                              : !c.bias_of.empty() ? who(c.bias_of[0]) + " as a bias"
                                                   : "a normalization";
    std::vector<const Node*> taken_back;
    taken_back.swap(c.weight_of);
    for (const Node* node : taken_back) {
      c.other.push_back(node);
      if (!left_alone.emplace(node, "its weight " + name + " is used by " + other + ", too").second) continue;
      for (const std::string* affected : tensors_of[node]) {
        Candidate& a = candidates[*affected];
        const size_t before = a.weight_of.size() + a.bias_of.size();
        std::erase(a.weight_of, node);
        std::erase(a.bias_of, node);
        if (a.weight_of.size() + a.bias_of.size() != before) a.other.push_back(node);
        open.push_back(affected);
      }
    }
  }
  return left_alone;
}

}  // namespace

void ParameterRoles::moved(const std::unordered_map<const Node*, const Node*>& replaced) {
  for (auto* table : {&weights, &biases}) {
    for (auto& [name, entry] : *table) {
      for (const Node*& node : entry.operators) {
        if (auto it = replaced.find(node); it != replaced.end()) node = it->second;
      }
    }
  }
}

ParameterRoles plan_parameters(const Graph& graph, const State& state,
                               const std::function<const Equivalent*(const Node*)>& becomes) {
  std::map<std::string, Candidate> candidates = find_candidates(graph, state, becomes);
  ParameterRoles roles;
  roles.left_alone = take_back_contested(candidates);
  for (auto& [name, c] : candidates) {
    if (!c.weight_of.empty()) {
      roles.weights[name] = {c.names, c.weight_of};
    } else if (state.find(name)->kind == AttrKind::Buffer) {
      continue;  // it is no bias that could start at zero, nor is its use news
    } else if (!c.bias_of.empty() && c.other.empty() && !c.norm && !c.norm_bias) {
      roles.biases[name] = {c.names, c.bias_of};
    } else if (c.norm) {
      roles.norms.insert(c.names.begin(), c.names.end());
    } else if (!c.other.empty()) {
      roles.others[name] = who(c.other[0]);
    }
  }
  return roles;
}

namespace {

class ParameterWriter {
 public:
  ParameterWriter(GraphModule& module, Report& report, ParameterScaling* live)
      : state_(module.state()), report_(report), live_(live) {}

  void scale_weight(const std::string& name, const std::vector<std::string>& names) {
    if (live_ && live_->confirm(names)) return;
    const at::Tensor weight = state_.get(name).tensor.detach();
    const WeightScale scale = measure_weight(weight);
    const std::string from = weight.numel() < 2 || weight.is_meta() ? "" : "std " + std::to_string(scale.std);
    if (!scale.obstacle.empty()) return add(ReportKind::LeftAlone, name, from, scale.obstacle);
    const at::Tensor values =
        weight.is_meta() ? at::empty_like(weight) : (scale.wide / scale.std).to(weight.scalar_type());
    write(ReportKind::Weight, name, names, values, from);
  }

  void clear_bias(const std::string& name, const std::vector<std::string>& names) {
    if (live_ && live_->confirm(names)) return;
    write(ReportKind::Bias, name, names, at::zeros_like(state_.get(name).tensor), "");
  }

  void leave_alone(const std::string& name, const std::string& user) {
    add(ReportKind::LeftAlone, name, "", "used by " + user);
    if (live_) changed_ |= live_->undo(names_of(name), state_.get(name).tensor);
  }

  bool changed() const { return changed_; }

 private:
  void write(ReportKind kind, const std::string& name, const std::vector<std::string>& names, at::Tensor values,
             const std::string& from) {
    if (live_) {
      if (!live_->write(names, state_.get(name).tensor, values)) {
        return add(ReportKind::LeftAlone, name, from, "its values were changed since unit_scale()");
      }
    } else {
      values.set_requires_grad(state_.get(names[0]).tensor.requires_grad());
      for (const auto& n : names) state_.set(n, values, state_.get(n).kind);
    }
    changed_ = true;
    add(kind, name, from, other_names(names));
  }

  void add(ReportKind kind, const std::string& name, std::string from, std::string reason) {
    report_.add({.kind = kind, .node = name, .from = std::move(from), .reason = std::move(reason)});
  }

  std::vector<std::string> names_of(const std::string& name) const {
    std::vector<std::string> names;
    const auto* tensor = state_.get(name).tensor.unsafeGetTensorImpl();
    for (const Attr& attr : state_) {
      if (attr.tensor.unsafeGetTensorImpl() == tensor) names.push_back(attr.name);
    }
    return names;
  }

  State& state_;
  Report& report_;
  ParameterScaling* live_;
  bool changed_ = false;
};

// Returns how many values of a weight of these sizes an output of the product sums over; nullopt if nothing says so.
// Sizes of a file's values may be any numbers, those of the weight are not.
std::optional<int64_t> fan_in(const Node* node, at::IntArrayRef weight) {
  const Contraction& product = node->facts().contraction;
  if (product.kind == ContractionKind::Product) {
    for (const auto& [name, dim] : product.named_operands()) {
      const auto sizes = sizes_of_argument(node, name);
      const size_t from_end = static_cast<size_t>(-dim);
      if (sizes && sizes->size() >= from_end) return (*sizes)[sizes->size() - from_end];
    }
  } else if (product.kind == ContractionKind::TransposedConvolution && weight.size() > 2) {
    const Arg &stride = node->arg("stride"), &groups = node->arg("groups");
    if (!stride.is_constant() || !groups.is_constant()) return std::nullopt;
    // in x out / groups x kernel, of which an output meets one place in `stride`
    double outputs = static_cast<double>(weight[1]) * static_cast<double>(groups.constant().toInt());
    const std::vector<int64_t> strides = stride.constant().toIntVector();
    for (size_t i = 2; i < weight.size() && !strides.empty(); ++i)
      outputs *= static_cast<double>(strides[std::min(i - 2, strides.size() - 1)]);
    if (outputs > 0) return static_cast<int64_t>(static_cast<double>(c10::multiply_integers(weight)) / outputs);
  }
  return std::nullopt;
}

}  // namespace

bool scale_parameters(GraphModule& module, const ParameterRoles& roles, Report& report, ParameterScaling* live) {
  at::NoGradGuard no_grad;
  ParameterWriter writer(module, report, live);
  for (const auto& [name, role] : roles.weights) writer.scale_weight(name, role.names);
  for (const auto& [name, role] : roles.biases) writer.clear_bias(name, role.names);
  for (const auto& [name, user] : roles.others) writer.leave_alone(name, user);
  if (live) live->add_to(report);
  if (writer.changed()) module.sync_module();
  return writer.changed();
}

void tag_parameters(const GraphModule& module, const ParameterRoles& roles,
                    const std::unordered_map<std::string, int64_t>& depth_of, MupTable& tags) {
  for (const Attr& attr : module.state()) {
    if (attr.kind != AttrKind::Parameter || !attr.tensor.defined()) continue;
    ParameterData data{MupType::Norm, std::nullopt};
    const bool one_dimensional = attr.tensor.dim() <= 1;
    if (one_dimensional && !roles.norms.count(attr.name)) data.type = MupType::Bias;
    if (auto it = depth_of.find(attr.name); it != depth_of.end()) data.scaling_depth = it->second;
    tags.emplace(attr.name, data);
  }
  for (const auto& [name, role] : roles.weights) {
    bool readout = !role.operators.empty();
    for (const Node* node : role.operators) readout = readout && node->is_op("plumb::linear_readout");
    const at::IntArrayRef sizes = module.state().get(name).tensor.sizes();
    std::optional<int64_t> summed;
    for (const Node* node : role.operators) summed = summed ? summed : fan_in(node, sizes);
    for (const auto& n : role.names) {
      const Attr& attr = module.state().get(n);
      if (attr.kind != AttrKind::Parameter) continue;
      tags[n].type = readout ? MupType::Output : MupType::Weight;
      if (summed && *summed > 0 && *summed != shape_fan_in(sizes)) tags[n].fan_in = summed;
    }
  }
  for (const auto& [name, role] : roles.biases) {
    for (const auto& n : role.names) tags[n].type = MupType::Bias;
  }
}

}  // namespace plumb
