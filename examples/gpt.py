"""A GPT as a PyTorch user writes it: nothing in it knows of plumb. Examples, tests and benchmarks use it; gpt.h is its C++."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Takes and returns (batch, time, d), with `h` heads; `dropout` is that of the attention and of both branches."""

    def __init__(self, d, h, dropout=0.0):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.h, d // self.h).transpose(1, 2) for z in self.qkv(self.ln1(x)).split(d, -1))
        dropped = self.drop.p if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    """Takes ids (batch, time) and returns logits (batch, time, vocab); with targets of the ids' shape also the mean cross
    entropy in nats a token. `std` is that of the embeddings at the start, torch's 1 if it is None."""

    def __init__(self, vocab=50, d=16, layers=2, h=4, context=32, tied=False, dropout=0.0, bias=False, std=None):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(context, d)
        if std is not None:
            nn.init.normal_(self.tok.weight, std=std)
            nn.init.normal_(self.pos.weight, std=std)
        self.blocks = nn.ModuleList(Block(d, h, dropout) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=bias)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids, targets=None):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
