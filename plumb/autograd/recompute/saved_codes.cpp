#include "plumb/autograd/recompute/saved_codes.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "plumb/autograd/recompute/recompute_recipe.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/quantise.h"

namespace plumb {
namespace {

constexpr size_t kKnown = 64;          // tensors remembered: a product's inputs are quantized just before it
constexpr int64_t kFewElements = 512;  // below it a hook costs more than it saves

struct Known {
  WeakStorage storage;
  std::shared_ptr<Recipe> unused;  // until a node saves it; then nodes alone keep it, and the codes with it
  std::weak_ptr<Recipe> used;
};

struct Recent {
  std::vector<Known> ring;
  size_t next = 0;
};
Recent& recent() {
  thread_local Recent r;
  return r;
}

bool has_codes(const at::Tensor& x, const FPFormat& format) {
  return format.bits() <= 8 && !format.has_blocks() && has_plain_memory(x) && x.numel() >= kFewElements;
}

// Returns all of x's memory in its order, with x's version counter.
at::Tensor memory_of(const at::Tensor& x) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto elements = static_cast<int64_t>(x.storage().nbytes() / x.element_size());
  at::Tensor memory = x.as_strided({elements}, {1}, 0);
  memory.unsafeGetTensorImpl()->set_version_counter(x.unsafeGetTensorImpl()->version_counter());
  return memory;
}

void remember(const at::Tensor& memory, const FPFormat& format, at::Tensor codes) {
  static const auto decode = c10::Dispatcher::singleton().findSchemaOrThrow("plumb::decode", "");
  auto& [ring, next] = recent();
  for (Known& known : ring) {
    if (known.storage.expired()) known.unused.reset();
  }
  auto recipe = std::make_shared<Recipe>(decode, std::vector<c10::IValue>(), std::vector<c10::IValue>{memory}, 0);
  recipe->make_by(
      [codes = std::move(codes), format, dtype = memory.scalar_type()] { return unpack_codes(codes, format, dtype); });
  Known known{memory.storage().getWeakStorageImpl(), std::move(recipe), {}};
  if (ring.size() < kKnown) {
    ring.push_back(std::move(known));
  } else {
    ring[next] = std::move(known);
    next = (next + 1) % kKnown;
  }
}

}  // namespace

bool knows_codes() { return !recent().ring.empty(); }

std::shared_ptr<Recipe> recipe_of_codes(const c10::StorageImpl* storage) {
  for (Known& known : recent().ring) {
    if (known.storage._unsafe_get_target() != storage || known.storage.expired()) continue;
    return known.unused ? known.unused : known.used.lock();
  }
  return nullptr;
}

void let_go_of_codes(const std::shared_ptr<Recipe>& recipe) {
  for (Known& known : recent().ring) {
    if (known.unused == recipe) known.used = std::exchange(known.unused, nullptr);
  }
}

void remember_quantised(const at::Tensor& x, const FPFormat& format) {
  if (!has_codes(x, format)) return;
  const at::Tensor memory = memory_of(x);
  if (at::Tensor codes = pack_codes(memory, format); codes.defined()) remember(memory, format, std::move(codes));
}

at::Tensor quantise_and_remember(const at::Tensor& x, const FPFormat& format, std::optional<uint64_t> seed) {
  if (!has_codes(x, format)) return {};
  auto [result, codes] = quantise_and_pack(x, format, seed);
  if (codes.defined()) remember(memory_of(result), format, std::move(codes));
  return result;
}

}  // namespace plumb
