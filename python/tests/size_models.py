"""Models whose boundaries show, hide or mix batch and length, for tests of stages at other sizes."""

import torch
from plumb.pipelining import SplitPoint, pipeline
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH = 11, 8


class Block(nn.Module):
    """Attention over earlier places, with its mask made of the length."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        length = h.shape[1]
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        mask = torch.full((length, length), float("-inf")).triu(1)
        return h + F.gelu(self.out(torch.softmax(q @ k.transpose(1, 2) / length**0.5 + mask, -1) @ v))


class Tokens(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


class Flat(Tokens):
    """A boundary that does not tell batch from length."""

    def forward(self, x):
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h.reshape(x.shape[0], x.shape[1], WIDTH)).flatten(0, 1)
        return self.head(h).view(*x.shape, WORDS)


class Rest(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return torch.tanh(self.linear(h))


class Pooled(Tokens):
    """A boundary that does not show the length, which is used after it."""

    def __init__(self, layers):
        super().__init__(layers)
        self.layers = nn.ModuleList(Rest() for _ in range(layers))

    def forward(self, x):
        h = self.embed(x).sum(1)
        for layer in self.layers:
            h = layer(h) / x.shape[1]
        return self.head(h)[:, None].expand(-1, x.shape[1], -1)


MODELS = {"tokens": Tokens, "flat": Flat, "pooled": Pooled}


def make(name, layers):
    torch.manual_seed(0)
    return MODELS[name](layers)


def batch(rows, length, seed=3):
    generator = torch.Generator().manual_seed(seed + 100 * rows + length)
    return tuple(torch.randint(0, WORDS, (rows, length), generator=generator) for _ in range(2))


def cut(model, count, **options):
    layers = len(model.layers)
    points = {f"layers.{i * layers // count}": SplitPoint.BEGINNING for i in range(1, count)}
    return pipeline(model, (batch(2, 5)[0],), split_spec=points, **options)
