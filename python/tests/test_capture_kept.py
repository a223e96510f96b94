"""Tensors that a forward keeps for its next call outside of buffers: in attributes, dicts, lists and objects."""

import collections
import copy

import numpy as np
import pytest
import torch
from plumb._transformed import forward_of
from torch import nn

import plumb
from plumb.transforms import track_scales


class Kept(nn.Module):
    """A linear layer, `state`, and a function of the module, the layer's result and the input."""

    def __init__(self, state, step):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.cell = nn.Linear(4, 4), nn.LSTMCell(4, 4)
        self.state, self.step = state, step

    def forward(self, x):
        return self.step(self, self.layer(x), x)


class Box:
    def __init__(self, mean=None):
        self.mean = mean


def zeros():
    return torch.zeros(4)


def moving(old, x):
    return old * 0.5 + x.mean(0).detach()


def in_a_dict(m, y, x):
    m.state["mean"] = moving(m.state["mean"], x)
    return y + m.state["mean"]


def in_a_nested_list(m, y, x):
    m.state["all"][1] = moving(m.state["all"][1], x)
    return y + m.state["all"][1]


def in_an_object(m, y, x):
    m.state.mean = moving(m.state.mean, x)
    return y + m.state.mean


def in_a_new_tuple(m, y, x):
    m.state = tuple(s.detach() for s in m.cell(y, m.state))
    return m.state[0] + y


def in_a_new_dict(m, y, x):
    m.state = {"mean": moving(m.state["mean"], x)}
    return y + m.state["mean"]


GOES_ON = {
    "dict": (lambda: {"mean": zeros()}, in_a_dict),
    "nested": (lambda: {"all": [1, zeros()]}, in_a_nested_list),
    "object": (lambda: Box(zeros()), in_an_object),
    "tuple": (lambda: (torch.zeros(3, 4), torch.zeros(3, 4)), in_a_new_tuple),
    "new dict": (lambda: {"mean": zeros()}, in_a_new_dict),
}


@pytest.mark.parametrize("transform", [lambda m, x: plumb.capture(m, x), lambda m, x: plumb.transforms.track_scales(m)])
@pytest.mark.parametrize("name", GOES_ON)
def test_state_in_containers_goes_on_from_call_to_call(name, transform):
    state, step = GOES_ON[name]
    model, twin = Kept(state(), step), Kept(state(), step)
    graph = transform(model, torch.randn(3, 4))
    kept = vars(model.state) if name == "object" else model.state
    assert not any(t.any() for t in torch.utils._pytree.tree_leaves(kept) if isinstance(t, torch.Tensor))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4)
        assert torch.equal(graph(x), twin(x))


def begins_without_a_tensor(m, y, x):
    m.state = y.detach() if m.state is None else m.state + y.detach()
    return m.state


def fills_a_dict(m, y, x):
    m.state["keys"] = torch.cat([m.state["keys"], y], 0) if "keys" in m.state else y
    return m.state["keys"].sum(0)


def fills_a_deque(m, y, x):
    m.state.append(y.detach())
    return sum(m.state)


def remembers_what_it_computed(m, y, x):
    if m.state is None:
        m.state = y
    return m.state + x


def fills_an_object(m, y, x):
    m.state.mean = x.mean(0) if m.state.mean is None else moving(m.state.mean, x)
    return y + m.state.mean


@pytest.mark.parametrize(
    ("state", "step", "name"),
    [
        (None, begins_without_a_tensor, "'state'"),
        ({}, fills_a_dict, "'state['keys']'"),
        (collections.deque(maxlen=4), fills_a_deque, "'state'"),
        (None, remembers_what_it_computed, "'state'"),
        (Box(), fills_an_object, "'state.mean'"),
    ],
)
def test_state_that_begins_as_no_tensor_is_refused_by_name(state, step, name):
    model = Kept(state, step)
    with pytest.raises(plumb.Error) as caught:
        plumb.capture(model, torch.randn(3, 4))
    assert caught.value.kind is plumb.ErrorKind.Capture and f"keeps a tensor in {name}" in caught.value.message
    assert "buffer" in caught.value.remedy
    assert not state if not isinstance(state, Box) else state.mean is None


def table_in_a_dict(m, y, x):
    if x.shape not in m.state:
        m.state[x.shape] = torch.arange(x.shape[0], dtype=x.dtype)[:, None]
    return y * m.state[x.shape]


def test_a_table_that_the_first_call_makes_is_no_state():
    model = Kept({}, table_in_a_dict)
    x = torch.randn(3, 4)
    graph = plumb.capture(model, x)
    assert model.state == {} and torch.equal(graph(x), model(x))
    assert any("in its first call and keeps them" in n for n in graph.notes)


def table_of_a_shape(m, y, x):
    if m.state["shape"] != x.shape:
        m.state["table"], m.state["shape"] = torch.arange(x.shape[1], dtype=x.dtype), x.shape
    return y * m.state["table"]


def test_a_table_that_is_made_again_for_another_shape_is_no_state():
    model = Kept({"shape": None, "table": None}, table_of_a_shape)
    x, more = torch.randn(3, 4), torch.randn(5, 4)  # their tables have the same sizes
    expected = model(x)
    assert torch.equal(plumb.capture(model, more)(more), model(more))
    tracked = plumb.transforms.track_scales(model)
    for rows in (more, x, more):
        assert torch.equal(tracked(rows), model(rows))
    assert torch.equal(tracked(x), expected)


