// Unit-scaled torch::nn modules. Weights start with unit variance, biases with zero, and all parameters are tagged for
// u-muP (parameter.h). Shapes and formulas: functional.h. Modules with bias or affine options have none unless asked
// for.
//
// clone() gives the copy's parameters their tags, without a stack's depth; copy_tags() brings that over too.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <string>
#include <vector>

#include "plumb/scaling/functional.h"
#include "plumb/scaling/rules.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb::nn {

using at::Tensor;

struct GELUOptions {
  double mult = 1.0;
  Constraint constraint = "to_output_scale";
  std::string approximate = "none";
};
struct GELUImpl : torch::nn::Cloneable<GELUImpl> {
  explicit GELUImpl(GELUOptions options = {}) : options(std::move(options)) {}
  void reset() override {}
  Tensor forward(const Tensor& input) {
    return functional::gelu(input, options.mult, options.constraint, options.approximate);
  }
  GELUOptions options;
};
TORCH_MODULE(GELU);

struct SiLUOptions {
  double mult = 1.0;
  Constraint constraint = "to_output_scale";
};
struct SiLUImpl : torch::nn::Cloneable<SiLUImpl> {
  explicit SiLUImpl(SiLUOptions options = {}) : options(std::move(options)) {}
  void reset() override {}
  Tensor forward(const Tensor& input) { return functional::silu(input, options.mult, options.constraint); }
  SiLUOptions options;
};
TORCH_MODULE(SiLU);

struct SoftmaxOptions {
  int64_t dim = -1;
  double mult = 1.0;
  Constraint constraint = "to_output_scale";
};
struct SoftmaxImpl : torch::nn::Cloneable<SoftmaxImpl> {
  explicit SoftmaxImpl(SoftmaxOptions options) : options(std::move(options)) {}
  void reset() override {}
  Tensor forward(const Tensor& input) {
    return functional::softmax(input, options.dim, std::nullopt, options.constraint, options.mult);
  }
  SoftmaxOptions options;
};
TORCH_MODULE(Softmax);

struct DropoutImpl : torch::nn::Cloneable<DropoutImpl> {
  explicit DropoutImpl(double p = 0.5) : p(p) {}
  void reset() override {}
  Tensor forward(const Tensor& input) { return functional::dropout(input, p, is_training()); }
  double p;
};
TORCH_MODULE(Dropout);

