"""Models that everything is tried on: name -> function that makes (model, args, kwargs)."""

import pathlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Block  # noqa: E402


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = RMSNorm(d), RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def rope(self, x):
        t, d = x.shape[-2], x.shape[-1]
        inv = 10000.0 ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
        f = torch.outer(torch.arange(t, device=x.device, dtype=torch.float32), inv)
        e = torch.cat([f, f], -1)
        a, b = x.chunk(2, -1)
        return x * e.cos() + torch.cat([-b, a], -1) * e.sin()

    def forward(self, x):
        b, t, d = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, t, self.h, d // self.h).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocab, d, layers, h, ff):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(LlamaBlock(d, h, ff) for _ in range(layers))
        self.norm, self.head = RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def llama_on_meta():
    with torch.device("meta"):
        return Llama(32000, 4096, 32, 32, 11008)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        self.pos = nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        self.block, self.head = Block(16, 4), nn.Linear(16, 10)

    def forward(self, image):
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.block(x)[:, 0])


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        c = lambda i, o: nn.Conv2d(i, o, 3, padding=1)  # noqa: E731
        self.d1, self.d2, self.mid, self.u1, self.u2 = c(2, 4), c(4, 8), c(8, 8), c(16, 4), c(8, 2)

    def forward(self, x):
        a = F.relu(self.d1(x))
        b = F.relu(self.d2(F.max_pool2d(a, 2)))
        m = F.relu(self.mid(F.max_pool2d(b, 2)))
        y = F.relu(self.u1(torch.cat([F.interpolate(m, scale_factor=2), b], 1)))
        return self.u2(torch.cat([F.interpolate(y, scale_factor=2), a], 1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(6, 8, num_layers=2, batch_first=True, dropout=0.3, bidirectional=True)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        return {"y": sum(gates[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)), "gates": gates}


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.seen += 1
        y = self.fc(x)
        y += x
        y *= 0.5
        y[:, 0] += 1
        y[:, 2:4] *= 2
        y[1] = 0.5
        y[y > 2] = 1.0
        z = torch.zeros_like(y)
        z[:, :3] = y[:, 3:]
        return y.relu_(), z


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x, *, mask=None, scale=2.0, extra=None):
        y = self.fc(x) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        if extra is not None:
            y = y + extra["a"] + extra["b"][0]
        return (y, {"mean": y.mean(), "rest": [y.sum(), None, 3]})


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x, y):
        return self.fc(torch.tanh(self.fc(x))), self.fc(y)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(self.norm(F.gelu(self.a(x))))
            return torch.einsum("bi,bj->bij", y, y).float(), y


def ids(*shape):
    return torch.randint(50, shape)


def r(*shape):
    return torch.randn(*shape)


def eval_(m):
    return m.eval()


MODELS = {
    "GPT": lambda: (GPT(), (ids(2, 8),), {}),
    "GPT tied": lambda: (GPT(tied=True), (ids(2, 8), ids(2, 8)), {}),
    "GPT with dropout": lambda: (GPT(dropout=0.2), (ids(2, 8),), {"targets": ids(2, 8)}),
    "TransformerEncoderLayer": lambda: (nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True), (r(2, 5, 16),), {}),
    "TransformerEncoderLayer eval": lambda: (eval_(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)), (r(2, 5, 16),), {}),
    "TransformerDecoderLayer": lambda: (nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), (r(2, 5, 16), r(2, 7, 16)), {}),
    "Transformer": lambda: (nn.Transformer(16, 4, 1, 1, 32), (r(6, 2, 16), r(5, 2, 16)), {}),
    "MultiheadAttention": lambda: (nn.MultiheadAttention(16, 4), (r(5, 2, 16), r(7, 2, 16), r(7, 2, 16)), {}),
    "Llama": lambda: (Llama(50, 16, 2, 4, 32), (ids(2, 8),), {}),
    "ViT": lambda: (ViT(), (r(2, 3, 16, 16),), {}),
    "ConvNet training": lambda: (convnet(), (r(2, 3, 12, 12),), {}),
    "ConvNet eval": lambda: (eval_(convnet()), (r(2, 3, 12, 12),), {}),
    "U-net": lambda: (UNet(), (r(2, 2, 8, 8),), {}),
    "LSTM": lambda: (Recurrent(nn.LSTM), (r(2, 5, 6),), {}),
    "GRU": lambda: (Recurrent(nn.GRU), (r(2, 5, 6),), {}),
    "MoE": lambda: (MoE(), (r(3, 8),), {}),
    "in place": lambda: (InPlace(), (r(3, 6),), {}),
    "keywords": lambda: (Keywords(), (r(3, 5),), {"mask": r(3, 5) > 1, "extra": {"a": r(5), "b": [r(3, 5)]}}),
    "shared": lambda: (Shared(), (r(3, 5), r(2, 5)), {}),
    "autocast": lambda: (Autocast(), (r(3, 8),), {}),
    "bf16": lambda: (GPT().to(torch.bfloat16), (ids(2, 8),), {}),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), (r(3, 5),), {}),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), (r(3, 5),), {}),
    "group and instance norm": lambda: (
        nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)),
        (r(2, 4, 9),), {},
    ),
}


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    cfg = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32, use_cache=False)
    return GPT2LMHeadModel(cfg), (), {"input_ids": ids(2, 8), "labels": ids(2, 8)}


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=32, vocab_size=50,
        use_cache=False,
    )
    return LlamaForCausalLM(cfg), (), {"input_ids": ids(2, 8), "labels": ids(2, 8)}


def _bert():
    from transformers import BertConfig, BertForMaskedLM

    cfg = BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=50, max_position_embeddings=32
    )
    mask = torch.ones(2, 8, dtype=torch.long)
    return BertForMaskedLM(cfg), (), {"input_ids": ids(2, 8), "attention_mask": mask, "labels": ids(2, 8)}


TRANSFORMERS = {"GPT-2": _gpt2, "Llama": _llama, "BERT": _bert}

# Models that torch itself does not export with transformers 4, and why.
NOT_EXPORTED = dict.fromkeys(
    ["transformers GPT-2", "transformers Llama"], "the mask it makes by vmap is no operator (flat_apply)"
)
