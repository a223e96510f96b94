"""Reads of hooks, of modules that are no parts, of tensors and of inputs that are objects are followed; writes into inputs are refused."""

import random

import numpy as np
import pytest
import torch
from reads_helper import Reads, X, follows
from torch import nn

import plumb
from plumb.transforms import track_scales


class Hook:
    def __init__(self):
        self.scale = 2.0

    def __call__(self, module, args, out):
        return out * self.scale

    def method(self, module, args, out):
        return out * self.scale


@pytest.mark.parametrize("bound", [False, True])
def test_the_state_of_a_hook_is_followed(bound):
    def make():
        model = Reads(lambda m, x: x)
        model.hook = Hook()
        model.linear.register_forward_hook(model.hook.method if bound else model.hook)
        return model

    def change(model):
        (hook,) = model.linear._forward_hooks.values()
        setattr(hook.__self__ if bound else hook, "scale", 5.0)

    follows(make, change)


def test_hooks_on_the_gradients_of_all_modules_are_refused():
    tracked = track_scales(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    tracked(X)
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, gi, go: None)
    try:
        with pytest.raises(
            plumb.Error, match="backward hooks of all modules, which a graph would not call for module '0'"
        ):
            tracked(X)
    finally:
        handle.remove()
    tracked(X)


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.dropout, self.scale = nn.Linear(8, 8), nn.Dropout(1.0), 2.0

    def forward(self, x):
        return self.dropout(self.linear(x)) * self.scale


TEACHER = {
    "an_attribute": lambda t: setattr(t, "scale", 5.0),
    "the_mode": lambda t: t.eval(),
    "the_mode_of_a_part": lambda t: t.dropout.eval(),
    "a_parameter": lambda t: setattr(t.linear, "weight", nn.Parameter(torch.full((8, 8), 0.2))),
    "a_part": lambda t: setattr(t, "linear", nn.Identity()),
    "a_hook": lambda t: t.linear.register_forward_hook(lambda module, args, out: out * 3),
    "the_forward": lambda t: setattr(t, "forward", lambda x: x * 4),
}


@pytest.mark.parametrize("name", TEACHER)
def test_a_module_that_is_no_part_is_followed(name):
    start = (lambda t: t.eval()) if "mode" not in name else (lambda t: t)
    follows(
        lambda: Reads(lambda m, x: x + m.hidden[0](x), hidden=[start(Teacher())]), lambda m: TEACHER[name](m.hidden[0])
    )


def test_tied_weights_that_are_untied_take_a_capture():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        return model

    model, tracked = make(), track_scales(make())
    assert torch.equal(tracked(X), model(X))
    for m in (model, tracked):
        m.load_state_dict({k: v * (3 if k == "2.weight" else 1) for k, v in m.state_dict().items()}, assign=True)
        m(X).sum().backward()
    assert torch.equal(tracked(X), model(X))
    for p, q in zip(model.parameters(), tracked.parameters()):
        assert torch.equal(p.grad, q.grad)


def test_a_graph_names_a_buffer_of_the_original_that_was_replaced():
    model = Reads(lambda m, x: x * m.scale)
    model.register_buffer("scale", torch.tensor(2.0))
    graph = plumb.capture(model, X)
    model.scale.fill_(3.0)
    assert torch.equal(graph(X), model(X))
    model.scale = torch.tensor(5.0)
    with pytest.raises(plumb.Error, match="'scale', which the forward had read, has changed since"):
        graph(X)


class Options:
    def __init__(self):
        self.scale = 2.0

    def scaled(self, x):
        return x * self.scale


def test_an_object_that_is_an_input_is_followed():
    tracked, model = (make(Reads(lambda m, x, o, f: f(x) + o.scale)) for make in (track_scales, lambda m: m))
    options, other = Options(), Options()
    for scale in (2.0, 5.0, 2.0):
        options.scale = other.scale = scale
        for o in (options, other):
            assert torch.equal(tracked(X, o, other.scaled), model(X, o, other.scaled))


def appends(m, x, cache):
    cache.append(x.detach())
    return sum(cache)


def sets_a_key(m, x, cache):
    cache["x"] = x.detach()
    return x


def sets_an_attribute(m, x, options):
    options.scale = 7.0
    return x


