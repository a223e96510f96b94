"""Transformed modules and graphs under torch's tracers, modes and tensor subclasses: right numbers, or words."""

import pickle

import plumb.functional as U
import pytest
import torch
from operator_errors import OPERATOR_ERROR
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import plumb
from plumb.transforms import simulate_format, track_scales, unit_scale, use_fp8

x, other = torch.linspace(-2, 2, 32).reshape(4, 8), torch.linspace(3, -1, 32).reshape(4, 8)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.l(x) * 3.0)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


MADE = {
    "graph": lambda: plumb.capture(Scaled(), x),
    "unit_scale": lambda: unit_scale(Scaled()),
    "simulate_format": lambda: simulate_format(Scaled(), "E4M3-RN", "none"),
    "use_fp8": lambda: use_fp8(Scaled()),
    "track_scales": lambda: track_scales(Scaled()),
}
made = pytest.mark.parametrize("how", MADE)
called = pytest.mark.parametrize("called_before", [True, False])


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def module_of(how, called_before):
    module = MADE[how]()
    if called_before:
        module(x)
    return module


@made
@called
def test_a_dispatch_mode_sees_the_run_and_changes_no_bit(how, called_before):
    module, expected = module_of(how, called_before), MADE[how]()(x)
    with Seen() as seen:
        assert torch.equal(module(x), expected)
    assert torch.equal(module(x), expected)
    assert sum("addmm" in name or "linear" in name or "fp8" in name for name in seen.operators) == 1


@made
@called
def test_make_fx_gives_the_same_numbers(how, called_before):
    module = module_of(how, called_before)
    assert torch.equal(make_fx(module)(x)(other), module(other))


@made
@called
def test_a_trace_of_jit_gives_the_same_numbers(how, called_before):
    module = module_of(how, called_before)
    if how == "track_scales":
        for whole in (module, Around(module)):
            with pytest.raises(plumb.Error, match="measures nothing.*\n.*without track_scales"):
                torch.jit.trace(whole, x)
        return
    assert torch.equal(torch.jit.trace(module, x)(other), module(other))
    assert torch.equal(torch.jit.trace(Around(module), x)(other), module(other) + 1)


@pytest.mark.parametrize("how", list(MADE)[1:])
def test_what_reads_the_forward_of_the_class_is_refused(how):
    module = MADE[how]()
    with pytest.raises(plumb.Error, match=r"this Scaled runs a graph instead\n.*to_fx\(\)"):
        torch.fx.symbolic_trace(module)
    with pytest.raises(plumb.Error, match=r"runs a graph, which takes tensors\n.*is_leaf_module"):
        torch.fx.symbolic_trace(Around(module))
    for whole in (module, Around(module)):
        with pytest.raises(plumb.Error, match=r"this Scaled was transformed: it runs a graph\n.*torch.jit.trace"):
            torch.jit.script(whole)
    in_fx = plumb.capture(module, x).to_fx()
    state = dict(module.named_parameters())
    assert torch.equal(in_fx(*[state[name] for name in in_fx.attributes], x)[0], module(x))


