#include "plumb/graph/state.h"

#include <ATen/ATen.h>

#include "plumb/core/error.h"
#include "plumb/core/text.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {

void State::add(Attr attr) {
  const std::string_view name = attr.name;
  if (name.empty() || name.front() == '.' || name.back() == '.' || name.find("..") != name.npos || !is_utf8(name)) {
    throw Error(ErrorKind::InvalidArgument, "'" + attr.name + "' is no name of a parameter, buffer or constant", "",
                "give parts that are not empty, with dots between them, as UTF-8");
  }
  auto [it, inserted] = index_.emplace(attr.name, attrs_.size());
  if (!inserted) throw Error(ErrorKind::InvalidArgument, "the state has '" + attr.name + "' already");
  attrs_.push_back(std::move(attr));
}

void State::set(const std::string& name, at::Tensor tensor, AttrKind kind) {
  auto it = index_.find(name);
  if (it == index_.end()) {
    add({name, kind, std::move(tensor), true});
  } else {
    attrs_[it->second].tensor = std::move(tensor);
  }
}

void State::erase(const std::string& name) {
  auto it = index_.find(name);
  if (it == index_.end()) return;
  attrs_.erase(attrs_.begin() + static_cast<std::ptrdiff_t>(it->second));
  index_.clear();
  for (size_t i = 0; i < attrs_.size(); ++i) index_.emplace(attrs_[i].name, i);
}

const Attr* State::find(std::string_view name) const {
  auto it = index_.find(std::string(name));
  return it == index_.end() ? nullptr : &attrs_[it->second];
}

const Attr& State::get(std::string_view name) const {
  if (const Attr* found = find(name)) return *found;
  // The likeliest slip is a wrong prefix: offer names that end alike.
  std::string near;
  const std::string_view tail = name.substr(name.rfind('.') + 1);
  for (const Attr& attr : attrs_) {
    if (near.size() < 200 && std::string_view(attr.name).ends_with(tail))
      near += (near.empty() ? "" : ", ") + attr.name;
  }
  throw Error(ErrorKind::UnknownName, "no parameter, buffer or constant '" + std::string(name) + "'", "",
              near.empty() ? "see state().attrs() for the names there are" : "names that end alike: " + near);
}

std::vector<std::string> State::names(AttrKind kind) const {
  std::vector<std::string> found;
  for (const Attr& attr : attrs_) {
    if (attr.kind == kind) found.push_back(attr.name);
  }
  return found;
}

std::string State::unique_name(const std::string& hint) const {
  if (!contains(hint)) return hint;
  for (size_t i = 1;; ++i) {
    std::string name = hint + "_" + std::to_string(i);
    if (!contains(name)) return name;
  }
}

State State::deep_copy() const {
  State copy;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> seen;
  for (const Attr& attr : attrs_) {
    Attr twin = attr;
    if (attr.tensor.defined()) {
      auto [it, fresh] = seen.emplace(attr.tensor.unsafeGetTensorImpl(), at::Tensor());
      if (fresh) {
        it->second = attr.tensor.detach().clone().set_requires_grad(attr.tensor.requires_grad());
        copy_tag(attr.tensor, it->second);
      }
      twin.tensor = it->second;
    }
    copy.add(std::move(twin));
  }
  return copy;
}

}  // namespace plumb
