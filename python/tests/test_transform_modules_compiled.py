"""Transformed modules under torch.compile, torch.compile as a transform, and backends of the user's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from plumb.transforms.utils import apply_transform, replace_node_with_function
from torch import nn
from transform_models import Branches

from plumb.transforms import compile, simulate_format, track_scales, unit_scale

fp8 = lambda m: simulate_format(m, "e4m3fn-RN", "e5m2-RN")  # noqa: E731


@pytest.mark.parametrize("made", [unit_scale, fp8, lambda m: fp8(unit_scale(m))], ids=["unit_scale", "fp8", "both"])
def test_torch_compile_takes_a_transformed_module_in_one_graph(made):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = made(Branches())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (4, 6):
        x = torch.randn(batch, 16)
        ours, theirs = compiled(x), model(x)
        assert torch.equal(ours["h"], theirs["h"]) and ours["both"][1] is None
        assert torch.equal(compiled(x, flag=False), theirs["h"])
        gradients = []
        for out in (ours, theirs):
            model.zero_grad()
            (out["h"].square().sum() + out["both"][0]).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b)


def test_torch_compile_follows_training_mode_and_buffers():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = unit_scale(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 8)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(dict(other.named_buffers()), dict(model.named_buffers()))
    torch.testing.assert_close(compiled.eval()(x), model.eval()(x))


def test_compile_is_a_transform_that_composes():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Branches()
    x = torch.randn(4, 16)
    expected = fp8(unit_scale(model))(x)["h"]
    for made in (
        compile(fp8(unit_scale(model)), backend="aot_eager"),
        fp8(compile(unit_scale(model), backend="aot_eager")),
    ):
        assert torch.equal(made(x)["h"], expected)
        assert made._compiled_call_impl is not None


@pytest.mark.parametrize("below", [lambda m: m, lambda m: fp8(unit_scale(m))], ids=["plain", "fp8"])
def test_torch_compile_takes_a_tracked_module_and_measures(below):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = track_scales(below(Branches()), histogram=True)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for scale in (1.0, 3.0):
        x = (scale * torch.randn(4, 16)).requires_grad_()  # compiled code computes no gradient that nobody asked for
        ours, theirs = compiled(x), model(x)
        assert torch.equal(ours["h"], theirs["h"])
        for out in (ours, theirs):
            (out["h"].square().sum() + out["both"][0]).backward()
        nodes = list(zip(other.scales_graph().nodes, model.scales_graph().nodes))
        assert len(nodes) > 10
        for mine, expected in nodes:
            assert mine.name == expected.name
            if "metrics" not in expected.meta:
                assert "metrics" not in mine.meta
                continue
            got, wanted = mine.meta["metrics"], expected.meta["metrics"]
            assert got.fwd.std == pytest.approx(wanted.fwd.std, rel=1e-5, nan_ok=True)
            assert got.fwd.histogram == wanted.fwd.histogram and sum(got.fwd.histogram.values()) == got.fwd.numel
            assert (got.bwd is None) == (wanted.bwd is None), mine
            if wanted.bwd:
                assert got.bwd.std == pytest.approx(wanted.bwd.std, rel=1e-4, nan_ok=True)


def test_a_tracked_module_still_measures_beside_a_compiled_one():
    model = Branches()
    tracked, x = track_scales(model), torch.randn(4, 16)
    tracked(x)["h"].sum().backward()
    assert all(n.meta["metrics"].bwd for n in tracked.scales_graph().nodes if n.name.startswith("norm"))


def test_a_backend_of_the_users_sees_the_graph():
    seen = []

    def backend(gm, inputs):
        seen.append(len(inputs))
        for node in list(gm.graph.nodes):
            if node.target is torch.ops.aten.gelu.default:
                replace_node_with_function(gm.graph, node, F.relu, args=node.args, kwargs={})
        gm.recompile()
        return gm

    model = Branches()
    x = torch.randn(4, 16)
    made = apply_transform(model, backend)
    expected = x + model.down(F.relu(model.up(model.norm(x))))
    assert torch.equal(made(x)["h"], expected) and seen == [6]
    assert not torch.equal(unit_scale(made)(x)["h"], expected), "transforms of plumb come before it"
