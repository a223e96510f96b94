#include "plumb/autograd/recompute/recompute_recipe.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <map>
#include <utility>

#include "plumb/autograd/recompute/recompute.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

constexpr const char* kNotThere =
    "this tensor was not kept for the backward, which computes it again when it comes to it; to look at it before, run "
    "the stage with recompute = none";

// True for devices on which a storage points to its memory and can be made to point to other memory.
bool has_memory(const at::Tensor& x) {
  return x.is_cpu() || x.is_cuda() || x.is_xpu() || (x.is_privateuseone() && x.has_storage());
}

template <class Storage>
void take_message_back(Storage& storage) {
  if constexpr (kCanFill<Storage>) storage.clear_data_ptr_access_error_msg_();
}

at::Tensor over(c10::Storage storage, const Part& part) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor t = at::empty({0}, part.options);
  return t.set_(std::move(storage), part.offset, part.sizes, part.strides);
}

[[noreturn]] void raise_written(const c10::OperatorHandle& op, size_t arg, const Part& part) {
  throw Error(ErrorKind::InvalidState,
              "argument '" + op.schema().arguments()[arg].name() + "' of " + op.operator_name().name +
                  ", whose result the backward computes again, has been written in place: it is at version " +
                  std::to_string(part.versions.current_version()) + ", expected version " +
                  std::to_string(part.version),
              "", "write to a copy, or train with recompute = none");
}

}  // namespace

bool has_plain_memory(const at::Tensor& x) {
  return kCanFill<c10::StorageImpl> && x.defined() && has_memory(x) && x.layout() == at::kStrided &&
         !x.is_inference() && !at::isTensorSubclassLike(x) && !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         !x.is_conj() && !x.is_neg() && !x.is_quantized() && !c10::impl::dispatch_mode_enabled();
}

Part::Part(const at::Tensor& t)
    : storage(t.storage().getWeakStorageImpl()),
      sizes(t.sizes()),
      strides(t.strides()),
      offset(t.storage_offset()),
      options(t.options().requires_grad(false)),
      versions(t.unsafeGetTensorImpl()->version_counter()),
      version(static_cast<uint32_t>(t._version())) {}

at::Tensor Part::lock() const {
  auto alive = storage.lock();
  if (!alive) return {};
  return over(c10::Storage(std::move(alive)), *this);
}

Recipe::Recipe(const c10::OperatorHandle& op, std::vector<c10::IValue> args, at::ArrayRef<c10::IValue> results,
               int64_t order)
    : op(op),
      order(order),
      result(results[0].toTensor()),
      nbytes(results[0].toTensor().nbytes()),
      args_(std::move(args)) {
  if (results.size() == 3 && op.operator_name().name == "aten::native_layer_norm") {
    const at::Tensor &mean = results[1].toTensor(), &rstd = results[2].toTensor();
    moments_.emplace(Moments{mean.tensor_data(), rstd.tensor_data(), Part(mean), Part(rstd)});
  }
  auto take = [&](c10::IValue& value, size_t arg, int64_t element) {
    if (!value.isTensor() || !value.toTensor().defined()) return;
    const at::Tensor& t = value.toTensor();
    sources.push_back({arg, element, Part(t), {}, false, nullptr});
    // A number is itself; a parameter is there anyway.
    const bool number = t.unsafeGetTensorImpl()->is_wrapped_number();
    if (number || (t.requires_grad() && t.is_leaf())) sources.back().held = number ? t : t.tensor_data();
    value = c10::IValue();
  };
  for (size_t i = 0; i < args_.size(); ++i) {
    if (args_[i].isTensor()) {
      take(args_[i], i, -1);
    } else if (args_[i].isTensorList()) {
      std::vector<c10::IValue> elements = args_[i].toListRef().vec();
      for (size_t k = 0; k < elements.size(); ++k) take(elements[k], i, static_cast<int64_t>(k));
      args_[i] = c10::IValue();
    }
  }
}

