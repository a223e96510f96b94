"""A captured graph refuses by name what it was not made for: attributes that changed, modes that the forward asks for, autocast, dtypes."""

import copy
import gc
import pickle
import weakref

import guarded_model
import pytest
import torch
import torch.nn.functional as F
from guarded_model import CHANGES, X
from torch import nn

import plumb

model = guarded_model.model  # the fixture


class AsksMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if self.training:
            return self.linear(x) + 1
        return self.linear(x)


NAMES = {
    "a_number": "'factor'", "a_flag": "'flag'", "a_list_in_place": "'sizes'", "a_list": "'sizes'", "a_dict_in_place": "'table'",
    "a_setting_of_an_object": "'Config.scale'", "another_object": "'config'", "a_namespace": "'SimpleNamespace.shift'",
    "the_probability_of_dropout": "'dropout.p'", "the_epsilon_of_a_norm": "'norm.eps'", "a_count_of_layers": "'count'",
    "a_global": "'FACTOR'", "a_tensor_that_is_replaced": "'kept'", "a_hook_that_is_registered_later": "'linear.hooks'",
    "a_pre_hook": "'norm.hooks'", "a_forward_of_a_part": "'linear.forward'", "a_forward_of_the_class": "'Mine.shifted'|'shifted'",
    "an_attribute_that_was_not_there": "'extra'", "something_in_place_of_none": "'optional'",
    "an_attribute_of_the_class": "'class_factor'", "another_module": "'modules'", "another_parameter": "'linear.weight'",
    "no_bias": "'linear.bias'", "an_array_in_place": "'array'", "an_array_in_a_list_in_place": "'arrays'",
    "another_class_of_a_part": "'linear.__class__'|'linear.forward'",
}  # fmt: skip


@pytest.mark.parametrize("change", NAMES)
def test_a_graph_names_what_changed_in_the_original(change, model):
    graph = plumb.capture(model, X)
    by_itself = copy.deepcopy(graph)
    before = graph(X)
    CHANGES[change](model)
    with pytest.raises(plumb.Error, match=f"({NAMES[change]}), which the forward had read, has changed since"):
        graph(X)
    assert torch.equal(by_itself(X), before)
    assert torch.equal(pickle.loads(pickle.dumps(graph))(X), before)
    assert torch.equal(plumb.capture(model, X)(X), model(X))


def test_a_graph_refuses_another_dtype_by_name(model):
    graph = plumb.capture(model, X).bfloat16()
    with pytest.raises(plumb.Error, match="node %linear .*must have the same dtype"):
        graph(X)
    with pytest.raises(plumb.Error, match="input 'x' should be f32"):
        graph(X.bfloat16())


def test_a_graph_goes_on_when_its_original_is_gone(model):
    graph = plumb.capture(model, X)
    expected = model(X)
    gone = weakref.ref(model.config)
    model.config = None
    with pytest.raises(plumb.Error, match="'config'"):
        graph(X)
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0))
    graph, gone, expected = plumb.capture(module, X), weakref.ref(module), module(X)
    del module
    gc.collect()
    assert gone() is None
    assert torch.equal(graph(X), expected)


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_whose_forward_asks_for_its_mode_refuses_the_other_one(training):
    module = AsksMode().train(training)
    graph = plumb.capture(module, X)
    assert torch.equal(graph(X), module(X))
    for other in (graph, copy.deepcopy(graph)):
        other.train(not training)
        with pytest.raises(plumb.Error, match="cannot change to") as caught:
            other(X)
        assert "test_guards_graphs.py" in caught.value.where and "self.training" in caught.value.where


@pytest.mark.parametrize("training", [True, False])
def test_a_file_knows_that_its_forward_reads_the_mode(training, tmp_path):
    module = AsksMode().train(training)
    plumb.save_pt2(plumb.capture(module, X), tmp_path / "one.pt2")
    plumb.save_pt2(plumb.load_pt2(tmp_path / "one.pt2"), tmp_path / "again.pt2")
    for name in ("one.pt2", "again.pt2"):
        loaded = plumb.load_pt2(tmp_path / name)
        assert loaded.training == training
        assert torch.equal(loaded(X), module(X))
        for other in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
            other.train(not training)
            with pytest.raises(plumb.Error, match="cannot change to") as caught:
                other(X)
            assert "test_guards_graphs.py" in caught.value.where and "save both" in caught.value.remedy
            assert torch.equal(other.train(training)(X), module(X))
    assert torch.equal(torch.export.load(tmp_path / "one.pt2").module()(X), module(X))


