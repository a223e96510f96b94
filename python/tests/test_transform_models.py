"""Every model takes every transform, and the report says what is true of the graph that runs."""

import copy

import pytest
import torch
from plumb.transforms._apply import forward_of
from torch.utils import _pytree as pytree
from transform_models import MODELS

from plumb.transforms import report, simulate_format, track_scales, unit_scale


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


def nodes_of(model):
    return [n for n in forward_of(model).last.engine.graph.nodes if n.op == "call_function"]


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
