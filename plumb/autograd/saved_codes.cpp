#include "plumb/autograd/saved_codes.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "plumb/numerics/codes.h"
#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
namespace generated = torch::autograd::generated;

constexpr size_t kKnown = 64;          // tensors remembered: a product's inputs are quantised just before it
constexpr int64_t kFewElements = 512;  // below it a hook costs more than it saves
constexpr size_t kNear = 12;           // nodes looked at behind a result: views, a scale, a bias's sum

using Impl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Known {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  FPFormat format;
  uint32_t version;
  std::optional<Impl> codes;  // of the whole memory, shared by all that save a part of it and kept alive by them alone
  at::Tensor unused;          // the same, made while rounding, until the first of them comes
};

struct Recent {
  std::vector<Known> ring;
  size_t next = 0;
};
Recent& recent() {
  thread_local Recent r;
  return r;
}

// A strided CPU tensor of its own, no tracer's.
bool ordinary(const at::Tensor& x) {
  return x.is_cpu() && x.layout() == at::kStrided && !x.is_inference() && !at::isTensorSubclassLike(x) &&
         !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !c10::impl::dispatch_mode_enabled();
}

Known* find_known(const at::Tensor& x) {
  const auto* storage = x.storage().unsafeGetStorageImpl();
  for (Known& known : recent().ring) {
    if (known.storage._unsafe_get_target() == storage && !known.storage.expired())
      return known.version == x._version() ? &known : nullptr;
  }
  return nullptr;
}

// What is kept in a tensor's place: a view of memory that can be made again.
class CodesHooks : public torch::autograd::SavedVariableHooks {
 public:
  CodesHooks(at::Tensor codes, const FPFormat& format, const at::Tensor& view)
      : codes_(std::move(codes)),
        format_(format),
        dtype_(view.scalar_type()),
        sizes_(view.sizes()),
        strides_(view.strides()),
        offset_(view.storage_offset()) {}

  void call_pack_hook(const at::Tensor&) override {}
  at::Tensor call_unpack_hook() override {
    at::AutoDispatchBelowADInplaceOrView below;
    return unpack_codes(codes_, format_, dtype_).as_strided(sizes_, strides_, offset_);
  }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::nullopt;  // not Python's
  }

 private:
  const at::Tensor codes_;
  const FPFormat format_;
  const at::ScalarType dtype_;
  const c10::DimVector sizes_, strides_;
  const int64_t offset_;
};

at::Tensor codes_of_memory(const at::Tensor& x, Known& known) {
  if (known.unused.defined()) {
    at::Tensor codes = std::move(known.unused);
    known.unused.reset();
    known.codes = Impl(codes.getIntrusivePtr());
    return codes;
  }
  if (known.codes) {
    if (auto alive = known.codes->lock()) return at::Tensor(std::move(alive));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  const auto elements = static_cast<int64_t>(x.storage().nbytes() / x.element_size());
  const at::Tensor memory =
      at::empty({0}, x.options().requires_grad(false)).set_(x.storage(), 0, {elements}, {int64_t(1)});
  at::Tensor codes = pack_codes(memory, known.format);
  if (codes.defined()) known.codes = Impl(codes.getIntrusivePtr());
  return codes;
}

void pack(SavedVariable& saved) {
  const auto data = saved.get_raw_data();
  if (!data || !data->defined() || !ordinary(*data) || data->numel() < kFewElements) return;
  Known* known = find_known(*data);
  if (!known) return;
  at::Tensor codes = codes_of_memory(*data, *known);
  if (!codes.defined()) return;
  saved.register_hooks(std::make_unique<CodesHooks>(std::move(codes), known->format, *data));
}

template <class N, class... Members>
bool pack_members(Node* node, Members... members) {
  auto* own = dynamic_cast<N*>(node);
  if (!own) return false;
  (pack(own->*members), ...);
  return true;
}

void pack_saved_by(Node* node) {
  using namespace generated;
  if (auto* ours = dynamic_cast<SavesTensors*>(node)) {
    ours->visit_saved(pack);
    return;
  }
  (void)(pack_members<AddmmBackward0>(node, &AddmmBackward0::mat1_, &AddmmBackward0::mat2_) ||
         pack_members<MmBackward0>(node, &MmBackward0::self_, &MmBackward0::mat2_) ||
         pack_members<BmmBackward0>(node, &BmmBackward0::self_, &BmmBackward0::mat2_) ||
         pack_members<BaddbmmBackward0>(node, &BaddbmmBackward0::batch1_, &BaddbmmBackward0::batch2_) ||
         pack_members<ConvolutionBackward0>(node, &ConvolutionBackward0::input_, &ConvolutionBackward0::weight_) ||
         pack_members<ScaledDotProductFlashAttentionForCpuBackward0>(
             node, &ScaledDotProductFlashAttentionForCpuBackward0::query_,
             &ScaledDotProductFlashAttentionForCpuBackward0::key_,
             &ScaledDotProductFlashAttentionForCpuBackward0::value_));
}

}  // namespace

namespace {

bool has_codes(const at::Tensor& x, const FPFormat& format) {
  return format.bits() <= 8 && !format.has_blocks() && ordinary(x) && x.numel() >= kFewElements;
}

void remember(const at::Tensor& x, const FPFormat& format, at::Tensor codes) {
  auto& [ring, next] = recent();
  for (Known& known : ring) {
    if (known.unused.defined() && known.storage.expired()) known.unused.reset();
  }
  Known known{x.storage().getWeakStorageImpl(), format, uint32_t(x._version()), std::nullopt, std::move(codes)};
  if (ring.size() < kKnown) {
    ring.push_back(std::move(known));
  } else {
    ring[next] = std::move(known);
    next = (next + 1) % kKnown;
  }
}

}  // namespace

void remember_quantised(const at::Tensor& x, const FPFormat& format) {
  if (has_codes(x, format)) remember(x, format, at::Tensor());
}

at::Tensor quantise_and_remember(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed) {
  if (!has_codes(x, format)) return {};
  auto [result, codes] = quantise_and_pack(x, format, seed);
  if (codes.defined()) remember(result, format, std::move(codes));
  return result;
}

void save_as_codes(const at::Tensor& result) {
  if (recent().ring.empty() || !ordinary(result)) return;
  const auto first = result.grad_fn();
  if (!first) return;
  std::array<Node*, kNear> seen;
  size_t count = 0;
  seen[count++] = &*first;
  for (size_t i = 0; i < count; ++i) {
    pack_saved_by(seen[i]);
    for (const auto& edge : seen[i]->next_edges()) {
      if (!edge.function || count == kNear) continue;
      seen[count++] = &*edge.function;
    }
  }
}

}  // namespace plumb
