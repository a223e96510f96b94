// scaled_dot_product_attention: torch's own kernels, with the scale of a unit-scaled result.
#include <torch/library.h>

#include "plumb/core/error.h"
#include "plumb/numerics/call_operator.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/differentiable.h"
#include "plumb/scaling/kernels.h"
#include "plumb/scaling/rules.h"

namespace plumb {
namespace {

using at::Tensor;

// Returns the factor over a result of attention to `value`, forward and backward.
double attention_rule(const Tensor& value, double dropout_p, bool is_causal, double mult,
                      const OptionalScales& scales) {
  return choose_scales("scaled_dot_product_attention", scales, std::nullopt, 0,
                       {rules::attention(value.size(-2), value.size(-1), mult, dropout_p, is_causal)})[0];
}

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p) {
  const char* op = "scaled_dot_product_attention";
  if (query.dim() < 2 || key.dim() < 2 || value.dim() < 2 || query.sym_size(-1) != key.sym_size(-1) ||
      key.sym_size(-2) != value.sym_size(-2)) {
    bad_shape(op, "query " + shape_text(query) + ", key " + shape_text(key) + " and value " + shape_text(value) +
                      " do not fit; they are (..., length, head size).");
  }
  if (!(dropout_p >= 0 && dropout_p < 1)) {
    throw Error(ErrorKind::InvalidArgument, std::string(op) + ": dropout_p must be at least 0 and less than 1, not " +
                                                std::to_string(dropout_p) + ".");
  }
}

// attention_scale is an operator of its own so that lengths may stay symbolic in an exported program.
Tensor attention_scale(const Tensor& output, const Tensor& value, double dropout_p, bool is_causal, double mult,
                       OptionalScales scales) {
  return at::mul(output, attention_rule(value, dropout_p, is_causal, mult, scales));
}

std::tuple<Tensor> attention_scale_backward(const Tensor& grad, at::IntArrayRef value_size, double dropout_p,
                                            bool is_causal, double mult, OptionalScales scales,
                                            std::array<bool, 1> mask) {
  if (!mask[0]) return {Tensor()};
  if (value_size.size() < 2) bad_shape("scaled_dot_product_attention", "value is (..., length, head size).");
  const double s = choose_scales(
      "scaled_dot_product_attention", scales, std::nullopt, 0,
      {rules::attention(value_size[value_size.size() - 2], value_size.back(), mult, dropout_p, is_causal)})[0];
  return {at::mul(grad, s)};
}

Tensor attention_scale_meta(const Tensor& output, const Tensor&, double, bool, double, OptionalScales) {
  return at::mul(output, 1.0);
}

bool attention_scale_is_identity(at::ArrayRef<c10::IValue> arguments) {
  const c10::IValue& scales = arguments[5];
  return scales.isDoubleList() && scales.toDoubleList().size() == 1 && scales.toDoubleList().get(0) == 1;
}

// Returns the logits' own scale: mult / head size (M, appendix B), unless the caller gives one.
double logit_scale(const Tensor& query, double mult, std::optional<double> scale) {
  return scale ? *scale : mult / static_cast<double>(query.sym_size(-1).guard_int(__FILE__, __LINE__));
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
                 double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, double mult,
                 OptionalScales scales) {
  check_attention(query, key, value, dropout_p);
  auto out = at::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal,
                                              logit_scale(query, mult, scale), enable_gqa);
  return call_operator<"attention_scale">(out, value, dropout_p, is_causal, mult, scales);
}

Tensor attention_meta(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor&, double, bool,
                      std::optional<double>, bool, double, OptionalScales) {
  if (query.dim() < 2 || value.dim() < 2) check_attention(query, key, value, 0);
  auto sizes = query.sym_sizes().vec();
  sizes.back() = value.sym_size(-1);
  return query.new_empty_symint(sizes);
}

}  // namespace

const RegisterOperators ops_attention_rows{
    {"plumb::", "scaled_dot_product_attention", {.draws_with = "dropout_p", .contraction = Contraction::attention()}},
    {"plumb::", "attention_scale"},
    {"plumb::", "attention_scale_backward", {.refused = kTrustsSaved}},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  define(m,
         "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
         "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False, float mult=1.0, "
         "float[]? scales=None) -> Tensor",
         {at::Tag::nondeterministic_seeded}, attention, attention_meta, attention);
  define(
      m,
      "attention_scale(Tensor output, Tensor value, float dropout_p, bool is_causal, float mult, float[]? scales) -> "
      "Tensor",
      attention_scale, attention_scale_meta, differentiable(attention_scale_is_identity));
  define_backward(
      m,
      "attention_scale_backward(Tensor grad, SymInt[] value_size, float dropout_p, bool is_causal, float mult, "
      "float[]? scales, bool[1] mask) -> (Tensor grad_output)",
      attention_scale_backward);
}

}  // namespace plumb
