#include "plumb/numerics/hash.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <atomic>

#include "plumb/numerics/aten_kernels.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/define_operator.h"
#include "plumb/numerics/element.h"
#include "plumb/numerics/kernels.h"

namespace plumb {
namespace {

constexpr int64_t kPiece = int64_t(1) << 18;  // words

uint64_t hash_on_cpu(const at::Tensor& x) {
  const bool as_it_lies = x.is_contiguous() && !x.is_neg() && !x.is_conj();
  const at::Tensor dense = as_it_lies ? x : x.detach().resolve_conj().resolve_neg().contiguous();
  const size_t size = std::min<size_t>(dense.element_size(), 4);
  const auto run = kernel::kernels().hash[size / 2];
  const char* data = static_cast<const char*>(dense.const_data_ptr());
  const int64_t words = hashed_words(x);
  if (words <= kPiece) return words > 0 ? run(data, words) : 0;
  std::atomic<uint64_t> sum = 0;
  at::parallel_for(0, (words + kPiece - 1) / kPiece, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i * kPiece;
      const uint64_t part = run(data + static_cast<size_t>(begin) * size, std::min(kPiece, words - begin));
      sum += hash_after(part, begin);
    }
  });
  return sum;
}

at::Tensor tensor_hash_kernel(const at::Tensor& x) {
  check_tensor(x, "hash");
  const at::NoGradGuard no_grad;
  if (!x.is_cpu()) return aten_kernels::hash(x);
  return at::full({}, static_cast<int64_t>(hash_on_cpu(x)), at::kLong);
}

at::Tensor tensor_hash_meta(const at::Tensor& x) { return at::empty({}, x.options().dtype(at::kLong)); }

}  // namespace

int64_t hashed_words(const at::Tensor& x) {
  return x.numel() * std::max<int64_t>(static_cast<int64_t>(x.element_size()) / 4, 1);
}

uint64_t hash_after(uint64_t hash, int64_t words) { return hash * kernel::hash_power(static_cast<uint64_t>(words)); }

uint64_t hash_of(const at::Tensor& x) {
  check_tensor(x, "hash");
  const at::NoGradGuard no_grad;
  return x.is_cpu() ? hash_on_cpu(x) : static_cast<uint64_t>(aten_kernels::hash(x).item<int64_t>());
}

at::Tensor ops::tensor_hash(const at::Tensor& x) { return call_operator<"tensor_hash">(x); }

TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m, "tensor_hash(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag}, tensor_hash_kernel, tensor_hash_meta,
         without_history());
}

}  // namespace plumb
