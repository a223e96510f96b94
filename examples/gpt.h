// A byte-level GPT as a C++ user writes it: nothing in it knows of plumb.
#pragma once

#include <torch/torch.h>

#include <tuple>

namespace example {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

struct BlockImpl : nn::Module {
  BlockImpl(int64_t width, int64_t heads)
      : heads(heads),
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
    x = x + proj(a.transpose(1, 2).reshape({b, t, d}));
    return x + down(F::gelu(up(ln2(x))));
  }

  int64_t heads;
  nn::LayerNorm ln1, ln2;
  nn::Linear qkv, proj, up, down;
};
TORCH_MODULE(Block);

struct GPTOptions {
  int64_t vocabulary = 256, width = 128, layers = 2, heads = 4, context = 64;
};

// Takes ids and targets (batch, time), int64; returns the mean cross entropy in nats a token.
struct GPTImpl : nn::Module {
  explicit GPTImpl(const GPTOptions& o)
      : tok(o.vocabulary, o.width),
        pos(o.context, o.width),
        ln(nn::LayerNormOptions({o.width})),
        head(nn::LinearOptions(o.width, o.vocabulary).bias(false)) {
    register_module("tok", tok);
    register_module("pos", pos);
    register_module("blocks", blocks);
    for (int64_t i = 0; i < o.layers; ++i) blocks->push_back(Block(o.width, o.heads));
    register_module("ln", ln);
    register_module("head", head);
  }

  at::Tensor forward(at::Tensor ids, at::Tensor targets) {
    auto x = tok(ids) + pos(at::arange(ids.size(1), at::kLong));
    for (auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    auto logits = head(ln(x));
    return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
  }

  nn::Embedding tok, pos;
  nn::ModuleList blocks;
  nn::LayerNorm ln;
  nn::Linear head;
};
TORCH_MODULE(GPT);

}  // namespace example
