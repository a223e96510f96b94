"""Passes of the engine's table, run from Python."""

import copy

import pytest
import torch
from torch import nn

import plumb
from plumb.transforms import fold, run_passes, simulate_format, track_scales, unit_scale


class Twice(nn.Module):
    def forward(self, x):
        x.cos()
        return x.exp() + x.exp()


def test_passes_run_in_order_and_say_what_they_did(tmp_path):
    x = torch.randn(3, 4)
    graph = plumb.capture(Twice(), x)
    expected = graph(x)
    done = run_passes(graph, "dead_code", "common_subexpressions,differentiable=true", "dead_code", dump=tmp_path / "steps")
    assert [(r.name, r.changed) for r in done] == [
        ("dead_code", True), ("common_subexpressions", True), ("dead_code", False)
    ]  # fmt: skip
    assert all(r.seconds >= 0 for r in done)
    assert torch.equal(graph(x), expected)
    assert [str(graph.graph).count(name) for name in ("aten::cos", "aten::exp")] == [0, 1]
    dumped = sorted(p.name for p in (tmp_path / "steps").iterdir())
    assert dumped == [
        "00-input.txt", "01-dead_code.txt", "02-common_subexpressions.txt", "03-dead_code.txt"
    ]  # fmt: skip
    assert "aten::cos" in (tmp_path / "steps" / "00-input.txt").read_text()
    assert (tmp_path / "steps" / "03-dead_code.txt").read_text() == graph.graph.to_string()


@pytest.mark.parametrize(
    "wrong, says",
    [
        ("no_such", "one of: "),
        ("dead_code,a=1", "no option 'a'"),
        ("optimise,fuse", "fuse"),
        ("unit_scale,residual_mult=nan,tau_rule=depth", "residual_mult is a finite number, got 'nan'"),
        ("unit_scale,tau_mlp=inf", "tau_mlp is a finite number"),
        ("simulate_format,srbits=4294967296", "srbits is 2147483647 for a format"),  # 0 in 32 bits
    ],
)
def test_unknown_passes_and_options_are_refused(wrong, says):
    graph = plumb.capture(nn.Linear(4, 4), torch.randn(2, 4))
    before = str(graph.graph)
    with pytest.raises(plumb.Error, match=says):
        run_passes(graph, "dead_code", wrong)
    assert str(graph.graph) == before


class TwoUses(nn.Module):
    """The weight of `kept` is also added: it stays as it is, with its operator."""

    def __init__(self):
        super().__init__()
        self.scaled, self.kept = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.kept(self.scaled(x)) + self.kept.weight


def test_unit_scale_of_a_graph_rewrites_its_copy_as_the_pass_does(monkeypatch):
    x, model = torch.randn(4, 4), TwoUses()
    graph = plumb.capture(model, x)
    before, expected, by_pass = graph.graph.to_string(), graph(x), copy.deepcopy(graph)
    monkeypatch.setattr(plumb._C, "capture", None)  # nothing is captured again
    scaled = unit_scale(graph)
    run_passes(by_pass, "unit_scale")
    assert scaled.graph.to_string() == by_pass.graph.to_string() and "plumb::linear" in str(scaled.graph)
    assert scaled.state_dict().keys() == by_pass.state_dict().keys()
    assert all(torch.equal(tensor, by_pass.state_dict()[name]) for name, tensor in scaled.state_dict().items())
    assert [p.mup_type for p in scaled.parameters()] == [p.mup_type for p in by_pass.parameters()]
    assert torch.equal(scaled(x), by_pass(x))
    assert torch.equal(scaled.kept.weight, model.kept.weight) and abs(scaled.scaled.weight.std().item() - 1) < 1e-5
    assert graph.graph.to_string() == before and torch.equal(graph(x), expected)
    assert torch.equal(unit_scale(unit_scale(graph))(x), scaled(x))


def test_transforms_of_a_graph_come_after_its_unit_scaling_in_either_order():
    torch.manual_seed(0)
    x, model = torch.randn(4, 4), nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    graph = plumb.capture(model, x)
    one = simulate_format(unit_scale(graph), "e4m3fn-RN", "e5m2-RN")
    other = unit_scale(simulate_format(graph, "e4m3fn-RN", "e5m2-RN"))
    assert torch.equal(one(x), other(x)) and not torch.equal(one(x), unit_scale(graph)(x))
    for module in (one, other):
        assert [part["pass"] for part in plumb.report(module)] == ["unit_scale", "simulate_format"]
    tracked = track_scales(unit_scale(graph))
    tracked(x).sum().backward()
    assert [node.meta["metrics"].fwd for node in tracked.scales_graph().nodes if "linear" in node.name]
    folded = fold(unit_scale(graph))
    assert "plumb::" not in str(folded.graph) and torch.allclose(folded(x), unit_scale(graph)(x), rtol=1e-4, atol=1e-5)


class Loss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, targets):
        return nn.functional.cross_entropy(self.net(x), targets)


@pytest.mark.parametrize("name", ["unit_scale", "split_vocabulary"])
def test_parameters_that_a_pass_has_made_anew_are_parameters_in_python_too(name):
    x, targets, net = torch.randn(3, 4), torch.tensor([0, 1, 2]), nn.Linear(4, 6)
    graph = copy.deepcopy(plumb.capture(Loss(net), x, targets))
    assert run_passes(graph, name)[0].changed
    assert all(isinstance(parameter, nn.Parameter) for parameter in graph.parameters())
    assert torch.equal(copy.deepcopy(graph)(x, targets), graph(x, targets))


class WritesItsSecondInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        with torch.no_grad():
            y.mul_(2)
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None


class PastAFunction(nn.Module):
    """Each result is computed from a value before and after a custom function writes it."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        chain = (a := x.detach() + 1) * 2
        product = nn.functional.linear(b := x.detach() + 2, self.weight)
        gate = (c := x.detach() + 3).sigmoid()
        written = sum(WritesItsSecondInput.apply(x, value) for value in (a, b, c))
        return chain.tanh() + 1.5 - 3, product + self.bias, c * gate, b @ self.weight, written


@pytest.mark.parametrize("name", ["fuse_patterns,inexact=true", "optimise,min_elements=0", "simulate_format,fwd=E8M23-RN,bwd=none"])
def test_no_pass_moves_an_operator_past_a_custom_function_that_writes_its_input(name):
    torch.manual_seed(0)
    x, model = torch.randn(3, 4, requires_grad=True), PastAFunction()
    graph = plumb.capture(model, x)
    run_passes(graph, name)
    for result, expected in zip(graph(x), model(x)):
        torch.testing.assert_close(result, expected)


def test_passes_of_a_module_that_is_no_graph_are_refused_by_its_type():
    with pytest.raises(TypeError, match="got Linear(?s:.*)plumb.capture"):
        run_passes(torch.nn.Linear(2, 2), "dead_code")
