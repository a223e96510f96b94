"""Exported programs for the tests, and Python's word on what they and those that plumb wrote compute.

make_programs.py make FOLDER    writes NAME.pt2 and NAME.expect.pt for every model below
make_programs.py check FOLDER   runs every NAME.back.pt2 and compares it with NAME.expect.pt, bit for bit
"""

import logging
import math
import pathlib
import sys
import warnings

import run_programs
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

sys.path.append(str(pathlib.Path(__file__).resolve().parents[3] / "examples"))
from gpt import GPT, Block  # noqa: E402

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)

PROGRAMS = {}


def program(**options):
    """Registers a function that gives (module, args, kwargs)."""

    def register(function):
        PROGRAMS[function.__name__] = (function, options)
        return function

    return register


# --- models ---------------------------------------------------------------------------------------------------------


SMALL = dict(vocab=40, d=32, context=16)


def gpt_inputs():
    return (torch.randint(40, (2, 8)), torch.randint(40, (2, 8)))


@program()
def linear():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (torch.randn(4, 6),), {}


@program()
def gpt():
    return GPT(**SMALL), gpt_inputs(), {}


@program()
def gpt_tied():
    return GPT(tied=True, **SMALL), gpt_inputs(), {}


@program()
def gpt_dropout():
    return GPT(dropout=0.3, **SMALL), gpt_inputs(), {}


@program(dynamic=({0: Dim("batch", min=1, max=64), 1: Dim("time", min=2, max=16)},) * 2, other=lambda: (torch.randint(40, (3, 5)), torch.randint(40, (3, 5))))
def gpt_dynamic():
    return GPT(tied=True, **SMALL), gpt_inputs(), {}


@program()
def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (torch.randn(2, 5, 16, requires_grad=True),), {}


@program()
def attention():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, x, mask):
            return self.mha(x, x, x, attn_mask=mask)

    return Model(), (torch.randn(2, 4, 12), torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)), {}


@program()
def llama():
    class Llama(nn.Module):
        def __init__(self, width=16, heads=4, kv=2):
            super().__init__()
            self.heads, self.kv, self.size = heads, kv, width // heads
            self.norm = nn.RMSNorm(width)
            self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
            self.k, self.v = (nn.Linear(width, kv * self.size, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(width, 40, bias=False) for _ in range(2))
            self.down = nn.Linear(40, width, bias=False)
            angles = torch.outer(torch.arange(16.0), 1 / 10000 ** (torch.arange(0, self.size, 2) / self.size))
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def rope(self, x):
            a, b = x[..., ::2], x[..., 1::2]
            cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

        def forward(self, x):
            b, t, c = x.shape
            h = self.norm(x)
            q = self.rope(self.q(h).view(b, t, self.heads, -1).transpose(1, 2))
            k = self.rope(self.k(h).view(b, t, self.kv, -1).transpose(1, 2))
            v = self.v(h).view(b, t, self.kv, -1).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    return Llama(), (torch.randn(2, 6, 16),), {}


@program()
def vit():
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 4, 4)
            self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
            self.block, self.head = Block(16, 2, 0.0), nn.Linear(16, 10)

        def forward(self, image):
            x = self.patch(image).flatten(2).mT
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
            return self.head(self.block(x)[:, 0])

    return ViT(), (torch.randn(2, 3, 16, 16),), {}


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, bias=False),
        nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


@program()
def convnet_train():
    return convnet(), (torch.randn(4, 3, 8, 8),), {}


@program()
def convnet_eval():
    return convnet().eval(), (torch.randn(4, 3, 8, 8),), {}


# torch's functional batch norm keeps its running mean for the backward pass, and the program then writes to it: torch
# cannot differentiate it. plumb can: python/tests/test_exported.py holds the gradients against the model.
@program(decompose=True, gradients=False)
def convnet_functional():
    return convnet(), (torch.randn(4, 3, 8, 8),), {}


@program()
def channels_last():
    return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last),), {}


@program()
def unet():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
            self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = F.relu(self.down[0](x))
            b = F.relu(self.down[1](F.avg_pool2d(a, 2)))
            return self.out(torch.cat([a, self.up(b)], 1)), F.interpolate(b, scale_factor=2.0)

    return UNet(), (torch.randn(1, 1, 8, 8),), {}


@program()
def recurrent():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.gru = nn.LSTM(3, 4, 2, bidirectional=True), nn.GRU(8, 5)

        def forward(self, inputs):
            out, (h, c) = self.lstm(inputs["x"])
            g, _ = self.gru(out)
            _, last = torch.split(g, [2, 3], -1)
            first, *_ = torch.unbind(out, 0)
            return {"out": [g, h], "rest": (c[:1], last, first)}

    return Model(), ({"x": torch.randn(5, 2, 3), "unused": torch.randn(2)},), {}


@program()
def experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            weights = self.router(x).softmax(-1)
            return {"y": sum(w.unsqueeze(-1) * e(x) for w, e in zip(weights.unbind(-1), self.experts)), "weights": weights}

    return Experts(), (torch.randn(5, 6),), {}


