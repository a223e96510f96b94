"""unit_scale on custom autograd functions, on weights that are no parameters, on tables, and on long chains."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plumb
from plumb.transforms import simulate_fp8, unit_scale


class Reversible(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1); the backward computes x from y."""

    @staticmethod
    def forward(ctx, x, f, g, *weights):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            x1, x2 = x.chunk(2, -1)
            y1 = x1 + f(x2)
            y = torch.cat([y1, x2 + g(y1)], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, d):
        (y,) = ctx.saved_tensors
        (y1, y2), (d1, d2) = y.chunk(2, -1), d.chunk(2, -1)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            g = ctx.g(y1)
            torch.autograd.backward(g, d2)
            x2 = (y2 - g).detach().requires_grad_()
            d1 = d1 + y1.grad
            torch.autograd.backward(ctx.f(x2), d1)
        return torch.cat([d1, d2 + x2.grad], -1), *[None] * (len(ctx.needs_input_grad) - 1)


class ReversibleNet(nn.Module):
    def __init__(self, gives_weights):
        super().__init__()
        self.gives_weights = gives_weights
        self.into = nn.Linear(8, 8)
        self.f = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.g = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        weights = [*self.f.parameters(), *self.g.parameters()] if self.gives_weights else []
        return Reversible.apply(self.into(x), self.f, self.g, *weights)


@pytest.mark.parametrize("gives_weights", [True, False])
def test_parts_that_a_custom_function_calls_compute_what_they_did(gives_weights):
    torch.manual_seed(0)
    model, x = ReversibleNet(gives_weights), torch.randn(16, 8)
    scaled = unit_scale(model)
    for size in (16, 4):
        y = scaled(x[:size])
        y.square().mean().backward()
    for part in ("f", "g"):
        for a, b in zip(model.get_submodule(part).parameters(), scaled.get_submodule(part).parameters(), strict=True):
            torch.testing.assert_close(a, b)  # divided and multiplied again
    assert scaled.f[0].weight.grad is not None and scaled.into.weight.grad is not None
    assert abs(scaled.into.weight.std().item() - 1) < 0.2
    entries = [e for part in plumb.report(scaled) for e in part["entries"] if e["kind"] == "left_alone"]
    assert any(e["node"] == "f.0.weight" and "custom autograd function" in e["reason"] for e in entries)
    with pytest.raises(plumb.Error, match="'into'.*called alone"):
        scaled.into(x)


@pytest.mark.parametrize("called", [True, False])
def test_parts_that_a_custom_function_calls_are_loaded_before_the_first_call(called):
    torch.manual_seed(0)
    trained, x = unit_scale(ReversibleNet(True)), torch.randn(16, 8)
    trained(x)
    fresh = unit_scale(ReversibleNet(True))
    if called:
        fresh(x)
    fresh.load_state_dict(trained.state_dict())
    for size in (16, 4):
        assert torch.equal(fresh(x[:size]), trained(x[:size]))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, d):
        return 3 * d * ctx.saved_tensors[0] ** 2


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return Cube.apply(self.fc(x))


def left_alone(module):
    return {
        e["node"]: e["reason"] for part in plumb.report(module) for e in part["entries"] if e["kind"] == "left_alone"
    }


def test_the_report_has_a_line_on_a_custom_autograd_function():
    scaled = unit_scale(Cubed())
    scaled(torch.randn(2, 4))
    assert any("a custom autograd function" in reason for reason in left_alone(scaled).values())


class FixedWeight(nn.Module):
    """A linear layer whose weight is no parameter."""

    def __init__(self, buffer):
        super().__init__()
        weight = torch.randn(256, 256) * 0.07
        if buffer:
            self.register_buffer("w", weight)
        else:
            self.w = weight

    def forward(self, x):
        return F.linear(x, self.w)


def test_a_buffer_that_is_a_weight_gets_unit_variance_and_the_report_says_so():
    torch.manual_seed(0)
    scaled, x = unit_scale(FixedWeight(buffer=True)), torch.randn(64, 256, requires_grad=True)
    assert abs(scaled(x).std().item() - 1) < 0.1
    entries = [e for part in plumb.report(scaled) for e in part["entries"]]
    assert abs(scaled(x[:8]).std().item() - 1) < 0.1
    assert abs(scaled.w.std().item() - 1) < 1e-3
    assert any(e["kind"] == "weight" and e["node"] == "w" for e in entries)
    graph = unit_scale(plumb.capture(FixedWeight(buffer=True), x))
    assert abs(graph(x).std().item() - 1) < 0.1


