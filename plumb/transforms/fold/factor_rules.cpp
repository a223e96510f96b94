#include "plumb/transforms/fold/factor_rules.h"

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plumb/graph/schema_fit.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/rules.h"
#include "plumb/transforms/optimise/pointwise_steps.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/equivalents.h"

namespace plumb {
namespace {

constexpr double kLargestEpsilon = 1e-3;
constexpr double kLargestWindowed = 1 << 28;  // elements, so that sizes that a file claims take no memory

// Visits names that are separated by spaces.
template <class Visit>
void for_each_name(std::string_view names, const Visit& visit) {
  while (!names.empty()) {
    const size_t end = std::min(names.find(' '), names.size());
    visit(names.substr(0, end));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
}

struct Family {
  FactorRule rule;
  std::string_view names;  // apart by spaces; with an overload where only that one is meant
  double power = 1;
};

const std::unordered_map<std::string_view, const Family*>& families() {
  using enum FactorRule;
  static constexpr Family kFamilies[] = {
      {Ignores,
       "argmax argmin argsort sign sgn signbit isnan isinf isfinite isneginf isposinf zeros_like ones_like full_like "
       "empty_like rand_like randn_like new_zeros new_ones new_full new_empty sym_size sym_numel sym_stride size "
       "numel argwhere nonzero count_nonzero logical_not logical_and logical_or logical_xor _assert_tensor_metadata"},
      {First,
       "neg negative positive abs absolute relu leaky_relu prelu dropout feature_dropout native_dropout avg_pool1d "
       "avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
       "max_pool3d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d "
       "_adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d sum mean nansum nanmean "
       "amax amin aminmax max max.dim min min.dim median cumsum cummax cummin roll flip fliplr flipud repeat "
       "repeat_interleave tile gather index index_select take take_along_dim masked_select tril triu diag diag_embed "
       "diagonal diagonal_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
       "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d grid_sampler grid_sampler_2d grid_sampler_3d "
       "unfold unfold_copy im2col col2im std norm linalg_vector_norm linalg_norm linalg_matrix_norm frobenius_norm "
       "sort topk kthvalue msort pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
       "replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle "
       "sum_to_size trace rot90 broadcast_to view_as_complex view_as_real real imag conj "
       "conj_physical resolve_conj resolve_neg fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 "
       "fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift embedding "
       "as_strided view_copy t_copy slice_copy select_copy lift_fresh_copy zero_"},
      {Common,
       "add sub subtract rsub cat concat concatenate stack hstack vstack dstack column_stack where maximum minimum "
       "fmax fmin max.other min.other copy copy_ index_put index_put_ index_add index_copy index_fill scatter "
       "scatter_add select_scatter slice_scatter diagonal_scatter masked_scatter lerp.Scalar hypot eq ne lt le gt ge "
       "greater less greater_equal less_equal not_equal clamp clamp_min clamp_max meshgrid block_diag "
       "broadcast_tensors atleast_1d atleast_2d atleast_3d complex diff masked_fill"},
      {Product,
       "mul multiply matmul linalg_matmul mm bmm mv dot vdot inner outer einsum kron tensordot linalg_vecdot linear "
       "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution "
       "_convolution_mode bilinear addmm baddbmm addbmm addmv addr addcmul"},
      {Quotient, "div true_divide divide"},
      {Power, "square var", 2},
      {Power, "sqrt", 0.5},
      {Power, "rsqrt", -0.5},
      {Power, "reciprocal", -1},
      {Power, "pow.Tensor_Scalar"},
      {Norm, "layer_norm native_layer_norm rms_norm group_norm native_group_norm batch_norm instance_norm"},
      {Attention, "scaled_dot_product_attention"},
  };
  static const auto known = [] {
    std::unordered_map<std::string_view, const Family*> map;
    for (const Family& family : kFamilies)
      for_each_name(family.names, [&](std::string_view name) { map.emplace(name, &family); });
    return map;
  }();
  return known;
}

// "add" of aten::add.Tensor and of aten::add_.Tensor; with the overload first.
const Family* family_of(std::string_view target) {
  target.remove_prefix(std::min(target.size(), target.find("::") + 2));
  if (auto it = families().find(target); it != families().end()) return it->second;
  target = target.substr(0, target.find('.'));
  if (auto it = families().find(target); it != families().end()) return it->second;
  if (!target.ends_with('_')) return nullptr;
  auto it = families().find(target.substr(0, target.size() - 1));
  return it == families().end() ? nullptr : it->second;
}

FactorRelation of_torch(const Node* node) {
  if (node->is_op("plumb::check_sizes") || node->is_op("plumb::check_input") || node->is_op("plumb::guard_size"))
    return {FactorRule::Ignores};
  if (node->facts().passes_through) return {FactorRule::Shape};
  if (!node->facts().groups.empty()) return {FactorRule::Product};
  if (!node->op_name().starts_with("aten::")) return {};
  const Family* family = family_of(node->target());
  if (!family) return {};
  FactorRelation relation{family->rule, family->power};
  // The other results are statistics, or follow from the mode.
  for (size_t i = 1; relation.rule == FactorRule::Norm && i < node->num_results(); ++i) {
    if (node->result(i)->has_uses()) relation.rule = FactorRule::Fixed;
  }
  if (const Arg* exponent = node->try_arg("exponent")) {
    const auto n = number_of(*exponent);
    if (!n) return {};
    relation.power = *n;
  }
  if (const Arg* rounding = node->try_arg("rounding_mode"); rounding && !rounding->is_none()) return {};
  if (const Arg* mode = node->try_arg("reduce"); mode && mode->is_constant() && mode->constant().isString()) {
    const std::string& name = mode->constant().toStringRef();
    if (name == "prod" || name == "multiply") return {};
  }
  // The norm of order 0 counts what is not zero.
  for (const char* order : {"p", "ord"}) {
    const Arg* given = relation.rule == FactorRule::First ? node->try_arg(order) : nullptr;
    if (given && number_of(*given) == 0.0 && node->op_name().find("norm") != std::string_view::npos)
      return {FactorRule::Ignores};
  }
  return relation;
}

// --- factors of unit-scaled operators ---

// Null where a dimension that counts is a symbol, or nothing is known.
class Sizes {
 public:
  Sizes(const Arg& arg, const State& state) {
    if (!arg.is_value()) return;
    const Value* value = arg.value();
    if (const auto& meta = value->meta()) {
      sizes_ = meta->sizes;
      symbols_ = meta->symbols;
      known_ = true;
    } else if (value->producer()->kind() == NodeKind::GetAttr) {
      const Attr* attr = state.find(value->producer()->target());
      if (!attr || !attr->tensor.defined()) return;
      sizes_ = attr->tensor.sizes().vec();
      known_ = true;
    }
  }
  bool known() const { return known_; }
  size_t dims() const { return sizes_.size(); }
  // -1 if it is not known, or a symbol. `dim` counts from the end if negative. A number has one dimension, of size 1,
  // as torch sees it.
  int64_t at(int64_t dim) const {
    const auto n = static_cast<int64_t>(sizes_.size());
    if (known_ && n == 0 && (dim == 0 || dim == -1)) return 1;
    if (dim < 0) dim += n;
    if (!known_ || dim < 0 || dim >= n) return -1;
    const auto i = static_cast<size_t>(dim);
    return i < symbols_.size() && !symbols_[i].empty() ? -1 : sizes_[i];
  }
  bool is_static() const {
    for (const auto& symbol : symbols_) {
      if (!symbol.empty()) return false;
    }
    return known_;
  }
  int64_t numel() const { return element_count(sizes_); }
  const std::vector<int64_t>& all() const { return sizes_; }

 private:
  std::vector<int64_t> sizes_;
  std::vector<std::string> symbols_;
  bool known_ = false;
};

double mult_of(const Node* node) {
  const Arg* mult = node->try_arg("mult");
  return mult ? number_of(*mult).value_or(std::numeric_limits<double>::quiet_NaN()) : 1;
}

// Sets `outer` to the first of the scales that the node chooses, `added` to that of a bias.
bool choose(FactorRelation& relation, const Node* node, size_t constrained, rules::Scales rule) {
  const Arg& given = node->arg("scales");
  std::optional<std::vector<double>> scales;
  if (given.is_constant() && given.constant().isDoubleList()) {
    scales = given.constant().toDoubleVector();
  } else {
    scales = chosen_scales(node, constrained, std::move(rule));
  }
  if (!scales || scales->empty()) return false;
  relation.outer = relation.added = scales->front();
  if (scales->size() == 5) relation.added = (*scales)[3];
  return std::isfinite(relation.outer) && relation.outer > 0 && std::isfinite(relation.added) && relation.added > 0;
}

std::string sizes_text(const char* what, int64_t size) { return std::string(what) + " of " + std::to_string(size); }

bool linear(FactorRelation& relation, const Node* node, const State& state) {
  const Sizes weight(node->arg("weight"), state), input(node->arg("input"), state);
  const Arg& power = node->arg("scale_power");
  if (weight.dims() != 2 || !weight.is_static() || !power.is_constant() || !power.constant().isDoubleList())
    return false;
  // How many rows there are counts for the weight's gradient alone.
  const int64_t rows = input.known() && input.at(-1) > 0 ? input.numel() / input.at(-1) : 1;
  return choose(relation, node, 2, rules::linear(weight.at(1), weight.at(0), rows, power.constant().toDoubleVector()));
}

bool matmul(FactorRelation& relation, const Node* node, const State& state) {
  const Sizes left(node->arg("left"), state), right(node->arg("right"), state);
  const int64_t inner = left.at(-1) >= 0 ? left.at(-1) : right.at(right.dims() == 1 ? -1 : -2);
  if (inner < 0) return false;
  const int64_t rows = left.dims() > 1 ? left.at(-2) : 1, columns = right.dims() > 1 ? right.at(-1) : 1;
  const Arg& constraint = node->arg("constraint");
  const bool by_output = constraint.is_none() || (constraint.is_constant() && constraint.constant().isString() &&
                                                  constraint.constant().toStringRef() == "to_output_scale");
  if (!by_output && (!left.is_static() || !right.is_static())) return false;
  const int64_t left_matrix = std::max<int64_t>(element_count({rows, inner}), 1);
  const int64_t right_matrix = std::max<int64_t>(element_count({inner, columns}), 1);
  int64_t batch = 1;
  if (left.known()) batch = std::max(batch, left.numel() / left_matrix);
  if (right.known()) batch = std::max(batch, right.numel() / right_matrix);
  auto repeats = [&](const Sizes& operand, int64_t matrix) {
    return batch / std::max<int64_t>(operand.numel() / matrix, 1);
  };
  if (!source_attribute(node->arg("left").value()) && !source_attribute(node->arg("right").value()))
    relation.holds_for = sizes_text("an inner size", inner);
  return choose(relation, node, 3,
                rules::matmul(std::max<int64_t>(rows, 1), inner, std::max<int64_t>(columns, 1),
                              repeats(left, left_matrix), repeats(right, right_matrix)));
}

bool add(FactorRelation& relation, const Node* node, const State& state) {
  const Sizes input(node->arg("input"), state), other(node->arg("other"), state);
  if (!input.known() || !other.known()) {
    // Without sizes both are taken for tensors.
    return choose(relation, node, 3, rules::add(1, 1, false));
  }
  const int64_t most = std::max(input.numel(), other.numel());
  return choose(relation, node, 3,
                rules::add(most / std::max<int64_t>(input.numel(), 1), most / std::max<int64_t>(other.numel(), 1),
                           input.numel() == 1 || other.numel() == 1));
}

bool attention(FactorRelation& relation, const Node* node, const State& state) {
  const Sizes query(node->arg("query"), state), value(node->arg("value"), state);
  const Arg& causal = node->arg("is_causal");
  const int64_t length = value.at(-2), head = value.at(-1);
  const double mult = mult_of(node);
  if (length < 0 || head < 0 || query.at(-1) < 1 || !causal.is_constant() || !causal.constant().isBool() || !(mult > 0))
    return false;
  if (!node->arg("scale").is_none() && !number_of(node->arg("scale"))) return false;
  // Torch's logits have 1 / sqrt(size) by default, unit-scaled ones mult / size; see build_plain() for mult.
  if (node->arg("scale").is_none()) relation.inner = std::sqrt(static_cast<double>(query.at(-1)));
  relation.holds_for = sizes_text("a length", length);
  return choose(relation, node, 0, {rules::attention(length, head, mult, 0, causal.constant().toBool())});
}

bool softmax(FactorRelation& relation, const Node* node, const State& state, double mult) {
  const auto dim = number_of(node->arg("dim"));
  const int64_t size = dim ? Sizes(node->arg("input"), state).at(static_cast<int64_t>(*dim)) : -1;
  if (size < 0) return false;
  relation.holds_for = sizes_text("a size", size);
  return choose(relation, node, 2, rules::softmax(size, mult));
}

// Pools and convolutions: the factor is what is between their result and torch's for ones, of one example.
bool window(FactorRelation& relation, const Node* node, const State& state) {
  const std::string name(node->op_name().substr(7));
  const int64_t places = name[name.size() - 2] - '0';
  const Sizes input(node->arg("input"), state);
  if (!input.is_static()) return false;
  std::vector<int64_t> sizes = input.all();
  if (static_cast<int64_t>(sizes.size()) == places + 2) sizes[0] = 1;
  double numel = 1;
  for (int64_t size : sizes) numel *= static_cast<double>(size);
  if (numel > kLargestWindowed) return false;
  const std::string overload = node->target().ends_with(".padding")               ? "padding"
                               : name.starts_with("conv_transpose") && places > 1 ? "input"
                                                                                  : "";
  const auto plain = c10::Dispatcher::singleton().findSchema({"aten::" + name, overload});
  if (!plain) return false;
  auto result = [&](const c10::OperatorHandle& op) -> at::Tensor {
    torch::jit::Stack stack;
    for (size_t i = 0; i < op.schema().arguments().size(); ++i) {
      const std::string& argument = op.schema().arguments()[i].name();
      const Arg* arg = node->try_arg(argument);
      if (argument == "input" || argument == "self") {
        stack.emplace_back(at::ones(sizes, at::kDouble));
      } else if (argument == "weight") {
        const Sizes weight(*arg, state);
        if (!weight.is_static() || static_cast<double>(weight.numel()) > kLargestWindowed) return {};
        stack.emplace_back(at::ones(weight.all(), at::kDouble));
      } else if (argument == "bias") {
        stack.emplace_back();
      } else {
        const Arg given = arg ? *arg : default_argument(op.schema(), i);
        if (!given.is_constant()) return {};
        stack.push_back(given.constant());
      }
    }
    op.callBoxed(stack);
    return stack.at(0).toTensor();
  };
  try {
    at::NoGradGuard no_grad;
    const at::Tensor scaled = result(node->op()), unscaled = result(*plain);
    if (!scaled.defined() || !unscaled.defined()) return false;
    relation.outer = relation.added = scaled.sum().item<double>() / unscaled.sum().item<double>();
  } catch (const std::exception&) {
    return false;
  }
  return std::isfinite(relation.outer) && relation.outer > 0;
}

bool activation(FactorRelation& relation, const Node* node, const State& state, ScaledBy by) {
  const double mult = relation.inner = mult_of(node);
  if (!(mult > 0)) return false;
  relation.rule = by == ScaledBy::Gate ? FactorRule::Gated : FactorRule::Fixed;
  if (by == ScaledBy::Softmax) return softmax(relation, node, state, mult);
  const ElementwiseFunction* function = try_find_elementwise(node->op_name());
  const bool known =
      function ? choose(relation, node, 2, function->rule(mult)) : choose(relation, node, 0, {rules::silu_glu(mult)});
  if (!function || function->divided) relation.outer /= mult;
  return known;
}

bool number_argument(const Node* node, std::string_view argument, double& to) {
  const auto n = number_of(node->arg(argument));
  if (n) to = *n;
  return n && std::isfinite(to) && to > 0;
}

bool factor_alone(FactorRelation& relation, const Node* node) {
  relation.rule = FactorRule::First;
  if (node->is_op("plumb::scale_fwd")) return number_argument(node, "scale", relation.outer);
  if (node->is_op("plumb::rescale")) return number_argument(node, "forward", relation.outer);
  return true;
}

bool sum(FactorRelation& relation, const Node* node, const State& state) {
  if (node->is_op("plumb::add")) return add(relation, node, state);
  double tau = 0;
  if (!number_argument(node, "tau", tau)) return false;
  const auto weights = rules::residual(tau);
  relation.weights = {weights.residual, weights.skip};
  return true;
}

bool is_number_between(const Arg* arg, double least, double most) {
  if (!arg) return false;
  const auto n = number_of(*arg);
  return n && *n > least && *n <= most;
}

}  // namespace

std::vector<std::string_view> factor_rule_names() {
  std::vector<std::string_view> names;
  for (const auto& [name, family] : families()) names.push_back(name);
  return names;
}

bool is_unit_scaled(const Node* node) { return find_unit_scaled(node); }

bool is_factor_alone(const Node* node) {
  const Equivalent* scaled = find_unit_scaled(node);
  return scaled && scaled->scaled_by == ScaledBy::Factor;
}

std::optional<FactorRelation> factor_relation(const Node* node, const State& state) {
  if (!node->is_call()) return FactorRelation{};
  const Equivalent* scaled = find_unit_scaled(node);
  if (!scaled) return of_torch(node);
  FactorRelation relation;
  if (const Family* family = family_of(node->target())) relation.rule = family->rule;
  bool known = true;
  switch (const ScaledBy by = scaled->scaled_by) {
    case ScaledBy::None: break;
    case ScaledBy::Factor: known = factor_alone(relation, node); break;
    case ScaledBy::Elementwise:
    case ScaledBy::Gate:
    case ScaledBy::Softmax: known = activation(relation, node, state, by); break;
    case ScaledBy::Window: known = window(relation, node, state); break;
    case ScaledBy::Linear: relation.rule = FactorRule::Product, known = linear(relation, node, state); break;
    case ScaledBy::Matmul: known = matmul(relation, node, state); break;
    case ScaledBy::Add: relation.rule = FactorRule::Common, known = sum(relation, node, state); break;
    case ScaledBy::Attention: known = attention(relation, node, state); break;
    case ScaledBy::Relu: known = choose(relation, node, 2, rules::relu()); break;
    case ScaledBy::Loss: known = number_argument(node, "mult", relation.inner); break;
  }
  return known ? std::optional(relation) : std::nullopt;
}

std::string_view added_argument(const Node* node) {
  std::string_view name = node->op_name();
  name.remove_prefix(std::min(name.size(), name.find("::") + 2));
  if (name.starts_with("addmm") || name.starts_with("baddbmm") || name.starts_with("addbmm") ||
      name.starts_with("addmv") || name.starts_with("addr") || name.starts_with("addcmul"))
    return "self";
  return node->try_arg("bias") ? "bias" : "";
}

std::optional<Epsilon> epsilon_of(const Node* node) {
  if (!node->is_call()) return std::nullopt;
  if (const Arg* eps = node->try_arg("eps")) {
    if (auto n = number_of(*eps)) return Epsilon{"eps", *n, 2};
    // rms_norm's default.
    const auto& meta = node->num_results() ? node->result()->meta() : std::nullopt;
    const bool wide = meta && meta->dtype == at::kDouble;
    if (eps->is_none() && node->op_name().ends_with("::rms_norm"))
      return Epsilon{"eps",
                     wide ? std::numeric_limits<double>::epsilon() : double(std::numeric_limits<float>::epsilon()), 2};
    return std::nullopt;
  }
  const bool adds = node->is_op("aten::add"), clamps = node->is_op("aten::clamp") || node->is_op("aten::clamp_min");
  if (!adds && !clamps) return std::nullopt;
  const std::string_view argument = adds ? "other" : "min";
  if (!is_number_between(node->try_arg(argument), 0, kLargestEpsilon)) return std::nullopt;
  if (const Arg* most = node->try_arg("max"); most && !most->is_none()) return std::nullopt;
  const auto uses = effective_uses(node->result());
  for (const Use& use : uses) {
    const bool root = use.user->is_op("aten::rsqrt") || use.user->is_op("aten::sqrt") ||
                      use.user->is_op("aten::reciprocal") || use.user->is_op("aten::pow");
    const bool divisor = use.user->is_op("aten::div") && use.index == 1;
    if (!root && !divisor) return std::nullopt;
  }
  if (uses.empty()) return std::nullopt;
  return Epsilon{argument, *number_of(node->arg(argument)), 1};
}

Node* build_plain(Graph& graph, const Node* node) {
  const std::string_view name = node->op_name().substr(7);
  if (name == "residual_add") return graph.call("aten::add.Tensor", {node->args()[0], node->args()[1]});
  if (name == "silu_glu") {
    Node* silu = graph.call("aten::silu", {node->arg("gate")});
    silu->meta() = node->meta();
    silu->result()->set_meta(node->arg("gate").value()->meta());
    return graph.call("aten::mul.Tensor", {node->arg("input"), silu->result()});
  }
  std::string to = "aten::" + std::string(name);
  if (name == "linear_readout") to = "aten::linear";
  if (name == "cross_entropy") to = "aten::cross_entropy_loss";
  if (name == "softmax") to = "aten::softmax.int";
  if (name == "add") to = "aten::add.Tensor";
  if (node->target().ends_with(".padding")) to += ".padding";
  if (name == "conv_transpose2d" || name == "conv_transpose3d") to += ".input";
  const auto op = find_operator(to);
  Node* made = graph.call(op, arguments_for(op, node));
  if (name == "scaled_dot_product_attention") {
    const double mult = mult_of(node);
    const auto& query = node->arg("query").value()->meta();
    if (mult != 1 && query && node->arg("scale").is_none())
      made->set_arg("scale", mult / std::sqrt(static_cast<double>(query->sizes.back())));
  }
  return made;
}

}  // namespace plumb
