#include "plumb/transforms/scale/parameter_scaling.h"

#include <ATen/ops/std.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "plumb/numerics/metrics.h"

namespace plumb {

WeightScale measure_weight(const at::Tensor& weight) {
  const at::ScalarType type = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  WeightScale scale{weight.detach().to(type), 1, ""};
  if (weight.numel() < 2) {
    scale.obstacle = "a single value has no standard deviation";
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

bool ParameterScaling::write(const std::vector<std::string>& names, const at::Tensor& parameter,
                             const at::Tensor& values) {
  if (!untouched(names, parameter)) return false;
  at::NoGradGuard no_grad;
  parameter.copy_(values);
  remember(names, parameter);
  return true;
}

bool ParameterScaling::undo(const std::vector<std::string>& names, const at::Tensor& parameter) {
  Scaled* scaled = find(names);
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
  for (const std::string& name : scaled.names) index_.erase(name);
  scaled = {};
}

void ParameterScaling::add_to(Report& report) const {
  std::set<std::string> named;
  for (const ReportEntry& e : report.entries()) named.insert(e.node);
  for (const Scaled& s : scaled_) {
    if (s.names.empty() || named.count(s.names[0])) continue;
    ReportEntry entry;
    entry.kind = s.kind == ScaledKind::Weight ? ReportKind::Weight : ReportKind::Bias;
    entry.node = s.names[0];
    if (s.kind == ScaledKind::Weight) {
      char text[32];
      std::snprintf(text, sizeof text, "std %g", s.std);
      entry.from = text;
    }
    report.add(std::move(entry));
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

}  // namespace plumb