class Sine(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(torch.sin if func is torch.tanh else func, types, args, kwargs or {})


def test_a_graph_is_for_tensors_of_the_classes_that_it_was_captured_with():
    model = Scaled()
    plain, of_class = plumb.capture(model, x), plumb.capture(model, x.as_subclass(Sine))
    assert torch.equal(of_class(x.as_subclass(Sine)), model(x.as_subclass(Sine)).as_subclass(torch.Tensor))
    with pytest.raises(plumb.Error, match="'x' is a Sine and was a plain tensor.*\n.*as_subclass"):
        plain(x.as_subclass(Sine))
    with pytest.raises(plumb.Error, match="'x' is a plain tensor and was a Sine"):
        of_class(x)
    assert torch.equal(plain(nn.Parameter(x)), plain(x))


class TanhIsSine(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return torch.sin(*args) if func is torch.tanh else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["simulate_format", "track_scales"])
def test_a_mode_that_changes_functions_is_followed(how):
    make = {"simulate_format": lambda m: simulate_format(m, "none", "none"), "track_scales": track_scales}[how]
    model = Scaled()
    module = make(model)
    for _ in range(2):
        assert torch.equal(module(x), model(x))
        with TanhIsSine():
            assert torch.equal(module(x), model(x)) and torch.equal(model(x), torch.sin(model.l(x) * 3.0))
    graph = plumb.capture(model, x)
    with TanhIsSine(), pytest.raises(plumb.Error, match="'the modes of torch.overrides that are on'.* has changed"):
        graph(x)
    with torch.device("cpu"):
        assert torch.equal(graph(x), model(x))


class MakesTensors(nn.Module):
    def forward(self, x):
        return torch.zeros(2)


def test_the_default_device_is_followed():
    transformed = simulate_format(MakesTensors(), "none", "none")
    assert transformed(x).device.type == "cpu"
    with torch.device("meta"):
        assert transformed(x).is_meta
    assert transformed(x).device.type == "cpu"


class AsksForStrides(nn.Module):
    def forward(self, x):
        return x * (2 if x.is_contiguous() else 3) + x.stride(0)


def test_a_graph_whose_forward_asks_for_a_layout_is_for_that_one():
    model = AsksForStrides()
    for given, another in ((x, x.T.contiguous().T), (x.T.contiguous().T, x), (x, x[:1].expand(4, 8))):
        graph = plumb.capture(model, given)
        assert torch.equal(graph(given.clone()), model(given))
        with pytest.raises(plumb.Error, match="the forward asks for the layout at .*test_transform_tracers.py"):
            graph(another)
        with pytest.raises(plumb.Error, match="the forward asks for the layout"):
            pickle.loads(pickle.dumps(graph))(another)
    other = plumb.capture(Scaled(), x)
    torch.testing.assert_close(other(x.T.contiguous().T), Scaled()(x))  # matrices of another layout go to another kernel


def test_an_expanded_input_is_no_contiguous_one():
    model = AsksForStrides()
    transformed = simulate_format(model, "none", "none")
    for given in (x, x.t(), x[:1].expand(4, 8), x[:, :1].expand(4, 8), x[None].expand(3, 4, 8), x[:1, :1].expand(4, 8).requires_grad_()):
        assert torch.equal(transformed(given), model(given))


@pytest.mark.parametrize("how", ["unit_scale", "simulate_format", "track_scales"])
def test_a_module_on_the_meta_device_has_the_meta_results(how):
    assert MADE[how]().to("meta")(x.to("meta")).shape == (4, 8)


def test_derivatives_of_torch_func_work_or_are_refused_with_the_remedy():
    expected = torch.autograd.functional.jacobian(lambda x: U.gelu(x).sum(), x)
    assert torch.equal(torch.func.grad(lambda x: U.gelu(x).sum())(x), expected)
    operators = {
        "rescale": [U.relu, U.tanh, U.sigmoid],
        "residual_split": [lambda x: U.residual_apply(torch.sin, x)],
        "residual_add": [lambda x: U.residual_add(x, x)],
        "scale_bwd": [lambda x: plumb.scale.scale_bwd(x, 2.0)],
        "simulate_format": [lambda x: torch.ops.plumb.simulate_format(x, "E4M3-RN", "E5M2-RN")],
    }
    for name, functions in operators.items():
        for function in functions:
            for derivative in (torch.func.grad(lambda x, f=function: f(x).sum()), torch.func.jacrev(function)):
                with pytest.raises(OPERATOR_ERROR, match=f"plumb::{name} has no derivative by torch.func.*\n.*torch.autograd.grad"):
                    derivative(x)
    for rounded in (simulate_format(Scaled(), "E4M3-RN", "E5M2-RN"), use_fp8(Scaled(), recipe="delayed")):
        rounded(x)
        with pytest.raises(plumb.Error, match=r"node .*(simulate_format|fp8_delayed_linear) has no derivative by torch.func.*\n  at: l \(.*\n.*torch.autograd"):
            torch.func.grad(lambda p, m=rounded: torch.func.functional_call(m, p, (x,)).sum())(dict(rounded.named_parameters()))
    for recipe in (None, "rowwise"):
        rounded = use_fp8(Scaled(), recipe=recipe)
        rounded(x)
        with pytest.raises(RuntimeError, match=r"fp8_\w*linear has no gradient of a gradient\n.*torch.autograd.grad in the place of torch.func"):
            torch.func.grad(lambda p, m=rounded: torch.func.functional_call(m, p, (x,)).sum())(dict(rounded.named_parameters()))


def test_a_first_call_inside_of_torch_func_is_refused_and_the_remedy_holds():
    model = Scaled()
    for transformed in (track_scales(model), simulate_format(model, "none", "none")):

        def loss(weights, x, module=transformed):
            return torch.func.functional_call(module, weights, (x,)).square().mean()

        weights = {name: p.detach() for name, p in transformed.named_parameters()}
        with pytest.raises(plumb.Error, match="a tensor of torch.func.*\n.*\n  try: .* call a transformed module once"):
            torch.func.grad(loss)(weights, x)
        transformed(x)
        expected = torch.func.grad(lambda w, x: loss(w, x, model))(weights, x)
        found = torch.func.grad(loss)(weights, x)
        assert all(torch.equal(found[name], expected[name]) for name in weights)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_with_what_to_do(layout):
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)
    for how in MADE:
        module = MADE[how]()
        module(x)
        with pytest.raises(plumb.Error, match="is a nested tensor|works on a nested tensor"):
            module(nested)
