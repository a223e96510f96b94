#include "plumb/scaling/modules.h"

#include "plumb/core/error.h"

namespace plumb::nn {
namespace {

// Throws Error(InvalidArgument) for a size that no layer has. Products of two sizes fit into int64.
void check_size(const char* module, const char* name, int64_t size, int64_t least = 0) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (size >= least && size <= kMost) return;
  throw Error(ErrorKind::InvalidArgument, std::string(module) + ": " + name + " is " + std::to_string(size) + ".", "",
              "a number from " + std::to_string(least) + " to 2^31");
}

// A module's clone() calls reset() first and copies values after: what is made here is made again for the copy.
Tensor register_tagged(torch::nn::Module& module, const char* name, Tensor value, MupType type) {
  auto& parameter = module.register_parameter(name, std::move(value));
  tag(parameter, {type, std::nullopt});
  return parameter;
}

Linear free_linear(int64_t in, int64_t out) {
  LinearOptions options(in, out);
  options.constraint = std::nullopt;
  return Linear(options);
}

}  // namespace

LinearImpl::LinearImpl(LinearOptions o) : options(std::move(o)) { LinearImpl::reset(); }
void LinearImpl::reset() {
  check_size("Linear", "in_features", options.in_features);
  check_size("Linear", "out_features", options.out_features);
  weight =
      register_tagged(*this, "weight", torch::randn({options.out_features, options.in_features}), options.weight_type);
  if (options.bias) bias = register_tagged(*this, "bias", torch::zeros(options.out_features), MupType::Bias);
}

LinearReadoutImpl::LinearReadoutImpl(LinearReadoutOptions o) : options(std::move(o)) { LinearReadoutImpl::reset(); }
void LinearReadoutImpl::reset() {
  check_size("LinearReadout", "in_features", options.in_features);
  check_size("LinearReadout", "out_features", options.out_features);
  weight =
      register_tagged(*this, "weight", torch::randn({options.out_features, options.in_features}), options.weight_type);
  if (options.bias) bias = register_tagged(*this, "bias", torch::zeros(options.out_features), MupType::Bias);
}

Conv1dImpl::Conv1dImpl(Conv1dOptions o) : options(std::move(o)) { Conv1dImpl::reset(); }
void Conv1dImpl::reset() {
  check_size("Conv1d", "in_channels", options.in_channels);
  check_size("Conv1d", "out_channels", options.out_channels);
  check_size("Conv1d", "kernel_size", options.kernel_size, 1);
  if (options.groups < 1 || options.in_channels % options.groups || options.out_channels % options.groups) {
    throw Error(ErrorKind::InvalidArgument, "Conv1d: channels " + std::to_string(options.in_channels) + " and " +
                                                std::to_string(options.out_channels) + " do not divide into " +
                                                std::to_string(options.groups) + " groups.");
  }
  weight = register_tagged(
      *this, "weight", torch::randn({options.out_channels, options.in_channels / options.groups, options.kernel_size}),
      options.weight_type);
  if (options.bias) bias = register_tagged(*this, "bias", torch::zeros(options.out_channels), MupType::Bias);
}

LayerNormImpl::LayerNormImpl(LayerNormOptions o) : options(std::move(o)) { LayerNormImpl::reset(); }
void LayerNormImpl::reset() {
  for (const int64_t size : options.normalized_shape) check_size("LayerNorm", "normalized_shape", size);
  if (!options.elementwise_affine) return;
  weight = register_tagged(*this, "weight", torch::ones(options.normalized_shape), MupType::Norm);
  if (options.bias) bias = register_tagged(*this, "bias", torch::zeros(options.normalized_shape), MupType::Bias);
}

RMSNormImpl::RMSNormImpl(RMSNormOptions o) : options(std::move(o)) { RMSNormImpl::reset(); }
void RMSNormImpl::reset() {
  for (const int64_t size : options.normalized_shape) check_size("RMSNorm", "normalized_shape", size);
  if (options.elementwise_affine) {
    weight = register_tagged(*this, "weight", torch::ones(options.normalized_shape), MupType::Norm);
  }
}

