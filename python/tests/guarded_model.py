"""Shared by the tests of guards: a model that reads something of every kind, and changes of what it reads."""

import types

import numpy as np
import pytest
import torch
from torch import nn

FACTOR = 2.0


def helper(x):
    return x * FACTOR


class Config:
    def __init__(self):
        self.scale, self.layers, self.unread = 2.0, 2, 0


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Model(nn.Module):
    """Reads something of every kind."""

    class_factor = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0)
        self.factor, self.flag, self.sizes, self.table = 1.5, True, [1, 2], {"a": 1.0}
        self.config, self.count, self.kept = Config(), 2, torch.ones(8)
        self.namespace = types.SimpleNamespace(shift=0.5)
        self.optional, self.array, self.arrays = None, np.ones(8, np.float32), [np.ones((2, 8), np.float32).T]
        self.calls = self.epoch = 0

    def shifted(self, x):
        return x + self.namespace.shift

    def forward(self, x):
        self.calls += 1
        for _ in range(self.count):
            x = self.linear(x)
        if self.flag:
            x = x + 1
        if self.optional is not None:
            x = x * self.optional
        if getattr(self, "extra", False):
            x = x - 3
        x = self.dropout(self.norm(x)) * self.factor * self.config.scale * self.class_factor
        x = x * torch.tensor(self.array) + torch.tensor(self.arrays[0][:, 0])
        return helper(self.shifted(x)) * self.sizes[1] * self.table["a"] * self.kept


def set_global(model):
    globals()["FACTOR"] = 3.0


def hook(module, args, out):
    return out + 1


CHANGES = {
    "a_number": lambda m: setattr(m, "factor", 7.0),
    "a_flag": lambda m: setattr(m, "flag", False),
    "a_list_in_place": lambda m: m.sizes.append(3) or m.sizes.__setitem__(1, 5),
    "a_list": lambda m: setattr(m, "sizes", [4, 9]),
    "a_dict_in_place": lambda m: m.table.update(a=4.0),
    "an_array_in_place": lambda m: m.array.fill(3.0),
    "an_array_in_a_list_in_place": lambda m: m.arrays[0].__setitem__((2, 0), 3.0),
    "a_setting_of_an_object": lambda m: setattr(m.config, "scale", 5.0),
    "another_object": lambda m: setattr(m, "config", type("Other", (), {"scale": 0.25})()),
    "a_namespace": lambda m: setattr(m.namespace, "shift", 2.0),
    "the_probability_of_dropout": lambda m: setattr(m.dropout, "p", 1.0),
    "the_epsilon_of_a_norm": lambda m: setattr(m.norm, "eps", 10.0),
    "a_count_of_layers": lambda m: setattr(m, "count", 3),
    "a_global": set_global,
    "a_tensor_that_is_replaced": lambda m: setattr(m, "kept", torch.full((8,), 2.0)),
    "a_hook_that_is_registered_later": lambda m: m.linear.register_forward_hook(hook),
    "a_pre_hook": lambda m: m.norm.register_forward_pre_hook(lambda mod, args: (args[0] * 3 + 1,)),
    "a_forward_of_a_part": lambda m: setattr(m.linear, "forward", lambda x: x - 1),
    "a_forward_of_the_class": lambda m: setattr(type(m), "shifted", lambda self, x: x - 5),
    "an_attribute_that_was_not_there": lambda m: setattr(m, "extra", True),
    "something_in_place_of_none": lambda m: setattr(m, "optional", 4.0),
    "an_attribute_of_the_class": lambda m: setattr(type(m), "class_factor", 3.0),
    "another_module": lambda m: setattr(m, "linear", nn.Identity()),
    "another_class_of_a_part": lambda m: setattr(m.linear, "__class__", Doubled),
    "another_parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.full((8, 8), 0.1))),
    "no_bias": lambda m: setattr(m.linear, "bias", None),
    "another_dtype": lambda m: m.double(),
}


@pytest.fixture
def model():
    """Returns a module of a class of its own, so that changes of the class end with the test."""
    torch.manual_seed(0)
    globals()["FACTOR"] = 2.0
    yield type("Mine", (Model,), {"class_factor": 1.0, "shifted": Model.shifted})()
    globals()["FACTOR"] = 2.0


X = torch.linspace(-2, 2, 24).view(3, 8)


def like(model):
    return X.to(next(model.parameters()).dtype)
