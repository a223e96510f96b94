#include "plumb/tensors/deferred_checks.h"

#include <ATen/ops/stack.h>

#include <unordered_map>
#include <utility>

namespace plumb {
namespace {

thread_local DeferredChecks* scope = nullptr;

}  // namespace

DeferredChecks::DeferredChecks() : outer_(std::exchange(scope, this)) {}
DeferredChecks::~DeferredChecks() { scope = outer_; }

bool DeferredChecks::active() { return scope != nullptr; }

void DeferredChecks::raise(const std::string& at) {
  const std::vector<Check> checks = std::exchange(checks_, {});
  std::unordered_map<c10::Device, std::vector<size_t>> places;
  for (size_t i = 0; i < checks.size(); ++i) places[checks[i].passed.device()].push_back(i);
  size_t first = checks.size();
  for (const auto& [device, which] : places) {
    std::vector<at::Tensor> flags;
    for (size_t i : which) flags.push_back(checks[i].passed);
    const at::Tensor read = at::stack(flags).cpu();
    const bool* passed = read.const_data_ptr<bool>();
    for (size_t k = 0; k < which.size(); ++k) {
      if (!passed[k] && which[k] < first) first = which[k];
    }
  }
  if (first == checks.size()) return;
  const Error e = checks[first].failure();
  throw Error(e.kind(), at + e.message(), e.where(), e.remedy());
}

void DeferredChecks::raise_before(const Error& thrown, const std::string& at) {
  if (thrown.kind() != ErrorKind::ExecutionFailed) return;
  try {
    raise(at);
  } catch (const c10::Error&) {
  }
}

void check_value(const at::Tensor& passed, std::function<Error()> failure) {
  if (scope && !passed.is_cpu()) {
    scope->checks_.push_back({passed.detach(), std::move(failure)});
  } else if (!passed.item<bool>()) {
    throw failure();
  }
}

}  // namespace plumb