at::Tensor Recipe::compute() {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  if (make_) return make_();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  torch::jit::Stack stack = args_;
  std::map<size_t, std::vector<at::Tensor>> lists;
  for (Source& source : sources) {
    at::Tensor value;
    if (source.made_by) {
      value = source.made_by->memory().as_strided(source.part.sizes, source.part.strides, source.part.offset);
      source.made_by->done();
    } else {
      if (!source.copied && !source.part.unchanged()) raise_written(op, source.arg, source.part);
      value = source.held;
    }
    if (source.element < 0) {
      stack[source.arg] = std::move(value);
    } else {
      lists[source.arg].push_back(std::move(value));
    }
  }
  for (auto& [arg, list] : lists) stack[arg] = c10::List<at::Tensor>(list);
  at::Tensor again = compute_quickly(stack);
  if (!again.defined()) {
    op.callBoxed(stack);
    again = stack.front().toTensor();
  }
  if (again.sizes() != at::IntArrayRef(result.sizes) || again.strides() != at::IntArrayRef(result.strides) ||
      again.storage_offset() != result.offset || again.dtype() != result.options.dtype()) {
    throw Error(ErrorKind::Internal, op.operator_name().name + " gave a result of another shape in the backward");
  }
  return again;
}

at::Tensor Recipe::compute_quickly(const std::vector<c10::IValue>& args) const {
  if (!moments_ || !moments_->of_mean.unchanged() || !moments_->of_rstd.unchanged()) return {};
  return normalize_again(args, moments_->mean, moments_->rstd);
}

namespace {

// Returns a pointer to the storage's data that keeps the storage alive.
at::DataPtr pointer_into(const c10::Storage& storage) {
  return {const_cast<void*>(storage.data()), new c10::Storage(storage),
          [](void* owner) { delete static_cast<c10::Storage*>(owner); }, storage.device()};
}

}  // namespace

c10::Storage Recipe::lend(const c10::Storage& own) {
  if (lent_) {
    if (auto alive = lent_->lock()) {
      if (!filled_) fill(own);
      return c10::Storage(std::move(alive));
    }
  }
  c10::Storage lent(c10::Storage::use_byte_size_t(), own.nbytes(), pointer_into(own), nullptr, /*resizable=*/false);
  this->lent(lent);
  return lent;
}

c10::Storage part_from_node(const at::Tensor& result) {
  c10::Storage kept = result.storage();
  c10::StorageImpl& impl = *kept.unsafeGetStorageImpl();
  at::DataPtr data = impl.set_data_ptr(at::DataPtr(nullptr, impl.device()));
  const c10::Storage own(c10::Storage::use_byte_size_t(), impl.nbytes(), std::move(data), impl.allocator(),
                         impl.resizable());
  impl.set_data_ptr_noswap(pointer_into(own));
  result.unsafeGetTensorImpl()->set_storage_keep_dtype(own);
  return kept;
}

void Recipe::fill(const c10::Storage& storage) {
  if (auto alive = lent_->lock()) {
    take_message_back(*alive);
    alive->set_data_ptr_noswap(pointer_into(storage));
    filled_ = true;
  }
}

void Recipe::empty() {
  filled_ = false;
  if (auto alive = lent_->lock()) {
    alive->set_data_ptr_noswap(at::DataPtr(nullptr, alive->device()));
    alive->release_data_and_set_meta_custom_data_ptr_error_msg_(kNotThere);
  }
}

at::Tensor Recipe::memory() {
  if (waiting_) return *waiting_;
  if (result.unchanged()) {
    if (at::Tensor alive = result.lock(); alive.defined()) return alive;
  }
  at::Tensor again = compute();
  if (pending > 1) waiting_ = again;
  return again;
}

void Recipe::done() {
  if (--pending <= 0) waiting_.reset();
}

void Recipe::forget() {
  waiting_.reset();
  for (const Source& source : sources) {
    if (source.made_by) source.made_by->forget();
  }
}

}  // namespace plumb
