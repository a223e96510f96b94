"""Shared by the tests of what forwards read: a module of a function, a check that a change is followed, and values that functions read."""

import pytest
import torch
from torch import nn

import plumb
from plumb.transforms import track_scales

X = torch.linspace(-2, 2, 24).view(3, 8)


class Reads(nn.Module):
    """A linear layer, then a function of the module and its result."""

    def __init__(self, read, **attributes):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.read = nn.Linear(8, 8), read
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x, *args):
        return self.read(self, self.linear(x), *args)


def follows(make, change, *inputs):
    """Holds a transformed module and a captured one against the module before and after the change."""
    model, original = make(), make()
    tracked, graph = track_scales(make()), plumb.capture(original, X, *inputs)
    before = model(X, *inputs)
    assert torch.equal(tracked(X, *inputs), before) and torch.equal(graph(X, *inputs), before)
    for m in (model, tracked, original):
        change(m)
    after = model(X, *inputs)
    assert after.shape != before.shape or not torch.equal(after, before)
    assert torch.equal(tracked(X, *inputs), after)
    with pytest.raises(plumb.Error, match="which the forward had read, has changed since"):
        graph(X, *inputs)


class Settings:
    scale = 2.0

    @classmethod
    def of_class(cls):
        return cls.scale


class Inner(Settings):
    pass


class Holder:
    def __init__(self):
        self.reset()

    def reset(self):
        self.scale, self.inner = 2.0, Inner()

    def scaled(self, x):
        return x * self.scale

    def deep(self, x):
        return x * self.inner.scale


SCALE = 2.0
HOLDER = Holder()
BY_NAME = {"one": [Holder()]}


def scaled(x):
    return x * SCALE


def reset():
    globals()["SCALE"] = Settings.scale = 2.0
    HOLDER.reset()
    BY_NAME["one"][0].reset()
