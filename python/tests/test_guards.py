"""Everything that a forward reads besides its inputs is followed: attributes, settings, hooks, forwards, globals."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from torch import nn

from plumb.transforms import track_scales, unit_scale

FACTOR = 2.0


def helper(x):
    return x * FACTOR


class Config:
    def __init__(self):
        self.scale, self.layers, self.unread = 2.0, 2, 0


class Model(nn.Module):
    """Reads something of every kind."""

    class_factor = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0)
        self.factor, self.flag, self.sizes, self.table = 1.5, True, [1, 2], {"a": 1.0}
        self.config, self.count, self.kept = Config(), 2, torch.ones(8)
        self.namespace = types.SimpleNamespace(shift=0.5)
        self.optional = None
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


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [True, False])
def test_a_transformed_module_follows(change, grad, model):
    tracked = track_scales(model)
    with torch.set_grad_enabled(grad):
        assert torch.equal(tracked(X), model(X))
        before = model(X)
        for m in (model, tracked):
            CHANGES[change](m)
        assert not torch.equal(before, model(like(model)))
        assert torch.equal(tracked(like(model)), model(like(model)))


def test_a_change_that_is_taken_back_uses_the_first_graph_again(model):
    tracked = track_scales(model)
    forward = tracked.__dict__["forward"]
    tracked(X)
    first = forward.last
    tracked.factor = 3.0
    tracked(X)
    assert forward.last is not first
    tracked.factor = 1.5
    tracked(X)
    assert forward.last is first


def test_what_the_forward_does_not_read_or_only_counts_takes_no_capture(model):
    tracked = track_scales(model)
    tracked(X)
    first = tracked.__dict__["forward"].last
    for step in range(3):
        tracked.epoch = tracked.config.unread = step
        tracked.calls = 10 * step
        tracked.factor = float("1.5")  # another object of the same value
        tracked.sizes = [1, 2]
        tracked(X)
    assert tracked.__dict__["forward"].last is first


def test_a_part_that_was_transformed_by_itself_tells_the_whole(model):
    whole = nn.Sequential(nn.Linear(8, 8), track_scales(model))
    tracked = track_scales(whole)
    assert torch.equal(tracked(X), whole(X))
    for m in (whole, tracked):
        m[1].factor = 9.0
    assert torch.equal(tracked(X), whole(X))


def test_copies_and_pickles_follow_their_own_attributes():
    tracked = track_scales(Model())
    tracked(X)
    for other in (copy.deepcopy(tracked), pickle.loads(pickle.dumps(tracked))):
        before = other(X)
        assert torch.equal(before, tracked(X))
        other.flag = False
        assert not torch.equal(other(X), before)
        assert torch.equal(tracked(X), before)


def test_a_transformed_module_that_was_called_is_freed(model):
    tracked = unit_scale(model)
    tracked(X)
    gone = weakref.ref(tracked)
    del tracked
    gc.collect()
    assert gone() is None


def test_attributes_that_keep_changing_are_named_once(model, caplog):
    tracked = track_scales(model)
    for n in range(20):
        model.factor = tracked.factor = float(n)
        assert torch.equal(tracked(X), model(X))
    assert [r.getMessage() for r in caplog.records if "keeps changing" in r.getMessage()] == [
        "the forward reads 'factor', which keeps changing: each of its values takes a capture"
    ]