EmbeddingImpl::EmbeddingImpl(EmbeddingOptions o) : options(o) { EmbeddingImpl::reset(); }
void EmbeddingImpl::reset() {
  check_size("Embedding", "num_embeddings", options.num_embeddings);
  check_size("Embedding", "embedding_dim", options.embedding_dim);
  const int64_t rows = options.num_embeddings, padding = options.padding_idx.value_or(0);
  if (options.padding_idx && (padding < -rows || padding >= rows)) {
    throw Error(ErrorKind::InvalidArgument, "Embedding: padding_idx " + std::to_string(padding) +
                                                " is none of the table's " + std::to_string(rows) + " rows.");
  }
  auto table = torch::randn({options.num_embeddings, options.embedding_dim});
  if (options.padding_idx) table.select(0, *options.padding_idx).zero_();
  weight = register_tagged(*this, "weight", table, MupType::Weight);
}

CrossEntropyLossImpl::CrossEntropyLossImpl(CrossEntropyLossOptions o) : options(std::move(o)) {
  CrossEntropyLossImpl::reset();
}
void CrossEntropyLossImpl::reset() {
  if (options.weight) weight = register_buffer("weight", *options.weight);
}

MLPImpl::MLPImpl(int64_t hidden, int64_t factor) : hidden_size(hidden), expansion_factor(factor) { MLPImpl::reset(); }
void MLPImpl::reset() {
  // No constraint is needed: what linear_1 and linear_gate do to the gradient's scale, linear_2 undoes.
  check_size("MLP", "hidden_size", hidden_size);
  check_size("MLP", "expansion_factor", expansion_factor);
  const int64_t inner = hidden_size * expansion_factor;
  linear_1 = register_module("linear_1", free_linear(hidden_size, inner));
  linear_gate = register_module("linear_gate", free_linear(hidden_size, inner));
  linear_2 = register_module("linear_2", free_linear(inner, hidden_size));
}
Tensor MLPImpl::forward(const Tensor& input) {
  return linear_2(functional::silu_glu(linear_1(input), linear_gate(input)));
}

MHSAImpl::MHSAImpl(MHSAOptions o) : options(o) { MHSAImpl::reset(); }
void MHSAImpl::reset() {
  check_size("MHSA", "hidden_size", options.hidden_size);
  if (options.heads < 1 || options.hidden_size % options.heads) {
    throw Error(ErrorKind::InvalidArgument, "MHSA: hidden_size " + std::to_string(options.hidden_size) +
                                                " is not a multiple of " + std::to_string(options.heads) + " heads.");
  }
  linear_qkv = register_module("linear_qkv", Linear(options.hidden_size, 3 * options.hidden_size));
  linear_o = register_module("linear_o", Linear(options.hidden_size, options.hidden_size));
}
Tensor MHSAImpl::forward(const Tensor& input) {
  auto heads = linear_qkv(input).unflatten(-1, {3, options.heads, options.hidden_size / options.heads}).unbind(-3);
  for (auto& head : heads) head = head.transpose(-3, -2);
  auto mixed = functional::scaled_dot_product_attention(heads[0], heads[1], heads[2], std::nullopt,
                                                        is_training() ? options.dropout_p : 0.0, options.is_causal,
                                                        options.mult);
  return linear_o(mixed.transpose(-3, -2).flatten(-2));
}

TransformerLayerImpl::TransformerLayerImpl(TransformerLayerOptions o) : options(o) { TransformerLayerImpl::reset(); }
void TransformerLayerImpl::reset() {
  MHSAOptions attention(options.hidden_size, options.heads, options.is_causal);
  attention.dropout_p = options.dropout_p;
  const RMSNormOptions norm(std::vector<int64_t>{options.hidden_size});
  mhsa_norm = register_module("mhsa_norm", RMSNorm(norm));
  mhsa = register_module("mhsa", MHSA(attention));
  mlp_norm = register_module("mlp_norm", RMSNorm(norm));
  mlp = register_module("mlp", MLP(options.hidden_size));
}
Tensor TransformerLayerImpl::forward(const Tensor& input) {
  auto dropped = [&](const Tensor& x) { return functional::dropout(x, options.dropout_p, is_training()); };
  auto middle =
      functional::residual_apply([&](const Tensor& x) { return dropped(mhsa(mhsa_norm(x))); }, input, options.mhsa_tau);
  return functional::residual_apply([&](const Tensor& x) { return dropped(mlp(mlp_norm(x))); }, middle,
                                    options.mlp_tau);
}