@pytest.mark.parametrize(
    ("write", "given", "name"),
    [
        (appends, list, "argument 1"),
        (sets_a_key, dict, r"argument 1\['x'\]"),
        (sets_an_attribute, Options, "argument 1.scale"),
    ],
)
def test_a_forward_that_writes_into_its_input_is_refused(write, given, name):
    value = given()
    for use in (lambda m: plumb.capture(m, X, value), lambda m: track_scales(m)(X, value)):
        with pytest.raises(plumb.Error, match=rf"writes into its input \({name}\)"):
            use(Reads(write))
    assert not value if given is not Options else value.scale == 2.0


class Adds(nn.Module):
    def forward(self, a, b):
        return (a.add_(1) * 2 + b) if a is b else a - b


def test_inputs_that_are_one_tensor_are_one_to_the_forward():
    torch.manual_seed(0)
    attention, x, y = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    tracked = track_scales(attention)
    for given in ((x, x, x), (x, y, y), (x, y, x), (x, x, y), (x, x, x)):
        found = []
        for module in (attention, tracked):
            leaves = {id(t): t.clone().requires_grad_() for t in given}
            out, _ = module(*[leaves[id(t)] for t in given])
            out.square().sum().backward()
            found.append([out, *[t.grad for t in leaves.values()]])
        assert all(map(torch.equal, *found))
    adds, one = track_scales(Adds()), torch.ones(3)
    assert torch.equal(adds(one, one), torch.full((3,), 6.0)) and torch.equal(one, torch.full((3,), 2.0))
    assert torch.equal(adds(one, one.clone()), torch.zeros(3))


def test_an_iterator_is_refused_by_name():
    with pytest.raises(plumb.Error, match="reads the iterator 'kept'"):
        track_scales(Reads(lambda m, x: x * next(m.kept), kept=iter([1.0, 2.0, 3.0])))(X)


@pytest.mark.parametrize(
    "make", [lambda: random.Random(0), lambda: np.random.default_rng(0), lambda: np.random.RandomState(0)]
)
def test_draws_of_a_generator_of_its_own_are_told_and_undone(make):
    model = Reads(
        lambda m, x: x * float(m.kept.random() if isinstance(m.kept, random.Random) else m.kept.uniform()), kept=make()
    )
    with pytest.warns(UserWarning, match="draws from the 'kept' generator"):
        plumb.capture(model, X)
    assert torch.equal(model(X), Reads(model.read, kept=make())(X))


TENSORS = {
    "item": (lambda m, x: x * m.kept.item(), lambda: torch.tensor(2.0)),
    "a_branch": (lambda m, x: x * 2 if m.kept < 3 else x * 3, lambda: torch.tensor(2.0)),
    "a_list": (lambda m, x: x * m.kept.tolist()[0], lambda: torch.tensor([2.0])),
    "a_slice": (lambda m, x: x[:, : int(m.kept)], lambda: torch.tensor(2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_value_of_a_plain_tensor_that_was_taken_is_followed(name):
    read, kept = TENSORS[name]
    follows(lambda: Reads(read, kept=kept()), lambda m: m.kept.fill_(5))


def test_a_parameter_that_was_asked_for_its_gradient_is_followed():
    follows(
        lambda: Reads(lambda m, x: x * 2 if m.linear.weight.requires_grad else x * 3),
        lambda m: m.linear.weight.requires_grad_(False),
    )


def test_parameters_that_are_added_to_those_that_the_forward_goes_through_are_followed():
    follows(
        lambda: Reads(lambda m, x: x + sum(p.sum() for p in m.parameters())),
        lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(3))),
    )


def test_the_attributes_of_a_scripted_part_are_followed():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0

        def forward(self, x):
            return x * self.scale

    follows(lambda: nn.Sequential(torch.jit.script(Scales())), lambda m: setattr(m[0], "scale", 5.0))


def test_a_transformed_module_has_graphs_for_the_modes_of_a_scripted_part():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(1.0)

        def forward(self, x):
            return self.dropout(x)

    model, tracked = (make(nn.Sequential(torch.jit.script(Drops()))) for make in (lambda m: m, track_scales))
    for training in (True, False, True):
        for m in (model, tracked):
            m[0].train(training)
        assert torch.equal(tracked(X), model(X))
