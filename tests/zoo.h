// Models that everything is tried on, as a C++ user of torch::nn writes them. Small shapes, real structure.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "examples/gpt.h"

namespace plumb::zoo {

using at::Tensor;
namespace nn = torch::nn;
namespace F = torch::nn::functional;

using example::Block;

struct GPT : example::GPT {
  GPT(int64_t vocabulary, int64_t width, int64_t layers, int64_t heads, int64_t context, bool tied, double dropout = 0)
      : example::GPT(example::GPTOptions{vocabulary, width, layers, heads, context, tied, dropout}) {}
};

struct EncoderLayerImpl : nn::Module {
  explicit EncoderLayerImpl(double dropout)
      : layer(nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(dropout)) {
    register_module("layer", layer);
  }
  Tensor forward(Tensor x) { return layer(x); }
  nn::TransformerEncoderLayer layer;
};
TORCH_MODULE(EncoderLayer);

struct AttentionImpl : nn::Module {
  AttentionImpl() : mha(nn::MultiheadAttentionOptions(16, 4)) { register_module("mha", mha); }
  std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k) { return mha(q, k, k); }
  nn::MultiheadAttention mha;
};
TORCH_MODULE(Attention);

struct RMSNormImpl : nn::Module {
  explicit RMSNormImpl(int64_t d) : weight(register_parameter("weight", torch::ones({d}))) {}
  Tensor forward(Tensor x) { return weight * (x * at::rsqrt(x.pow(2).mean(-1, true) + 1e-6)); }
  Tensor weight;
};
TORCH_MODULE(RMSNorm);

struct LlamaBlockImpl : nn::Module {
  LlamaBlockImpl(int64_t d, int64_t h)
      : heads(h),
        n1(d),
        n2(d),
        q(bare(d, d)),
        k(bare(d, d)),
        v(bare(d, d)),
        o(bare(d, d)),
        gate(bare(d, 2 * d)),
        up(bare(d, 2 * d)),
        down(bare(2 * d, d)) {
    register_module("n1", n1);
    register_module("n2", n2);
    register_module("q", q);
    register_module("k", k);
    register_module("v", v);
    register_module("o", o);
    register_module("gate", gate);
    register_module("up", up);
    register_module("down", down);
    inv = register_buffer("inv_freq", 1.0 / at::pow(10000.0, at::arange(0, d / h, 2, at::kFloat) / double(d / h)));
  }
  static nn::LinearOptions bare(int64_t i, int64_t o) { return nn::LinearOptions(i, o).bias(false); }
  Tensor rope(const Tensor& x) {
    auto f = at::outer(at::arange(x.size(2), at::kFloat), inv);
    auto e = at::cat({f, f}, -1);
    auto halves = x.chunk(2, -1);
    return x * e.cos() + at::cat({-halves[1], halves[0]}, -1) * e.sin();
  }
  Tensor forward(Tensor x) {
    const auto b = x.size(0), t = x.size(1), d = x.size(2);
    auto y = n1(x);
    auto split = [&](const Tensor& z) { return z.view({b, t, heads, d / heads}).transpose(1, 2); };
    auto a = at::scaled_dot_product_attention(rope(split(q(y))), rope(split(k(y))), split(v(y)), {}, 0.0, true);
    x = x + o(a.transpose(1, 2).reshape({b, t, d}));
    y = n2(x);
    return x + down(F::silu(gate(y)) * up(y));
  }
  int64_t heads;
  RMSNorm n1, n2;
  nn::Linear q, k, v, o, gate, up, down;
  Tensor inv;
};
TORCH_MODULE(LlamaBlock);

struct ViTImpl : nn::Module {
  ViTImpl() : patch(nn::Conv2dOptions(3, 16, 4).stride(4)), block(16, 4), head(16, 10) {
    register_module("patch", patch);
    register_module("block", block);
    register_module("head", head);
    cls = register_parameter("cls", torch::randn({1, 1, 16}));
    pos = register_parameter("pos", torch::randn({1, 17, 16}) * 0.02);
  }
  Tensor forward(Tensor image) {
    auto x = patch(image).flatten(2).transpose(1, 2);
    x = at::cat({cls.expand({x.size(0), -1, -1}), x}, 1) + pos;
    return head(block(x).index({torch::indexing::Slice(), 0}));
  }
  nn::Conv2d patch;
  Block block;
  nn::Linear head;
  Tensor cls, pos;
};
TORCH_MODULE(ViT);

struct ConvNetImpl : nn::Module {
  ConvNetImpl()
      : c1(nn::Conv2dOptions(3, 8, 3).padding(1)), c2(nn::Conv2dOptions(8, 8, 3).stride(2)), b1(8), b2(8), fc(8, 5) {
    register_module("c1", c1);
    register_module("c2", c2);
    register_module("b1", b1);
    register_module("b2", b2);
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) {
    x = b1(c1(x)).relu_();
    x = F::max_pool2d(b2(c2(x)).relu_(), F::MaxPool2dFuncOptions(2));
    return fc(F::adaptive_avg_pool2d(x, F::AdaptiveAvgPool2dFuncOptions(1)).flatten(1));
  }
  nn::Conv2d c1, c2;
  nn::BatchNorm2d b1, b2;
  nn::Linear fc;
};
TORCH_MODULE(ConvNet);