@program()
def in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.calls += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            y = self.fc(x)
            y[:, 0] += 1
            y[:, 2:4] *= 2
            y[1] = 0.5
            y[y > 1] = 0
            return y + self.mean

    return Model(), (torch.randn(3, 4),), {}


@program(decompose=True)
def input_mutation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.ones(3))

        def forward(self, x, y):
            x.add_(y)
            self.state.mul_(2)
            return x * self.state, self.state

    return Model(), (torch.randn(2, 3), torch.randn(2, 3)), {}


@program()
def modes():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                a = self.fc(x)
                with torch.enable_grad():
                    b = self.fc(a) * 2
                c = a + 1
            first, second = self.fc(x).chunk(2, 0)
            with torch.no_grad():
                d = torch.split(x, 1, 0)[1] + second
            return first + c[:1] + d, b, c

    return Model(), (torch.randn(2, 3),), {}


@program()
def autocast():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.a(x)
                y = self.norm(F.gelu(self.b(y)))
                z = torch.cat([y, x], -1)
                s = torch.baddbmm(x[None], y[None], y.mT[None].expand(1, 6, 4)[:, :, :6].repeat(1, 1, 2)[:, :, :6]) if x.shape[0] == 4 else y
                with torch.autocast("cpu", enabled=False):
                    w = self.a(x)
                p = F.scaled_dot_product_attention(y[None], y[None], w[None])
            return self.a(x) + w, y, z, s, p

    return Model(), (torch.randn(4, 6),), {}


@program()
def bfloat16():
    return GPT(tied=True, **SMALL).bfloat16(), gpt_inputs(), {}


@program()
def values():
    """Scalars, None, keyword and nested inputs, constants, and every kind of output."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.table = torch.arange(4.0)

        def forward(self, x, count: int, parts, *, scale=2.0, mask=None, name="a", flag=False):
            y = self.fc(x) * scale + self.table + torch.tensor([1.0, 2, 3, 4]) + parts["a"][0] * count
            y[:, [0, 2]] += 1
            z = torch.where(y > 0, y, 0.0).clamp(max=3)
            return {"y": y, "none": None, "count": count, "pair": (z, [parts["b"]]), "same": x, "text": F.one_hot(torch.arange(3), 4)}

    parts = {"b": torch.ones(2), "a": [torch.randn(4), None]}
    return Model(), (torch.randn(2, 3), 3, parts), {"scale": 3.0, "name": "b", "flag": True}


@program()
def twice():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.shared(self.frozen(self.shared(x)).tanh()).double().to(torch.float16).to("cpu", torch.float32)

    return Model(), (torch.randn(3, 4),), {}


@program(dynamic={"x": {0: Dim.AUTO, 1: Dim.AUTO}, "y": {0: Dim.AUTO}}, other=lambda: (torch.randn(5, 9, 3), torch.randn(7)))
def sizes():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, y):
            b, t, _ = x.shape
            flat = self.fc(x).view(b * t, -1)
            out = [flat, torch.arange(t), x.sum() / (b + 1), y[: t // 2], torch.cat([x[:, :1], x], 1), x.new_zeros(t, t + b)]
            return (*out, F.pad(x, (0, 0, t % 3, 0)), x * b**0.5, b * t, (-t + 2 * b - 1), x.mean() * t)

    return Model(), (torch.randn(4, 6, 3), torch.randn(6)), {}


@program(dynamic=({0: Dim("n", min=2)}, {0: 2 * Dim("n", min=2)}), other=lambda: (torch.randn(4, 2), torch.randn(8, 2)))
def derived_sizes():
    class Model(nn.Module):
        def forward(self, x, y):
            return torch.cat([x, x]) + y, x.max(0).values

    return Model(), (torch.randn(3, 2), torch.randn(6, 2)), {}


@program(other=lambda: (torch.randn(20), torch.tensor(7)))
def item():
    class Model(nn.Module):
        def forward(self, x, n):
            k = n.item()
            torch._check(k >= 2)
            torch._check(k < 10)
            return x[:k].sum(), torch.nonzero(x > 0), torch.zeros(k)

    return Model(), (torch.randn(20), torch.tensor(5)), {}


@program()
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)).eval()
    return Logits(model), (torch.randint(50, (2, 7)),), {}


@program()
def llama_hf():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=32, use_cache=False)  # fmt: skip
    return Logits(LlamaForCausalLM(config).eval()), (torch.randint(50, (2, 7)),), {}


@program()
def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16)
    return Logits(BertForMaskedLM(config).eval(), causal=False), (torch.randint(50, (2, 7)),), {}


class Logits(nn.Module):
    def __init__(self, model, causal=True):
        super().__init__()
        self.model, self.causal = model, causal

    def forward(self, tokens):
        if not self.causal:
            return self.model(input_ids=tokens).logits
        # The mask that transformers would make itself, by vmap, which torch cannot put in a file.
        b, t = tokens.shape
        mask = torch.full((t, t), -math.inf).triu(1)[None, None].expand(b, 1, t, t)
        return self.model(input_ids=tokens, attention_mask=mask).logits


if __name__ == "__main__":
    command, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    sys.exit(run_programs.make(PROGRAMS, folder) or 0 if command == "make" else run_programs.check(PROGRAMS, folder))