struct LinearOptions {
  LinearOptions(int64_t in_features, int64_t out_features) : in_features(in_features), out_features(out_features) {}
  int64_t in_features, out_features;
  bool bias = false;
  Constraint constraint = "to_output_scale";
  MupType weight_type = MupType::Weight;
};
struct LinearImpl : torch::nn::Cloneable<LinearImpl> {
  LinearImpl(int64_t in_features, int64_t out_features) : LinearImpl(LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(LinearOptions options);
  void reset() override;
  Tensor forward(const Tensor& input) { return functional::linear(input, weight, bias, options.constraint); }
  LinearOptions options;
  Tensor weight, bias;
};
TORCH_MODULE(Linear);

// A network's last layer; no constraint and type Output unless the options say otherwise.
struct LinearReadoutOptions : LinearOptions {
  LinearReadoutOptions(int64_t in_features, int64_t out_features) : LinearOptions(in_features, out_features) {
    constraint = std::nullopt;
    weight_type = MupType::Output;
  }
};
struct LinearReadoutImpl : torch::nn::Cloneable<LinearReadoutImpl> {
  LinearReadoutImpl(int64_t in_features, int64_t out_features)
      : LinearReadoutImpl(LinearReadoutOptions(in_features, out_features)) {}
  explicit LinearReadoutImpl(LinearReadoutOptions options);
  void reset() override;
  Tensor forward(const Tensor& input) { return functional::linear_readout(input, weight, bias, options.constraint); }
  LinearReadoutOptions options;
  Tensor weight, bias;
};
TORCH_MODULE(LinearReadout);

struct Conv1dOptions : functional::ConvOptions {
  Conv1dOptions(int64_t in_channels, int64_t out_channels, int64_t kernel_size)
      : in_channels(in_channels), out_channels(out_channels), kernel_size(kernel_size) {}
  int64_t in_channels, out_channels, kernel_size;
  bool bias = false;
  MupType weight_type = MupType::Weight;
};
struct Conv1dImpl : torch::nn::Cloneable<Conv1dImpl> {
  explicit Conv1dImpl(Conv1dOptions options);
  void reset() override;
  Tensor forward(const Tensor& input) { return functional::conv1d(input, weight, bias, options); }
  Conv1dOptions options;
  Tensor weight, bias;
};
TORCH_MODULE(Conv1d);

struct LayerNormOptions {
  LayerNormOptions(std::vector<int64_t> shape) : normalized_shape(std::move(shape)) {}  // NOLINT
  std::vector<int64_t> normalized_shape;
  double eps = 1e-5;
  bool elementwise_affine = false;
  bool bias = true;  // with elementwise_affine only
};
struct LayerNormImpl : torch::nn::Cloneable<LayerNormImpl> {
  explicit LayerNormImpl(LayerNormOptions options);
  void reset() override;
  Tensor forward(const Tensor& input) {
    return functional::layer_norm(input, options.normalized_shape, weight, bias, options.eps);
  }
  LayerNormOptions options;
  Tensor weight, bias;
};
TORCH_MODULE(LayerNorm);

struct RMSNormOptions {
  RMSNormOptions(std::vector<int64_t> shape) : normalized_shape(std::move(shape)) {}  // NOLINT
  std::vector<int64_t> normalized_shape;
  double eps = 1e-5;
  bool elementwise_affine = false;
};
struct RMSNormImpl : torch::nn::Cloneable<RMSNormImpl> {
  explicit RMSNormImpl(RMSNormOptions options);
  void reset() override;
  Tensor forward(const Tensor& input) {
    return functional::rms_norm(input, options.normalized_shape, weight, options.eps);
  }
  RMSNormOptions options;
  Tensor weight;
};
TORCH_MODULE(RMSNorm);

struct EmbeddingOptions {
  EmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings(num_embeddings), embedding_dim(embedding_dim) {}
  int64_t num_embeddings, embedding_dim;
  std::optional<int64_t> padding_idx;  // its row starts at zero
  std::optional<double> max_norm;
  double norm_type = 2.0;
};
struct EmbeddingImpl : torch::nn::Cloneable<EmbeddingImpl> {
  EmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : EmbeddingImpl(EmbeddingOptions(num_embeddings, embedding_dim)) {}
  explicit EmbeddingImpl(EmbeddingOptions options);
  void reset() override;
  Tensor forward(const Tensor& indices) {
    return functional::embedding(indices, weight, options.padding_idx, options.max_norm, options.norm_type);
  }
  EmbeddingOptions options;
  Tensor weight;
};
TORCH_MODULE(Embedding);

struct CrossEntropyLossOptions {
  double mult = 1.0;
  std::optional<Tensor> weight;
  int64_t ignore_index = -100;
  std::string reduction = "mean";
  double label_smoothing = 0.0;
};
struct CrossEntropyLossImpl : torch::nn::Cloneable<CrossEntropyLossImpl> {
  explicit CrossEntropyLossImpl(CrossEntropyLossOptions options = {});
  void reset() override;
  Tensor forward(const Tensor& input, const Tensor& target) {
    return functional::cross_entropy(input, target, weight, options.ignore_index, options.reduction,
                                     options.label_smoothing, options.mult);
  }
  CrossEntropyLossOptions options;
  Tensor weight;  // a buffer; undefined when classes weigh the same
};
TORCH_MODULE(CrossEntropyLoss);

// linear_2(linear_1(x) * silu(linear_gate(x))), with an intermediate size of hidden_size * expansion_factor.
struct MLPImpl : torch::nn::Cloneable<MLPImpl> {
  explicit MLPImpl(int64_t hidden_size, int64_t expansion_factor = 4);
  void reset() override;
  Tensor forward(const Tensor& input);
  int64_t hidden_size, expansion_factor;
  Linear linear_1{nullptr}, linear_gate{nullptr}, linear_2{nullptr};
};
TORCH_MODULE(MLP);

struct MHSAOptions {
  MHSAOptions(int64_t hidden_size, int64_t heads, bool is_causal)
      : hidden_size(hidden_size), heads(heads), is_causal(is_causal) {}
  int64_t hidden_size, heads;  // hidden_size is a multiple of heads
  bool is_causal;
  double dropout_p = 0.0;  // dropout probability of attention weights, while training
  double mult = 1.0;
};
// Multi-head self-attention over (batch, sequence, hidden).
struct MHSAImpl : torch::nn::Cloneable<MHSAImpl> {
  explicit MHSAImpl(MHSAOptions options);
  void reset() override;
  Tensor forward(const Tensor& input);
  MHSAOptions options;
  Linear linear_qkv{nullptr}, linear_o{nullptr};
};
TORCH_MODULE(MHSA);

struct TransformerLayerOptions {
  TransformerLayerOptions(int64_t hidden_size, int64_t heads, double mhsa_tau, double mlp_tau, bool is_causal)
      : hidden_size(hidden_size), heads(heads), mhsa_tau(mhsa_tau), mlp_tau(mlp_tau), is_causal(is_causal) {}
  int64_t hidden_size, heads;
  double mhsa_tau, mlp_tau;
  bool is_causal;
  double dropout_p = 0.0;  // dropout probability of attention weights and of both branches' outputs, while training
};
// A pre-norm transformer layer.
struct TransformerLayerImpl : torch::nn::Cloneable<TransformerLayerImpl> {
  explicit TransformerLayerImpl(TransformerLayerOptions options);
  void reset() override;
  Tensor forward(const Tensor& input);
  TransformerLayerOptions options;
  RMSNorm mhsa_norm{nullptr}, mlp_norm{nullptr};
  MHSA mhsa{nullptr};
  MLP mlp{nullptr};
};
TORCH_MODULE(TransformerLayer);

// Tells every parameter under `module` that its stack has `depth` layers. Error for a parameter without a tag, or one
// that is in a stack already.
void set_scaling_depth(const torch::nn::Module& module, int64_t depth);
// Gives `to` the tags of `from`, parameter by parameter; the two have the same names.
void copy_tags(const torch::nn::Module& from, const torch::nn::Module& to);

// A ModuleList and a Sequential that call set_scaling_depth with their size, as of their construction.
struct DepthModuleListImpl : torch::nn::ModuleListImpl {
  template <class... Modules>
  explicit DepthModuleListImpl(Modules&&... modules) : ModuleListImpl(std::forward<Modules>(modules)...) {
    set_scaling_depth(*this, static_cast<int64_t>(size()));
  }
};
TORCH_MODULE(DepthModuleList);

struct DepthSequentialImpl : torch::nn::SequentialImpl {
  template <class... Modules>
  explicit DepthSequentialImpl(Modules&&... modules) : SequentialImpl(std::forward<Modules>(modules)...) {
    set_scaling_depth(*this, static_cast<int64_t>(size()));
  }
  using SequentialImpl::forward;
};
TORCH_MODULE(DepthSequential);

struct TransformerStackOptions {
  TransformerStackOptions(int64_t layers, int64_t hidden_size, int64_t heads, bool is_causal)
      : layers(layers), hidden_size(hidden_size), heads(heads), is_causal(is_causal) {}
  int64_t layers, hidden_size, heads;
  bool is_causal;
  double dropout_p = 0.0;
  rules::ResidualScalingFn residual_scaling = rules::transformer_residual_scaling_rule();
};
// Transformer layers "0", "1", ... whose taus follow `residual_scaling`, and whose parameters know how many they are.
struct TransformerStackImpl : torch::nn::Cloneable<TransformerStackImpl> {
  explicit TransformerStackImpl(TransformerStackOptions options);
  void reset() override;
  Tensor forward(const Tensor& input);  // (batch, sequence, hidden), as the output
  TransformerStackOptions options;
  std::vector<TransformerLayer> layers;
};
TORCH_MODULE(TransformerStack);

struct TransformerDecoderOptions {
  TransformerDecoderOptions(int64_t hidden_size, int64_t vocab_size, int64_t layers, int64_t heads)
      : hidden_size(hidden_size), vocab_size(vocab_size), layers(layers), heads(heads) {}
  int64_t hidden_size, vocab_size, layers, heads;
  double dropout_p = 0.0;
  rules::ResidualScalingFn residual_scaling = rules::transformer_residual_scaling_rule();
};
// A decoder-only language model without positions: embedding, causal layers, norm, readout.
struct TransformerDecoderImpl : torch::nn::Cloneable<TransformerDecoderImpl> {
  explicit TransformerDecoderImpl(TransformerDecoderOptions options);
  void reset() override;
  Tensor forward(const Tensor& input_ids);  // (batch, sequence) -> (batch, sequence, vocab)
  Tensor loss(const Tensor& input_ids);     // cross entropy of each token given those before it
  TransformerDecoderOptions options;
  Embedding embedding{nullptr};
  TransformerStack layers{nullptr};
  RMSNorm final_norm{nullptr};
  LinearReadout projection{nullptr};
};
TORCH_MODULE(TransformerDecoder);

}  // namespace plumb::nn
