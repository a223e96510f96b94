#include "plumb/graph/state.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>

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

namespace {

// Copies tensors so that those which overlap in memory, as a buffer and a view of it, do so in the copy.
class MemoryCopy {
 public:
  explicit MemoryCopy(const std::vector<Attr>& attrs) {
    for (const Attr& attr : attrs) {
      if (!is_dense_memory(attr.tensor)) continue;
      const Range range = range_of(attr.tensor);
      Range& known = ranges_[attr.tensor.storage().unsafeGetStorageImpl()].emplace_back(range);
      known.first = attr.tensor.unsafeGetTensorImpl();
    }
    for (auto& [storage, ranges] : ranges_) merge(ranges);
  }

  at::Tensor copy(const at::Tensor& t) {
    if (!is_dense_memory(t)) return t.detach().clone();
    const Range own = range_of(t);
    auto& ranges = ranges_[t.storage().unsafeGetStorageImpl()];
    Range& range =
        *std::ranges::find_if(ranges, [&](const Range& r) { return r.begin <= own.begin && own.end <= r.end; });
    if (!range.shared) return t.detach().clone();
    const auto bytes = t.detach().options().dtype(at::kByte);
    if (!range.copy.defined())
      range.copy = at::empty({0}, bytes).set_(t.storage(), range.begin, {range.end - range.begin}, {1}).clone();
    const auto item = static_cast<int64_t>(t.itemsize());
    return at::empty({0}, t.detach().options())
        .set_(range.copy.storage(), t.storage_offset() - range.begin / item, t.sizes(), t.strides());
  }

 private:
  // Bytes of a storage that tensors of the state cover without a gap.
  struct Range {
    int64_t begin, end;
    const c10::TensorImpl* first = nullptr;
    bool shared = false;  // by several tensors
    at::Tensor copy = {};
  };

  static bool is_dense_memory(const at::Tensor& t) {
    return t.defined() && t.has_storage() && t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized() &&
           !t.is_meta() && !t.is_conj() && !t.is_neg() && t.numel() > 0;
  }
  static Range range_of(const at::Tensor& t) {
    const auto item = static_cast<int64_t>(t.itemsize());
    const auto end = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
    const int64_t begin = t.storage_offset() * item;
    return {begin - begin % 16, static_cast<int64_t>(end)};  // a multiple of every item's size
  }
  static void merge(std::vector<Range>& ranges) {
    std::ranges::sort(ranges, {}, &Range::begin);
    std::vector<Range> merged;
    for (const Range& range : ranges) {
      if (merged.empty() || merged.back().end <= range.begin) {
        merged.push_back(range);
        continue;
      }
      merged.back().shared = merged.back().shared || merged.back().first != range.first;
      merged.back().end = std::max(merged.back().end, range.end);
    }
    ranges = std::move(merged);
  }

  std::unordered_map<const c10::StorageImpl*, std::vector<Range>> ranges_;
};

}  // namespace

State State::deep_copy() const {
  State copy;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> seen;
  MemoryCopy memory(attrs_);
  for (const Attr& attr : attrs_) {
    Attr twin = attr;
    if (attr.tensor.defined()) {
      auto [it, fresh] = seen.emplace(attr.tensor.unsafeGetTensorImpl(), at::Tensor());
      if (fresh) {
        it->second = memory.copy(attr.tensor).set_requires_grad(attr.tensor.requires_grad());
        copy_tag(attr.tensor, it->second);
      }
      twin.tensor = it->second;
    }
    copy.add(std::move(twin));
  }
  return copy;
}

}  // namespace plumb