COPIES = {
    "copied": copy.deepcopy,
    "copied twice": lambda m: copy.deepcopy(copy.deepcopy(m)),
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
    "another transform's": plumb.transforms.track_scales,
}


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES.keys())
def test_a_buffer_that_is_a_weight_gets_unit_variance_in_a_copy_too(again):
    torch.manual_seed(0)
    x = torch.randn(64, 256, requires_grad=True)
    scaled = again(unit_scale(FixedWeight(buffer=True)))
    assert abs(scaled(x).std().item() - 1) < 0.1
    assert abs(scaled.w.std().item() - 1) < 1e-3
    changed = unit_scale(FixedWeight(buffer=True))
    changed.w.fill_(2.0)
    copied = again(changed)
    copied(x)
    assert torch.equal(copied.w, changed.w)  # values that were written since are somebody's own


PRODUCTS = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "addmm": lambda x, w: torch.addmm(torch.zeros(256), x, w),
    "transposed": lambda x, w: x @ w.T,
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "conv1d": lambda x, w: F.conv1d(x[:, :, None], w[:, :, None])[:, :, 0],
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_an_operator_whose_weight_is_a_plain_tensor_stays_what_it_is_and_the_report_says_so(product):
    class Product(FixedWeight):
        def forward(self, x):
            return PRODUCTS[product](x, self.w)

    torch.manual_seed(0)
    model, x = Product(buffer=False), torch.randn(64, 256, requires_grad=True)
    scaled = unit_scale(model)
    assert torch.equal(scaled(x), model(x))
    assert any("plain tensor" in reason and "register it" in reason for reason in left_alone(scaled).values())


class Chain(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.randn(depth, 8)), nn.Parameter(torch.randn(depth, 8))

    def forward(self, x):
        for g, b in zip(self.g, self.b, strict=True):
            x = torch.tanh(x * g + b)
        return x


def test_the_report_has_a_line_on_a_long_chain_of_multiplications_that_are_left_alone():
    for depth, told in ((300, True), (4, False)):
        scaled = unit_scale(Chain(depth))
        scaled(torch.randn(2, 8))
        lines = [reason for reason in left_alone(scaled).values() if "a chain of 300 multiplications" in reason]
        assert bool(lines) == told


class KeepsTable(nn.Module):
    """Rotary positions that the first call computes and keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.rand(4), persistent=False)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None:
            table = torch.einsum("i, j -> i j", torch.arange(len(x)) + 0.3, self.frequencies)
            self.register_buffer("table", table, persistent=False)
        return self.linear(x) * self.table.cos()


def test_a_table_of_positions_is_not_rounded_to_a_format():
    model, x = KeepsTable(), torch.randn(20, 4)
    rounded = simulate_fp8(unit_scale(model))
    torch.manual_seed(0)
    first = rounded(x)
    model(x)
    assert torch.equal(rounded.table, model.table)
    torch.manual_seed(0)
    assert torch.equal(rounded(x), first)


class WithoutParameters(nn.Module):
    """A transform of signals, say: its weight is a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("w", torch.randn(4, 4))

    def forward(self, x):
        return x @ self.w


def test_a_checkpoint_of_a_unit_scaled_module_without_parameters_is_loaded(tmp_path):
    x, scaled, fresh = torch.randn(2, 4), unit_scale(WithoutParameters()), unit_scale(WithoutParameters())
    y = scaled(x)
    plumb.checkpoint.save(tmp_path, scaled, step=1)
    plumb.checkpoint.load(tmp_path, fresh)
    assert torch.equal(fresh(x), y)


def test_the_report_says_that_a_recurrent_layer_of_free_sizes_has_the_factors_of_the_example():
    net, x = nn.GRU(4, 4, batch_first=True), torch.randn(3, 5, 4)
    for shapes, free in ((None, False), (({0: torch.export.Dim("rows")},), True)):
        graph = unit_scale(plumb.capture(net, x, dynamic_shapes=shapes))
        assert ("its factors are those of the example's sizes" in str(plumb.report(graph))) == free