struct UNetImpl : nn::Module {
  UNetImpl() : d1(o(2, 4)), d2(o(4, 8)), mid(o(8, 8)), u1(o(16, 4)), u2(o(8, 2)) {
    register_module("d1", d1);
    register_module("d2", d2);
    register_module("mid", mid);
    register_module("u1", u1);
    register_module("u2", u2);
  }
  static nn::Conv2dOptions o(int64_t i, int64_t c) { return nn::Conv2dOptions(i, c, 3).padding(1); }
  static Tensor twice(const Tensor& x) {
    return F::interpolate(x, F::InterpolateFuncOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kNearest));
  }
  Tensor forward(Tensor x) {
    auto a = at::relu(d1(x));
    auto b = at::relu(d2(at::max_pool2d(a, 2)));
    auto m = at::relu(mid(at::max_pool2d(b, 2)));
    auto y = at::relu(u1(at::cat({twice(m), b}, 1)));
    return u2(at::cat({twice(y), a}, 1));
  }
  nn::Conv2d d1, d2, mid, u1, u2;
};
TORCH_MODULE(UNet);

struct RecurrentImpl : nn::Module {
  explicit RecurrentImpl(bool gru)
      : lstm(gru ? nn::LSTM(nullptr)
                 : nn::LSTM(nn::LSTMOptions(6, 8).num_layers(2).bidirectional(true).batch_first(true).dropout(0.3))),
        gru_(gru ? nn::GRU(nn::GRUOptions(6, 8).num_layers(2).batch_first(true)) : nn::GRU(nullptr)),
        fc(gru ? 8 : 16, 3) {
    if (gru)
      register_module("gru", gru_);
    else
      register_module("lstm", lstm);
    register_module("fc", fc);
  }
  Tensor forward(Tensor x) { return fc(gru_.is_empty() ? std::get<0>(lstm(x)) : std::get<0>(gru_(x))); }
  nn::LSTM lstm;
  nn::GRU gru_;
  nn::Linear fc;
};
TORCH_MODULE(Recurrent);

// Static routing: every expert sees every token, weighted by the router.
struct MoEImpl : nn::Module {
  MoEImpl() : router(8, 4) {
    register_module("router", router);
    register_module("experts", experts);
    for (int i = 0; i < 4; ++i) experts->push_back(nn::Sequential(nn::Linear(8, 16), nn::ReLU(), nn::Linear(16, 8)));
  }
  std::map<std::string, Tensor> forward(Tensor x) {
    auto gates = at::softmax(router(x), -1);
    Tensor y = at::zeros_like(x);
    for (size_t i = 0; i < experts->size(); ++i) {
      y = y + gates.index({"...", torch::indexing::Slice(i, i + 1)}) * experts[i]->as<nn::SequentialImpl>()->forward(x);
    }
    return {{"y", y}, {"gates", gates}};
  }
  nn::Linear router;
  nn::ModuleList experts;
};
TORCH_MODULE(MoE);

// In-place operators and writes through views.
struct InPlaceImpl : nn::Module {
  InPlaceImpl() : fc(6, 6) {
    register_module("fc", fc);
    seen = register_buffer("seen", torch::zeros({}));
  }
  std::tuple<Tensor, Tensor> forward(Tensor x) {
    {
      torch::NoGradGuard guard;
      seen.add_(1);
    }
    auto y = fc(x);
    y.add_(x).mul_(0.5);
    y.select(1, 0).add_(1);
    y.slice(1, 2, 4).mul_(2);
    y.index_put_({torch::indexing::Slice(), 5}, x.select(1, 5));
    auto z = torch::zeros_like(y);
    z.slice(1, 0, 3).copy_(y.slice(1, 3, 6));
    return {at::relu_(y), z};
  }
  nn::Linear fc;
  Tensor seen;
};
TORCH_MODULE(InPlace);

struct SharedImpl : nn::Module {
  SharedImpl() : fc(5, 5) { register_module("fc", fc); }
  std::vector<Tensor> forward(Tensor x, Tensor y) { return {fc(at::tanh(fc(x))), fc(y)}; }
  nn::Linear fc;
};
TORCH_MODULE(Shared);

struct AutocastImpl : nn::Module {
  AutocastImpl() : a(8, 16), norm(nn::LayerNormOptions({16})), b(16, 4) {
    register_module("a", a);
    register_module("norm", norm);
    register_module("b", b);
  }
  Tensor forward(Tensor x) {
    const bool before = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    auto y = b(norm(F::gelu(a(x))));
    at::autocast::set_autocast_enabled(at::kCPU, before);
    at::autocast::clear_cache();
    return y;
  }
  nn::Linear a;
  nn::LayerNorm norm;
  nn::Linear b;
};
TORCH_MODULE(Autocast);

}  // namespace plumb::zoo
