#include "plumb/tensors/parameter_tag.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>

#include "plumb/core/error.h"

namespace plumb {
namespace {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;

struct Entry {
  Weak tensor;  // while this is held no other tensor can get the address
  ParameterData data;
};

struct Tags {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Entry> entries;
  size_t sweep_at = 64;
};

Tags& all_tags() {
  static auto* tags = new Tags;  // outlives every tensor, those of other static objects too
  return *tags;
}

constexpr std::string_view kTypeNames[] = {"weight", "bias", "norm", "output"};  // in the order of MupType

}  // namespace

std::string_view to_string(MupType type) { return kTypeNames[static_cast<size_t>(type)]; }

MupType mup_type_from(std::string_view name) {
  const auto known = std::ranges::find(kTypeNames, name);
  if (known != std::end(kTypeNames)) return static_cast<MupType>(known - kTypeNames);
  throw Error(ErrorKind::UnknownName, "There is no u-muP parameter type '" + std::string(name) + "'.", "",
              "weight, bias, norm or output");
}

int64_t shape_fan_in(at::IntArrayRef sizes) {
  if (sizes.empty()) return 1;
  // A weight without elements is never stepped: any number will do.
  return std::max<int64_t>(sizes.size() == 1 ? sizes[0] : c10::multiply_integers(sizes.slice(1)), 1);
}

at::Tensor make_parameter(at::Tensor data, MupType type, std::optional<int64_t> scaling_depth) {
  auto parameter = data.detach().requires_grad_();
  tag(parameter, {type, scaling_depth, std::nullopt});
  return parameter;
}

void tag(const at::Tensor& parameter, ParameterData data) {
  if (!parameter.defined()) throw Error(ErrorKind::InvalidArgument, "An undefined tensor cannot be tagged.");
  if (data.scaling_depth && *data.scaling_depth < 1) {
    throw Error(ErrorKind::InvalidArgument,
                "A scaling depth is at least 1, not " + std::to_string(*data.scaling_depth) + ".");
  }
  if (data.fan_in && *data.fan_in < 1)
    throw Error(ErrorKind::InvalidArgument, "A fan-in is at least 1, not " + std::to_string(*data.fan_in) + ".");
  auto& tags = all_tags();
  std::lock_guard lock(tags.mutex);
  tags.entries.insert_or_assign(parameter.unsafeGetTensorImpl(), Entry{Weak(parameter.getIntrusivePtr()), data});
  if (tags.entries.size() < tags.sweep_at) return;
  std::erase_if(tags.entries, [](const auto& item) { return item.second.tensor.expired(); });
  tags.sweep_at = 2 * tags.entries.size() + 64;
}

std::optional<ParameterData> parameter_data(const at::Tensor& parameter) {
  if (!parameter.defined()) return std::nullopt;
  auto& tags = all_tags();
  std::lock_guard lock(tags.mutex);
  auto found = tags.entries.find(parameter.unsafeGetTensorImpl());
  return found == tags.entries.end() ? std::nullopt : std::optional(found->second.data);
}

void untag(const at::Tensor& parameter) {
  auto& tags = all_tags();
  std::lock_guard lock(tags.mutex);
  if (parameter.defined()) tags.entries.erase(parameter.unsafeGetTensorImpl());
}

void copy_tag(const at::Tensor& from, const at::Tensor& to) {
  if (const auto data = parameter_data(from)) tag(to, *data);
}

}  // namespace plumb