def test_a_transformed_file_knows_it_too(tmp_path):
    graph = plumb.capture(AsksMode(), X)
    plumb.transforms.run_passes(graph, "optimise")
    plumb.save_pt2(graph, tmp_path / "graph.pt2")
    with pytest.raises(plumb.Error, match="cannot change to evaluation"):
        plumb.load_pt2(tmp_path / "graph.pt2").eval()(X)


def test_a_file_without_the_record_runs_in_both_modes(tmp_path):
    program = torch.export.export(AsksMode(), (X,))
    torch.export.save(program, tmp_path / "exported.pt2")
    loaded = plumb.load_pt2(tmp_path / "exported.pt2")
    assert torch.equal(loaded.eval()(X), loaded.train()(X)), "torch.export writes no such record"


def test_a_forward_that_asks_for_its_mode_and_does_the_same_runs_in_both(tmp_path):
    class Rate(AsksMode):
        def forward(self, x):
            rate = 0.5 if self.training else 0.5
            return self.linear(x) * rate

    graph = plumb.capture(Rate(), X)
    assert torch.equal(graph.eval()(X), graph.train()(X))
    plumb.save_pt2(graph, tmp_path / "rate.pt2")
    loaded = plumb.load_pt2(tmp_path / "rate.pt2")
    assert torch.equal(loaded.eval()(X), loaded.train()(X))

    class Drops(Rate):  # the modes differ in what operators do alone
        def __init__(self):
            super().__init__()
            self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x):
            x = super().forward(self.dropout(self.norm(x)))
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)

    for training in (True, False):
        with pytest.raises(plumb.Error, match="cannot change to") as caught:
            plumb.capture(Drops().train(training), X).train(not training)(X)
        assert caught.value.where == "", "no line of the forward is the reason"

    class Constant(AsksMode):
        def forward(self, x):
            return self.linear(x) * torch.tensor(1.0 if self.training else 2.0)

    with pytest.raises(plumb.Error, match="cannot change to"):
        plumb.capture(Constant(), X).eval()(X)


def test_attention_that_drops_weights_refuses_another_mode():
    module = nn.MultiheadAttention(8, 2, dropout=0.5).eval()
    graph = plumb.capture(module, X, X, X).train()
    with pytest.raises(plumb.Error, match="cannot change to training mode"):
        graph(X, X, X)


def test_a_graph_refuses_autocast_that_it_was_not_captured_under(model):
    graph = plumb.capture(model, X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(
            plumb.Error, match="captured without autocast and is called under autocast to torch.bfloat16"
        ):
            graph(X)
        mixed, expected = plumb.capture(model, X), model(X)
        assert torch.equal(mixed(X), expected)
    assert torch.equal(mixed(X), expected), "it holds the casts"
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(mixed(X), expected)


def test_a_loaded_file_refuses_autocast_unless_it_holds_casts(model, tmp_path):
    plumb.save_pt2(plumb.capture(model, X), tmp_path / "plain.pt2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plumb.save_pt2(plumb.capture(model, X), tmp_path / "mixed.pt2")
        expected = model(X)
        with pytest.raises(plumb.Error, match="without autocast and is called under autocast"):
            plumb.load_pt2(tmp_path / "plain.pt2")(X)
        assert torch.equal(plumb.load_pt2(tmp_path / "mixed.pt2")(X), expected)
    assert torch.equal(plumb.load_pt2(tmp_path / "mixed.pt2")(X), expected)
    assert torch.equal(plumb.load_pt2(tmp_path / "plain.pt2")(X), model(X))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows):
        return self.head(self.embed(rows))


def test_a_graph_names_tied_weights_that_became_two():
    rows, model = torch.arange(4), Tied()
    graph = plumb.capture(model, rows)
    other, tied = nn.Parameter(torch.ones(10, 8)), graph.head.weight
    with pytest.raises(plumb.Error, match="'embed.weight' and 'head.weight' were one tensor"):
        torch.func.functional_call(graph, {"head.weight": other}, (rows,), tie_weights=False)
    graph.head.weight = other
    with pytest.raises(plumb.Error, match="'embed.weight' and 'head.weight' were one tensor"):
        graph(rows)
    graph.head.weight = tied
    assert torch.equal(graph(rows), model(rows))
    both = torch.func.functional_call(graph, {"head.weight": other}, (rows,))
    assert torch.equal(both, torch.func.functional_call(model, {"head.weight": other}, (rows,)))


def test_tied_weights_of_a_graph_come_back_from_the_meta_device_tied():
    rows, model = torch.arange(4), Tied()
    graph = plumb.capture(model, rows).to("meta").to_empty(device="cpu")
    assert graph.head.weight is graph.embed.weight
    graph.load_state_dict(model.state_dict())
    for module in (graph, model):
        module(rows).sum().backward()
    assert torch.equal(graph.embed.weight.grad, model.embed.weight.grad)
