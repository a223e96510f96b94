"""Results of unit-scaled operators are laid out as those of the operators that they replace: a view behind them, or
as_strided, goes on to work."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plumb


def laid_out(layout, *sizes):
    x = torch.randn(sizes)
    if layout == "contiguous":
        return x
    if layout == "transposed":
        return torch.randn(sizes[0], *reversed(sizes[1:])).transpose(1, -1)
    if layout == "heads":  # as attention has them: (batch, heads, length, size) in memory (batch, length, heads, size)
        return torch.randn(sizes[0], sizes[2], sizes[1], *sizes[3:]).transpose(1, 2)
    if layout == "channels last":
        return x.to(memory_format=torch.channels_last)
    if layout == "every second":
        return torch.randn(*sizes[:-1], 2 * sizes[-1])[..., ::2]
    return torch.randn(sizes[0], 1, *sizes[2:]).expand(sizes)  # "expanded"


LAYOUTS = ["contiguous", "transposed", "heads", "channels last", "every second", "expanded"]
P = torch.ops.plumb
w3, w2 = torch.randn(6, 4, 3, 3), torch.randn(6, 8)
OPERATORS = {
    "gelu": (F.gelu, P.gelu),
    "silu": (F.silu, P.silu),
    "relu": (F.relu, P.relu),
    "tanh": (torch.tanh, P.tanh),
    "sigmoid": (torch.sigmoid, P.sigmoid),
    "softmax": (lambda x: F.softmax(x, -1), lambda x: P.softmax(x, -1)),
    "softmax over heads": (lambda x: F.softmax(x, 1), lambda x: P.softmax(x, 1)),
    "dropout": (lambda x: F.dropout(x, 0.5), lambda x: P.dropout(x, 0.5)),
    "dropout in evaluation": (lambda x: F.dropout(x, 0.5, False), lambda x: P.dropout(x, 0.5, False)),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), lambda x: P.layer_norm(x, (8,))),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), lambda x: P.rms_norm(x, (8,))),
    "weighted rms_norm": (
        lambda x: F.rms_norm(x, (8,), torch.ones(8)), lambda x: P.rms_norm(x, (8,), torch.ones(8))
    ),
    "group_norm": (lambda x: F.group_norm(x, 2), lambda x: P.group_norm(x, 2)),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, None, None, True),
        lambda x: P.batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    ),
    "linear": (lambda x: F.linear(x, w2), lambda x: P.linear(x, w2)),
    "linear with bias": (lambda x: F.linear(x, w2, torch.ones(6)), lambda x: P.linear(x, w2, torch.ones(6))),
    "matmul": (lambda x: x @ w2.t(), lambda x: P.matmul(x, w2.t())),
    "matmul of batches": (lambda x: x @ x.transpose(-1, -2), lambda x: P.matmul(x, x.transpose(-1, -2))),
    "conv2d": (lambda x: F.conv2d(x, w3, padding=1), lambda x: P.conv2d(x, w3, padding=[1])),
    "conv_transpose2d": (
        lambda x: F.conv_transpose2d(x, w3.transpose(0, 1)), lambda x: P.conv_transpose2d(x, w3.transpose(0, 1))
    ),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), lambda x: P.avg_pool2d(x, [2])),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), lambda x: P.max_pool2d(x, [2])),
    "add": (lambda x: x + torch.ones(2, 4, 6, 8), lambda x: P.add(x, torch.ones(2, 4, 6, 8))),
    "add of its transpose": (lambda x: torch.ones(2, 4, 6, 8) + x, lambda x: P.add(torch.ones(2, 4, 6, 8), x)),
    "add of a row": (lambda x: x + torch.ones(8), lambda x: P.add(x, torch.ones(8))),
    "residual_add": (
        lambda x: torch.ones(2, 4, 6, 8) + x, lambda x: P.residual_add(torch.ones(2, 4, 6, 8), x, 0.5)
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x), lambda x: P.scaled_dot_product_attention(x, x, x)
    ),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: P.scaled_dot_product_attention(x, x, x, is_causal=True),
    ),
    "cross_entropy without a sum": (
        lambda x: F.cross_entropy(x, torch.zeros(2, 6, 8, dtype=torch.long), reduction="none"),
        lambda x: P.cross_entropy(x, torch.zeros(2, 6, 8, dtype=torch.long), None, 0),
    ),
    "mse_loss without a sum": (
        lambda x: F.mse_loss(x, torch.ones(2, 4, 6, 8), reduction="none"),
        lambda x: P.mse_loss(x, torch.ones(2, 4, 6, 8), 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_unit_scaled_result_has_the_strides_of_what_it_replaces(name, layout):
    torch.manual_seed(0)
    old, new = OPERATORS[name]
    for grad in (False, True):
        x = laid_out(layout, 2, 4, 6, 8).detach().requires_grad_(grad)
        want, got = old(x), new(x)
        assert got.shape == want.shape
        assert got.stride() == want.stride()


class SpelledOutNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class NormsOfHeads(nn.Module):
    """A norm of queries in the layout of heads, and a view of its result, as in Inkling of transformers."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16, bias=False)
        self.norm = SpelledOutNorm()

    def forward(self, x):
        q = self.norm(self.q(x).view(2, 5, 4, 4).transpose(1, 2))
        return q.transpose(1, 2).view(2, 5, 16)


class SpelledOutAttention(nn.Module):
    def forward(self, q):
        weights = torch.softmax(q @ q.transpose(-2, -1) * 0.5, -1)
        return (weights @ q).view(8, 5, 4)


def test_a_view_behind_a_spelled_out_norm_of_heads_goes_on_to_work():
    torch.manual_seed(0)
    model, x = NormsOfHeads(), torch.randn(2, 5, 16)
    scaled = plumb.transforms.unit_scale(model)
    assert scaled(x).shape == model(x).shape
    scaled(x).sum().backward()
    assert "rms_norm" in str(plumb.report(scaled))


def test_a_view_behind_a_spelled_out_attention_goes_on_to_work():
    model, x = SpelledOutAttention(), torch.randn(2, 4, 5, 4, requires_grad=True)
    scaled = plumb.transforms.unit_scale(model)
    assert scaled(x).shape == model(x).shape
    assert "scaled_dot_product_attention" in str(plumb.report(scaled))


class TransposedBranch(nn.Module):
    """Rows plus a branch in another layout, which are rows, and a view of them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        branch = self.fc(x).transpose(1, 2).contiguous().transpose(1, 2)
        return torch.nn.functional.silu(x + branch).view(-1, 8)


def test_a_view_behind_a_residual_add_of_two_layouts_goes_on_to_work():
    torch.manual_seed(0)
    model, x = TransposedBranch(), torch.randn(2, 5, 8, requires_grad=True)
    scaled = plumb.transforms.unit_scale(model)
    assert scaled(x).shape == model(x).shape
    scaled(x).sum().backward()
    assert "residual" in str(plumb.report(scaled))
