"""Models that the transforms are tried on: name -> function that makes (model, args, kwargs); runs of them."""

import copy
import io

import torch
import torch.nn.functional as F
import zoo
from torch import nn
from torch.utils import _pytree as pytree

import plumb


class ConvNet1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(8, 8, 3, stride=2),
            nn.BatchNorm1d(8),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).mean(-1))


class CellLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.left(x) + self.right(torch.tanh(x))


class BatchedMatmuls(nn.Module):
    """Attention written out."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).transpose(-1, -2) / 8**0.5).softmax(-1)
        return x + torch.bmm(weights, self.v(x))


MODELS = {
    **{k: v for k, v in zoo.MODELS.items() if k != "keywords"},
    "ConvNet 1d": lambda: (ConvNet1d(), (zoo.r(4, 3, 16),), {}),
    "LSTMCell": lambda: (CellLoop(), (zoo.r(2, 5, 6),), {}),
    "two-branch add": lambda: (TwoBranches(), (zoo.r(4, 8),), {}),
    "matmul and bmm": lambda: (BatchedMatmuls(), (zoo.r(2, 5, 8),), {}),
    "root Linear": lambda: (nn.Linear(8, 8), (zoo.r(4, 8),), {}),
    "root Sequential": lambda: (nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), (zoo.r(4, 8),), {}),
    **{f"{k} of transformers": v for k, v in zoo.TRANSFORMERS.items()},
}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, flag=True):
        h = x + self.down(F.gelu(self.up(self.norm(x))))
        return {"h": h, "both": (h.sum(), None)} if flag else h


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def tensors(out):
    return [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def run(model, args, kwargs):
    out = tensors(model(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    loss = sum(t.float().square().mean() for t in out)
    if loss.requires_grad:
        loss.backward()
    assert all(torch.isfinite(t).all() for t in out)
    return out


def first_tensor(out):
    if isinstance(out, torch.Tensor):
        return out
    return out["logits"] if hasattr(out, "keys") else out[0]


def loss_of(out):
    if hasattr(out, "keys"):
        return out["loss"]
    return out[1] if isinstance(out, tuple) and out[1].dim() == 0 else first_tensor(out).float().square().mean()


def trained(model, args, kwargs, steps=4):
    """Returns the model, unit-scaled and trained: no weight has unit variance any more, no bias is zero."""
    scaled = plumb.transforms.unit_scale(model)
    optimizer = plumb.optim.AdamW(scaled.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(scaled(*args, **kwargs)).backward()
        optimizer.step()
    return scaled


def rounded(module):
    return plumb.transforms.simulate_format(module, "E4M3-RN", "E5M2-RN")


def saved(module):
    """Returns the module as torch.save keeps it."""
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


FOLDED = [
    "GPT", "GPT tied", "GPT with dropout", "TransformerEncoderLayer", "TransformerEncoderLayer eval", "ViT",
    "ConvNet training", "ConvNet eval", "ConvNet 1d", "U-net", "LSTM", "GRU", "LSTMCell", "Llama", "root Linear",
    "root Sequential", "two-branch add", "GPT-2 of transformers", "Llama of transformers", "BERT of transformers",
    "group and instance norm",
]  # fmt: skip
