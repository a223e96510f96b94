"""Every model takes every transform, and the report says what is true of the graph that runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from plumb._transformed import forward_of
from torch import nn
from transform_models import MODELS, made, run

from plumb.transforms import report, simulate_format, track_scales, unit_scale


def nodes_of(model):
    return [n for n in forward_of(model).last.engine.graph.nodes if n.op == "call_function"]


class Written(nn.Module):
    """One operator of an input and a weight."""

    def __init__(self, function):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(4, 4)), function

    def forward(self, x):
        return self.function(x, self.w)


SPELLINGS = {
    "plumb::matmul": [
        lambda x, w: x @ w, lambda x, w: x.matmul(w), torch.matmul, torch.mm, lambda x, w: torch.bmm(x[None], w[None])[0]
    ],
    "plumb::softmax": [lambda x, w: x.softmax(-1), lambda x, w: torch.softmax(x, -1), lambda x, w: F.softmax(x, -1)],
    "plumb::relu": [lambda x, w: x.relu(), lambda x, w: torch.relu(x), lambda x, w: F.relu(x)],
    "plumb::add": [
        lambda x, w: x + w, lambda x, w: x.add(w), torch.add, lambda x, w: x.clone().add_(w), lambda x, w: torch.add(x, w, alpha=1)
    ],
    "plumb::linear": [lambda x, w: F.linear(x, w), lambda x, w: torch.addmm(x[0], x, w.t())],
}  # fmt: skip


@pytest.mark.parametrize("operator", SPELLINGS)
def test_an_operator_is_scaled_however_it_is_written(operator):
    for function in SPELLINGS[operator]:
        model = unit_scale(Written(function))
        model(torch.randn(4, 4))
        assert operator in [n.target for n in nodes_of(model)]


def test_a_linear_layer_of_a_vector_or_with_a_broadcast_bias_stays_what_it_is():
    for function in (
        lambda x, w: F.linear(x, w[0]), lambda x, w: F.linear(x, w, w[:1]), lambda x, w: F.linear(x, w, w[0, :1]),
        lambda x, w: F.linear(x, w, w[0, 0]),
    ):  # fmt: skip
        plain = Written(function)
        model = unit_scale(plain)
        x = torch.randn(4, 4)
        assert torch.equal(model(x), plain(x))
        left = {e["node"]: e["reason"] for e in report(model)[0]["entries"] if e["kind"] == "left_alone"}
        assert "vector" in left["linear"]


def test_a_straight_through_estimator_keeps_its_value():
    for estimate in (
        lambda z, _: z + (z.round() - z).detach(),
        lambda z, _: z.round().detach() + z - z.detach(),
        lambda z, _: F.gumbel_softmax(z, hard=True).detach() + z - z.detach(),
    ):
        model = unit_scale(Written(estimate))
        values = model(torch.randn(4, 4))
        assert torch.allclose(values, values.round(), atol=1e-6)


def test_a_complex_layer_computes_what_it_did_and_is_named():
    model = nn.Linear(4, 4, dtype=torch.complex64)
    scaled = unit_scale(model)
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert torch.equal(scaled(x), model(x))
    left = {e["node"] for e in report(scaled)[0]["entries"] if e["kind"] == "left_alone"}
    assert {"weight", "bias"} <= left


def test_probabilities_that_one_minus_or_a_draw_reads_stay_probabilities():
    class Focal(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x, y):
            p = self.layer(x).softmax(-1)
            return -((1 - p.gather(1, y)) ** 1.5 * p.gather(1, y).log()).mean(), torch.bernoulli(p)

    torch.manual_seed(0)
    loss, drawn = unit_scale(Focal())(torch.randn(16, 8), torch.randint(4, (16, 1)))
    loss.backward()
    assert loss.isfinite() and set(drawn.flatten().tolist()) <= {0.0, 1.0}


def test_residual_layers_behind_a_sum_of_embeddings_are_found():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.place = nn.Embedding(9, 8), nn.Embedding(4, 8)
            self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9)

        def forward(self, ids):
            x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
            x = x + self.first(x)
            return self.head(x + self.second(x))

    model = unit_scale(Model())
    model(torch.randint(9, (2, 4)))
    targets = [n.target for n in nodes_of(model)]
    assert targets.count("plumb::residual_add") == 2 and targets.count("plumb::add") == 1


@pytest.mark.parametrize("name", MODELS)
def test_unit_scale_does_what_it_reports(name):
    model, args, kwargs = made(name)
    scaled = unit_scale(model)
    run(scaled, args, kwargs)
    entries = report(scaled)[0]["entries"]
    by_kind = lambda kind: [e for e in entries if e["kind"] == kind]  # noqa: E731
    nodes = {n.name: n for n in nodes_of(scaled)}
    operators = [n.target for n in nodes.values()]

    for e in by_kind("replaced"):
        assert nodes[e["node"]].target == e["to"], e
    assert operators.count("plumb::residual_add") == len(by_kind("residual"))
    for e in by_kind("residual"):
        assert nodes[e["node"]].args[2] == e["tau"]
    for e in by_kind("unconstrained"):
        node = nodes[e["node"]]
        if "constraint" in dict(node.arg_names):
            assert node.args[list(dict(node.arg_names)).index("constraint")] is None
    parameters = dict(scaled.named_parameters(remove_duplicate=False))
    original = dict(model.named_parameters(remove_duplicate=False))
    said = {e["node"]: e["kind"] for e in entries if e["node"] in parameters}
    for n, p in parameters.items():
        same = [m for m, q in parameters.items() if q is p]  # a tied tensor is reported under one of its names
        kind = next((said[m] for m in same if m in said), "left_alone")
        if kind == "weight":
            assert abs(p.float().std() - 1) < 0.02, n
        elif kind == "bias":
            assert not p.any(), n
        else:
            torch.testing.assert_close(p, original[n])
    # Nothing that could have been replaced is still there without a word about it.
    silent = {e["node"] for e in entries}
    for n in nodes.values():
        if n.target in ("aten::linear", "aten::gelu", "aten::layer_norm", "aten::embedding", "aten::conv2d", "aten::conv1d"):
            assert n.name in silent, n


@pytest.mark.parametrize("name", MODELS)
def test_simulate_format_does_what_it_reports(name):
    model, args, kwargs = made(name)
    low = simulate_format(model, "e4m3fn-RN", "e5m2-RN")
    run(low, args, kwargs)
    entries = report(low)[0]["entries"]
    quantised = {e["node"] for e in entries if e["kind"] == "quantised"}
    left = {e["node"] for e in entries if e["kind"] == "left_alone"}
    products = ("linear", "matmul", "bmm", "mm", "addmm", "conv", "scaled_dot_product_attention", "lstm", "gru")
    found = 0
    for n in nodes_of(low):
        if n.target.partition("::")[2].startswith(products):
            found += 1
            assert n.name in quantised | left, n
            if n.name in quantised:
                assert any(v.producer.target == "plumb::simulate_format" for v in n.inputs), n
    assert found and quantised | left


@pytest.mark.parametrize("name", MODELS)
def test_track_scales_measures_and_changes_nothing(name):
    model, args, kwargs = made(name)
    tracked = track_scales(model)
    torch.manual_seed(1)
    expected = run(copy.deepcopy(model), args, kwargs)
    torch.manual_seed(1)
    got = run(tracked, args, kwargs)
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected))
    graph = tracked.scales_graph()
    measured = {n.meta["value"] for n in graph.nodes if "metrics" in n.meta}
    assert measured == {e["node"] for e in report(tracked)[0]["entries"]}
    assert any(n.meta["metrics"].bwd for n in graph.nodes if "metrics" in n.meta)


def test_changing_shapes_keep_one_set_of_parameters():
    model, (ids,), _ = made("GPT")
    model = track_scales(simulate_format(unit_scale(model), "e4m3fn-RN", "e5m2-RN"))
    sizes = {}
    for length in (8, 5, 8):
        model(ids[:, :length])
        sizes[length] = report(model)[0]["entries"]
    weights = {k: [e["node"] for e in v if e["kind"] == "weight"] for k, v in sizes.items()}
    assert weights[8] == weights[5] and len(weights[8]) > 5


def test_unit_scale_leaves_products_with_a_sparse_operand_alone_and_says_so():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel, self.head = nn.Parameter(torch.randn(6, 8)), nn.Linear(8, 3)

        def forward(self, adjacency, x):
            return self.head(torch.spmm(adjacency, x @ self.kernel).relu())

    model, dense, x = Graph().cpu(), torch.eye(5).roll(1, 0).cpu(), torch.randn(5, 6).cpu()  # few devices have sparse tensors
    for adjacency in (dense.to_sparse(), dense.to_sparse_csr()):
        scaled = unit_scale(model)
        y = scaled(adjacency, x)
        y.sum().backward()
        assert y.isfinite().all() and scaled.kernel.grad is not None
        left = {e["from"]: e["reason"] for e in report(scaled)[0]["entries"] if e["kind"] == "left_alone"}
        assert left.get("aten::mm") == "an operand is sparse", report(scaled)
