// A GPT as a C++ user writes it: nothing in it knows of plumb. The demo trains it, tests and benchmarks use it too.
#pragma once

#include <torch/torch.h>

#include <tuple>

namespace example {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

struct BlockImpl : nn::Module {
  BlockImpl(int64_t width, int64_t heads, double dropout = 0)
      : heads(heads),
        dropout(dropout),
        ln1(nn::LayerNormOptions({width})),
        ln2(nn::LayerNormOptions({width})),
        qkv(width, 3 * width),
        proj(width, width),
        up(width, 4 * width),
        down(4 * width, width) {
    register_module("ln1", ln1);
    register_module("qkv", qkv);
    register_module("proj", proj);
    register_module("ln2", ln2);
    register_module("up", up);
    register_module("down", down);
  }

  at::Tensor forward(at::Tensor x) {
    const auto b = x.size(0), t = x.size(1), d = x.size(2);
    auto parts = qkv(ln1(x)).split(d, -1);
    auto split_heads = [&](const at::Tensor& z) { return z.view({b, t, heads, d / heads}).transpose(1, 2); };
    auto a =
        at::scaled_dot_product_attention(split_heads(parts[0]), split_heads(parts[1]), split_heads(parts[2]), {}, 0.0,
                                         /*is_causal=*/true);
    x = x + drop(proj(a.transpose(1, 2).reshape({b, t, d})));
    return x + drop(down(F::gelu(up(ln2(x)))));
  }

  at::Tensor drop(const at::Tensor& x) const { return dropout > 0 ? at::dropout(x, dropout, is_training()) : x; }

  int64_t heads;
  double dropout;
  nn::LayerNorm ln1, ln2;
  nn::Linear qkv, proj, up, down;
};
TORCH_MODULE(Block);

// A linear layer that may share its weight.
struct HeadImpl : nn::LinearImpl {
  using nn::LinearImpl::LinearImpl;
  void tie(const at::Tensor& other) { weight = parameters_["weight"] = other; }
};
TORCH_MODULE(Head);

struct GPTOptions {
  int64_t vocabulary = 256, width = 128, layers = 2, heads = 4, context = 64;
  bool tied = false;  // the head's weight is the embedding's
  double dropout = 0;
};

// Takes ids (batch, time), int64, and returns logits (batch, time, vocabulary); with targets of the ids' shape the mean
// cross entropy in nats a token.
struct GPTImpl : nn::Module {
  explicit GPTImpl(const GPTOptions& o)
      : tok(o.vocabulary, o.width),
        pos(o.context, o.width),
        ln(nn::LayerNormOptions({o.width})),
        head(nn::LinearOptions(o.width, o.vocabulary).bias(false)) {
    register_module("tok", tok);
    register_module("pos", pos);
    register_module("blocks", blocks);
    for (int64_t i = 0; i < o.layers; ++i) blocks->push_back(Block(o.width, o.heads, o.dropout));
    register_module("ln", ln);
    register_module("head", head);
    if (o.tied) head->tie(tok->weight);
  }

  at::Tensor forward(at::Tensor ids) {
    auto x = tok(ids) + pos(at::arange(ids.size(1), at::kLong));
    for (auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(ln(x));
  }
  at::Tensor forward(at::Tensor ids, at::Tensor targets) {
    return at::cross_entropy_loss(forward(ids).flatten(0, 1), targets.flatten());
  }

  nn::Embedding tok, pos;
  nn::ModuleList blocks;
  nn::LayerNorm ln;
  Head head;
};
TORCH_MODULE(GPT);

}  // namespace example