void set_scaling_depth(const torch::nn::Module& module, int64_t depth) {
  const auto parameters = module.named_parameters();
  for (const auto& item : parameters) {
    const auto data = parameter_data(item.value());
    if (!data) {
      throw Error(ErrorKind::InvalidState, "Parameter " + item.key() + " of a stack has no u-muP type.", "",
                  "layers of plumb::nn, or plumb::tag(parameter, {type})");
    }
    if (data->scaling_depth) {
      throw Error(ErrorKind::InvalidState, "Parameter " + item.key() + " is in a stack of depth " +
                                               std::to_string(*data->scaling_depth) + " already.");
    }
  }
  for (const auto& item : parameters) tag(item.value(), {parameter_data(item.value())->type, depth});
}

void copy_tags(const torch::nn::Module& from, const torch::nn::Module& to) {
  const auto targets = to.named_parameters();
  for (const auto& item : from.named_parameters()) {
    const auto data = parameter_data(item.value());
    if (!data) continue;
    const auto* target = targets.find(item.key());
    if (!target) throw Error(ErrorKind::UnknownName, "copy_tags: the copy has no parameter " + item.key() + ".");
    tag(*target, *data);
  }
}

TransformerStackImpl::TransformerStackImpl(TransformerStackOptions o) : options(std::move(o)) {
  TransformerStackImpl::reset();
}
void TransformerStackImpl::reset() {
  check_size("TransformerStack", "layers", options.layers);
  if (!options.residual_scaling) {
    throw Error(
        ErrorKind::InvalidArgument, "TransformerStack: residual_scaling is empty.", "",
        "rules::transformer_residual_scaling_rule(), or a function of the branch and of the number of branches");
  }
  layers.clear();
  const int64_t branches = 2 * options.layers;
  for (int64_t i = 0; i < options.layers; ++i) {
    TransformerLayerOptions layer(options.hidden_size, options.heads, options.residual_scaling(2 * i, branches),
                                  options.residual_scaling(2 * i + 1, branches), options.is_causal);
    layer.dropout_p = options.dropout_p;
    layers.push_back(register_module(std::to_string(i), TransformerLayer(layer)));
  }
  set_scaling_depth(*this, options.layers);
}
Tensor TransformerStackImpl::forward(const Tensor& input) {
  Tensor x = input;
  for (TransformerLayer& layer : layers) x = layer(x);
  return x;
}

TransformerDecoderImpl::TransformerDecoderImpl(TransformerDecoderOptions o) : options(std::move(o)) {
  TransformerDecoderImpl::reset();
}
void TransformerDecoderImpl::reset() {
  embedding = register_module("embedding", Embedding(options.vocab_size, options.hidden_size));
  TransformerStackOptions stack(options.layers, options.hidden_size, options.heads, /*is_causal=*/true);
  stack.dropout_p = options.dropout_p;
  stack.residual_scaling = options.residual_scaling;
  layers = register_module("layers", TransformerStack(stack));
  final_norm = register_module("final_norm", RMSNorm(RMSNormOptions(std::vector<int64_t>{options.hidden_size})));
  projection = register_module("projection", LinearReadout(options.hidden_size, options.vocab_size));
}
Tensor TransformerDecoderImpl::forward(const Tensor& input_ids) {
  return projection(final_norm(layers(embedding(input_ids))));
}
Tensor TransformerDecoderImpl::loss(const Tensor& input_ids) {
  auto logits = forward(input_ids).slice(-2, 0, -1).to(at::kFloat);
  return functional::cross_entropy(logits.flatten(0, -2), input_ids.slice(-1, 1).flatten());
}

}  // namespace plumb::nn
