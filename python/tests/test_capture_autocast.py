"""Captures under autocast: what a model does without autocast it may do there."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plumb
from plumb.transforms import track_scales


@pytest.fixture(autouse=True)
def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


class Residual(nn.Module):
    """A Llama block: x + f(norm(x))."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class OneHot(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(F.one_hot(x.argmax(-1), 8).float()) + self.linear(x)


class Distribution(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x).float()
        return torch.distributions.Normal(y, y.exp()).log_prob(x)


class Asserts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if not (x > -1000).all():  # an assertion, which pytest rewrites
            raise AssertionError("too small")
        y = self.linear(x)
        if torch.isnan(y).any():
            raise ValueError("not a number")
        return y


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if x.sum() > 0:
            y = y * 2
        if x[0, 0].item() > 0:
            y = y + 1
        return y


def same_under_autocast(ours, theirs, x):
    y, z = ours(x), theirs(x)
    assert y.dtype == z.dtype and torch.equal(y, z)
    y.float().sum().backward()
    z.float().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("make", [Residual, OneHot, Distribution, Asserts])
def test_is_captured_as_without_autocast(make):
    model, x = make(), torch.randn(4, 8)
    same_under_autocast(plumb.capture(model, x), copy.deepcopy(model), x)


@pytest.mark.parametrize("make", [Residual, OneHot, Distribution, Asserts, Branches])
def test_is_tracked_as_without_autocast(make):
    model, x = make(), torch.randn(4, 8)
    tracked, eager = track_scales(model), copy.deepcopy(model)
    for given in (x, -x, x * 2):
        same_under_autocast(tracked, eager, given)


def test_a_stack_of_residual_norms_is_captured():
    model, x = nn.Sequential(*[Residual() for _ in range(3)]), torch.randn(4, 8)
    same_under_autocast(plumb.capture(model, x, plumb_verify=True), copy.deepcopy(model), x)


def test_each_call_in_one_region_casts_the_weights():
    torch.manual_seed(0)
    net, inputs = nn.Linear(8, 8), [torch.randn(6, 8), torch.randn(6, 8)]

    def gradient(module):
        module.zero_grad()
        sum(module(x).square().mean() for x in inputs).backward()
        return module.weight.grad

    found = gradient(track_scales(net))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert torch.equal(gradient(net), found)
