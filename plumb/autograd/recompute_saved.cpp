// What autograd's nodes saved, and what is put in its place.
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <typeindex>
#include <unordered_map>

#include "plumb/autograd/recompute_recipe.h"
#include "plumb/autograd/saved_codes.h"

namespace plumb {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
namespace generated = torch::autograd::generated;

using Collect = void (*)(Node&, std::vector<Saved>&);

template <class N, auto... members>
void collect(Node& node, std::vector<Saved>& saved) {
  auto& own = static_cast<N&>(node);
  (saved.push_back({&(own.*members), &node, -1}), ...);
}

// A product of two factors: each is needed for the other's gradient alone.
template <class N, auto left, auto right, int left_edge>
void collect_factors(Node& node, std::vector<Saved>& saved) {
  auto& own = static_cast<N&>(node);
  saved.push_back({&(own.*left), &node, left_edge + 1});
  saved.push_back({&(own.*right), &node, left_edge});
}

void collect_own(Node& node, std::vector<Saved>& saved) {
  if (auto* own = dynamic_cast<SavesTensors*>(&node)) {
    own->visit_saved([&](SavedVariable& variable) { saved.push_back({&variable, &node, -1}); });
  }
}

void collect_nothing(Node&, std::vector<Saved>&) {}

template <class N, auto... members>
std::pair<std::type_index, Collect> entry() {
  return {typeid(N), collect<N, members...>};
}
template <class N, auto left, auto right, int left_edge>
std::pair<std::type_index, Collect> factors() {
  return {typeid(N), collect_factors<N, left, right, left_edge>};
}

using Table = std::unordered_map<std::type_index, Collect>;

Table known_nodes() {
  using namespace generated;
  return {
      factors<AddmmBackward0, &AddmmBackward0::mat1_, &AddmmBackward0::mat2_, 1>(),
      factors<MmBackward0, &MmBackward0::self_, &MmBackward0::mat2_, 0>(),
      factors<BmmBackward0, &BmmBackward0::self_, &BmmBackward0::mat2_, 0>(),
      factors<BaddbmmBackward0, &BaddbmmBackward0::batch1_, &BaddbmmBackward0::batch2_, 1>(),
      factors<MulBackward0, &MulBackward0::self_, &MulBackward0::other_, 0>(),
      entry<DivBackward0, &DivBackward0::self_, &DivBackward0::other_>(),
      entry<ConvolutionBackward0, &ConvolutionBackward0::input_, &ConvolutionBackward0::weight_>(),
      entry<ScaledDotProductFlashAttentionForCpuBackward0, &ScaledDotProductFlashAttentionForCpuBackward0::query_,
            &ScaledDotProductFlashAttentionForCpuBackward0::key_,
            &ScaledDotProductFlashAttentionForCpuBackward0::value_,
            &ScaledDotProductFlashAttentionForCpuBackward0::output_,
            &ScaledDotProductFlashAttentionForCpuBackward0::attn_mask_>(),
      entry<NativeLayerNormBackward0, &NativeLayerNormBackward0::input_>(),
      entry<FusedRmsNormBackward0, &FusedRmsNormBackward0::input_>(),
      entry<NativeGroupNormBackward0, &NativeGroupNormBackward0::input_>(),
      entry<NativeBatchNormBackward0, &NativeBatchNormBackward0::input_>(),
      entry<GeluBackward0, &GeluBackward0::self_>(),
      entry<SiluBackward0, &SiluBackward0::self_>(),
      entry<PowBackward0, &PowBackward0::self_>(),
      entry<LeakyReluBackward0, &LeakyReluBackward0::self_>(),
      entry<EluBackward0, &EluBackward0::self_>(),
      entry<HardtanhBackward0, &HardtanhBackward0::self_>(),
      entry<HardswishBackward0, &HardswishBackward0::self_>(),
      entry<HardsigmoidBackward0, &HardsigmoidBackward0::self_>(),
      entry<SoftplusBackward0, &SoftplusBackward0::self_>(),
      entry<MishBackward0, &MishBackward0::self_>(),
      entry<LogSigmoidBackward0, &LogSigmoidBackward0::self_>(),
      entry<GluBackward0, &GluBackward0::self_>(),
      entry<ThresholdBackward0, &ThresholdBackward0::self_>(),
      entry<AddcmulBackward0, &AddcmulBackward0::tensor1_, &AddcmulBackward0::tensor2_>(),
      entry<ReluBackward0, &ReluBackward0::result_>(),
      entry<SigmoidBackward0, &SigmoidBackward0::result_>(),
      entry<TanhBackward0, &TanhBackward0::result_>(),
      entry<ExpBackward0, &ExpBackward0::result_>(),
      entry<RsqrtBackward0, &RsqrtBackward0::result_>(),
      entry<SoftmaxBackward0, &SoftmaxBackward0::result_>(),
      entry<LogSoftmaxBackward0, &LogSoftmaxBackward0::result_>(),
      entry<NllLossBackward0, &NllLossBackward0::self_>(),
      entry<MaxPool2DWithIndicesBackward0, &MaxPool2DWithIndicesBackward0::self_>(),
      entry<AvgPool2DBackward0, &AvgPool2DBackward0::self_>(),
  };
}

// What is kept in a tensor's place.
class RecipeHooks : public torch::autograd::SavedVariableHooks {
 public:
  RecipeHooks(std::shared_ptr<Recipe> recipe, const Saved& saved, const at::Tensor& view)
      : recipe_(std::move(recipe)),
        node_(saved.node),
        needed_by_(saved.needed_by),
        sizes_(view.sizes()),
        strides_(view.strides()),
        offset_(view.storage_offset()) {
    recipe_->pending++;
  }
  ~RecipeHooks() override {
    if (!used_) recipe_->done();
  }

  void call_pack_hook(const at::Tensor&) override {}
  at::Tensor call_unpack_hook() override {
    at::AutoDispatchBelowADInplaceOrView below;
    if (!needed()) return at::zeros({}, recipe_->result.options).expand(sizes_);  // nobody looks at its values
    at::Tensor view = recipe_->memory().as_strided(sizes_, strides_, offset_);
    if (!used_) recipe_->done();
    used_ = true;
    return view;
  }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::nullopt;  // not Python's
  }

 private:
  // Of a backward that does not want the gradient for which alone the tensor was saved.
  bool needed() const {
    const auto current = torch::autograd::get_current_node();
    return needed_by_ < 0 || current.get() != node_ ||
           node_->task_should_compute_output(static_cast<size_t>(needed_by_));
  }

  const std::shared_ptr<Recipe> recipe_;
  Node* const node_;  // whose this is
  const int needed_by_;
  const c10::DimVector sizes_, strides_;
  const int64_t offset_;
  bool used_ = false;
};

}  // namespace

void collect_saved(Node& node, std::vector<Saved>& saved) {
  static const Table table = known_nodes();
  static thread_local Table others;  // by class: plumb's own nodes, and those that are not looked into
  const std::type_index type(typeid(node));
  if (auto it = table.find(type); it != table.end()) return it->second(node, saved);
  auto it = others.find(type);
  if (it == others.end()) {
    it = others.emplace(type, dynamic_cast<SavesTensors*>(&node) ? collect_own : collect_nothing).first;
  }
  it->second(node, saved);
}

void save_recipe(const Saved& saved, const at::Tensor& data, std::shared_ptr<Recipe> recipe) {
  saved.variable->register_hooks(std::make_unique<RecipeHooks>(std::move(recipe), saved, data));
}

}  // namespace plumb