def collects(m, y, x):
    m.state["features"].append(y)
    m.state["calls"] += 1
    return y * 2


def test_results_that_are_collected_are_no_state_and_are_taken_back():
    model = Kept({"features": [], "calls": 0}, collects)
    graph = plumb.capture(model, torch.randn(3, 4))
    assert model.state == {"features": [], "calls": 0}
    assert any("'state['calls']' changed from 0 to 1" in n for n in graph.notes)
    x = torch.randn(3, 4)
    assert torch.equal(graph(x), model(x))


def counts_in_a_dict(m, y, x):
    m.state["calls"] += 1
    return y * m.state["calls"]


def test_a_path_chosen_by_a_counter_in_a_dict_is_refused():
    with pytest.raises(plumb.Error, match=r"state\['calls'\]' and takes another path in the next call"):
        plumb.capture(Kept({"calls": 0}, counts_in_a_dict), torch.randn(3, 4))


def counts_in_an_array(m, y, x):
    m.state["calls"][0] += 1
    return y * float(m.state["calls"][0])


def counts_in_an_array_alone(m, y, x):
    m.state["calls"][0] += 1
    return y


def test_arrays_of_numpy_are_state_as_lists_are():
    x = torch.randn(3, 4)
    for array in (np.zeros(1), np.zeros((2, 3)).T[0]):
        with pytest.raises(plumb.Error, match=r"state\['calls'\]' and takes another path in the next call"):
            plumb.capture(Kept({"calls": array}, counts_in_an_array), x)
        model = Kept({"calls": array}, counts_in_an_array_alone)
        graph = plumb.capture(model, x)
        assert not array.any() and any("'state['calls']' changed" in note for note in graph.notes)
        assert torch.equal(graph(x), model(x))
        array.fill(0)


FEATURES: dict = {}
feature = None


def feature_hooks():
    """Hooks that leave a layer's output outside of the model, each with what reads it there."""
    in_closure, in_list, variable = {}, [], None

    def to_global(module, args, out):
        FEATURES["out"] = out

    def to_closure(module, args, out):
        in_closure.update(out=out)

    def to_list(module, args, out):
        in_list.append(out)

    def to_variable(module, args, out):
        nonlocal variable
        variable = out

    def to_global_variable(module, args, out):
        global feature
        feature = out

    class Extractor:
        def hook(self, module, args, out):
            self.out = out

    extractor = Extractor()
    return {
        "a global": (to_global, lambda: FEATURES["out"]),
        "a closure": (to_closure, lambda: in_closure["out"]),
        "a list": (to_list, lambda: in_list[-1]),
        "a variable": (to_variable, lambda: variable),
        "a global variable": (to_global_variable, lambda: feature),
        "an object": (extractor.hook, lambda: extractor.out),
    }


@pytest.mark.parametrize("record", [False, True], ids=["tracked", "recorded"])
@pytest.mark.parametrize("where", feature_hooks())
def test_a_hook_leaves_each_calls_features_outside_of_the_model(where, record, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    results = []
    for transformed in (False, True):
        hook, read = feature_hooks()[where]
        module = copy.deepcopy(model)
        if transformed:
            module = module if record else track_scales(module)
        module[0].register_forward_hook(hook)
        recorder = plumb.Recorder(module, 1, tmp_path / "run.history") if transformed and record else None
        found = []
        for x in torch.arange(40.0).reshape(5, 2, 4).sin():
            module.zero_grad()
            y = module(x)
            read().retain_grad()
            (y.sum() + read().square().sum()).backward()
            found += [read().detach(), read().grad, module[0].weight.grad.clone()]
        results.append(found)
        if where == "a list":
            assert len(hook.__closure__[0].cell_contents) == 5
        if transformed:
            assert list(map(len, forward_of(module)._cache.values())) == [1], "what the forward itself leaves is no change"
            if recorder:
                recorder.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_graph_says_which_features_it_does_not_leave_and_keeps_none_of_the_capture():
    hook, _ = feature_hooks()["a list"]
    model = nn.Linear(4, 4)
    nn.Module.register_forward_hook(model, hook)
    graph = plumb.capture(nn.Sequential(model), torch.ones(2, 4))
    assert "the forward leaves tensors in 'in_list'" in "\n".join(graph.notes)
    assert hook.__closure__[0].cell_contents == []


TABLES: dict = {}


def test_a_table_outside_of_the_model_is_made_once_and_a_state_there_is_refused():
    class Model(nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.layer, self.call = nn.Linear(4, 4), forward

        def forward(self, x):
            return self.call(self, x)

    def table(model, x):
        if "table" not in TABLES:
            TABLES["table"] = torch.arange(4.0).sin()
        return model.layer(x) + TABLES["table"]

    def state(model, x):
        y = model.layer(x) + TABLES.get("state", 0)
        TABLES["state"] = y.detach()
        return y

    TABLES.clear()
    model, x = Model(table), torch.ones(2, 4)
    tracked = track_scales(model)
    y = tracked(x)
    assert torch.equal(TABLES["table"], torch.arange(4.0).sin())
    assert torch.equal(y, model(x)) and torch.equal(tracked(x), y)
    with pytest.raises(plumb.Error, match="keeps a tensor in 'TABLES\\['state'\\]' for its next call"):
        track_scales(Model(state))(x)
