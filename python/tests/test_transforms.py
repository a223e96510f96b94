"""Transforms of Python modules."""

import copy
import pickle
import re

import pytest
import torch
import zoo
from operator_errors import OPERATOR_ERROR
from torch import nn

import plumb
from plumb.transforms import (
    prune_non_float_tensors,
    prune_same_scale_tensors,
    report,
    simulate_format,
    simulate_fp8,
    track_scales,
    unit_scale,
)


def gpt():
    torch.manual_seed(0)
    return zoo.GPT(vocab=64, d=32, layers=2), torch.randint(64, (4, 16)), torch.randint(64, (4, 16))


def loss_of(model, ids, targets):
    return model(ids, targets)[1]


def test_unit_scale_copies_rescales_and_reports():
    model, ids, targets = gpt()
    before = copy.deepcopy(model.state_dict())
    scaled = unit_scale(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "the user's module is left alone"
    assert type(scaled) is type(model) and list(scaled.state_dict())[:-1] == list(before)
    assert abs(scaled.blocks[0].qkv.weight.std() - 1) < 1e-5 and scaled.blocks[0].qkv.bias.abs().max() == 0
    loss_of(scaled, ids, targets).backward()
    text = str(report(scaled))
    assert "aten::linear -> plumb::linear" in text and "tau=0.01" in text and "tau=0.5" in text
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in scaled.parameters())


def test_a_root_linear_and_a_sequential_are_scaled_like_any_other():
    x = torch.randn(256, 64)
    for model in (nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))):
        y = unit_scale(model)(x)
        assert 0.8 < y.std() < 1.2


def test_recaptures_for_other_shapes_and_modes_without_scaling_again():
    model = unit_scale(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)))
    weights = [p.clone() for p in model.parameters()]
    for n in (2, 3, 2):
        model.train()(torch.randn(n, 16))
        model.eval()(torch.randn(n, 16))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert len(model.forward._cache) == 4
    x = torch.randn(2, 16)
    assert torch.equal(model(x), model(x)), "eval has no dropout"


def test_trains():
    model, ids, targets = gpt()
    model = simulate_format(unit_scale(model), "e4m3fn-RN", "e5m2-RN")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    first = loss_of(model, ids, targets).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, ids, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < first - 1


def test_plumbs_optimizers_take_a_unit_scaled_model_as_it_is():
    model, ids, targets = gpt()
    model = unit_scale(model)
    optimizer = plumb.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model, ids, targets).backward()
    optimizer.step()


def test_simulate_fp8_rounds_and_keeps_the_rest():
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    x = torch.randn(4, 16)
    y = simulate_format(model, "e4m3fn-RN", "none")(x)
    round_ = lambda t: torch.ops.plumb.quantise(t, "e4m3fn-RN")  # noqa: E731
    assert torch.equal(y, nn.functional.linear(round_(x), round_(model.weight), model.bias))
    assert torch.isfinite(simulate_fp8(model)(x)).all()


@torch.library.custom_op("transforms_py::product", mutates_args=())
def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


@pytest.mark.parametrize(("product", "what"), [(_Product.apply, "custom autograd function"), (_product, "does not know")])
def test_simulate_format_says_which_operators_may_hide_products(product, what):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return product(x, self.w)

    model = simulate_fp8(Model())
    x = torch.randn(4, 8)
    assert torch.equal(model(x), x @ model.w)
    (entry,) = report(model)[0]["entries"]
    assert entry["kind"] == "left_alone" and what in entry["reason"] and "not rounded" in entry["reason"]


@pytest.mark.parametrize("nest", range(6))
def test_transforms_nest_in_every_order(nest):
    import itertools

    model, ids, targets = gpt()
    fp8 = lambda m: simulate_format(m, "e4m3fn-RN", "e5m2-RN")  # noqa: E731
    expected = loss_of(fp8(unit_scale(model)), ids, targets)
    order = list(itertools.permutations([unit_scale, fp8, track_scales]))[nest]
    for transform in order:
        model = transform(model)
    assert torch.equal(loss_of(model, ids, targets), expected)


def test_track_scales_measures_tensors_and_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 8)
    tracked = track_scales(model)
    y = tracked(x)
    y.sum().backward()
    assert not x.requires_grad and torch.equal(y, model(x))
    graph = tracked.scales_graph()
    relu = next(n for n in graph.nodes if "relu" in n.name)
    hidden = torch.relu(model[0](x))
    assert relu.meta["metrics"].fwd.std == pytest.approx(hidden.std().item(), rel=1e-5)
    assert relu.meta["metrics"].bwd.abs_max == pytest.approx((torch.ones(16, 2) @ model[2].weight).abs().max().item(), rel=1e-5)
    pruned = prune_same_scale_tensors(prune_non_float_tensors(graph))
    assert [n.name for n in pruned.nodes] == [n.name for n in graph.nodes], "every tensor here has a scale of its own"


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_track_scales_measures_the_sparse_gradient_of_an_embedding(max_norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True, max_norm=max_norm), nn.Linear(8, 3)).cpu()  # few devices have sparse tensors
    tracked = track_scales(model)
    tracked(torch.randint(0, 50, (4, 6), device="cpu")).square().sum().backward()
    gradient = tracked[0].weight.grad
    assert gradient.is_sparse
    measured = {n.name: n.meta["metrics"] for n in tracked.scales_graph().nodes if n.meta.get("metrics")}["_0_weight"].bwd
    dense = gradient.to_dense()
    assert measured.numel == 400 and measured.abs_min == 0
    assert measured.abs_max == dense.abs().max().item()
    assert measured.std == pytest.approx(dense.std().item(), rel=1e-5)


def test_transformed_modules_copy_pickle_save_and_move(tmp_path):
    model, ids, targets = gpt()
    scaled = track_scales(unit_scale(model))
    expected = loss_of(scaled, ids, targets)
    for other in (copy.deepcopy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert torch.equal(loss_of(other, ids, targets), expected)
        assert other.blocks[0].qkv.weight is not scaled.blocks[0].qkv.weight
    torch.save(scaled.state_dict(), tmp_path / "w.pt")
    scaled.load_state_dict(torch.load(tmp_path / "w.pt"))
    double = copy.deepcopy(scaled).double()
    assert loss_of(double, ids, targets).dtype == torch.float64


def test_replace_takes_functions_operators_and_names():
    x = torch.randn(64, 32)
    for key in (nn.functional.gelu, torch.ops.aten.gelu, "aten::gelu"):
        model = unit_scale(nn.Sequential(nn.Linear(32, 32), nn.GELU()), replace={key: "aten::relu"})
        assert torch.equal(model(x), torch.relu(torch.ops.plumb.linear(x, model[0].weight, None, constraint=None)))


@pytest.mark.parametrize("name", [*zoo.MODELS, *zoo.TRANSFORMERS])
def test_every_model_of_the_zoo_takes_all_transforms(name):
    torch.manual_seed(0)
    model, args, kwargs = {**zoo.MODELS, **zoo.TRANSFORMERS}[name]()
    tracked = track_scales(simulate_fp8(unit_scale(model)))
    out = tracked(*args, **kwargs)
    loss = sum(t.float().mean() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad)
    loss.backward()
    assert any(n.meta.get("metrics") for n in tracked.scales_graph().nodes)
    assert len(report(tracked)) == 3


def test_a_report_says_in_a_line_what_was_done_and_is_a_table_in_a_notebook():
    model, ids, targets = gpt()
    scaled = unit_scale(model)
    loss_of(scaled, ids, targets)
    said = report(scaled)
    assert re.fullmatch(r"<Report of unit_scale: \d+ replaced, .*; print\(\) shows every entry>", repr(said))
    assert said._repr_html_().count("<tr>") == 1 + len(said[0]["entries"])
    assert str(report(torch.compile(scaled, backend="eager"))) == str(said)
    said[0]["entries"][0]["node"] = "<script>"
    assert "&lt;script&gt;" in said._repr_html_() and "<script>" not in said._repr_html_()


ROUNDED = {  # what has no forward-mode derivative and could return its values without one
    "quantise": lambda x: torch.ops.plumb.quantise(x, "e4m3fn"),
    "simulate_format": lambda x: torch.ops.plumb.simulate_format(x, "e4m3fn", "e5m2"),
    "pointwise": lambda x: torch.ops.plumb.pointwise([x, x], "add #0 #1; neg $0"),
    "residual_split": lambda x: plumb.functional.residual_split(x)[0],
    "residual_add": lambda x: plumb.functional.residual_add(x, x),
    "rescale": plumb.functional.relu,
    "scale_fwd": lambda x: plumb.scale.scale_fwd(x, 2.0),
    "scale_bwd": lambda x: plumb.scale.scale_bwd(x, 2.0),
    "a rounded model": simulate_format(nn.Linear(8, 8), "e4m3fn", "e5m2"),
    "a tracked one": track_scales(simulate_format(nn.Linear(8, 8), "e4m3fn", "e5m2")),
}


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_tangent_of_forward_mode_is_refused_where_it_would_be_lost(name, needed):
    with torch.autograd.forward_ad.dual_level():
        given = torch.autograd.forward_ad.make_dual(torch.randn(4, 8).requires_grad_(needed), torch.randn(4, 8))
        with pytest.raises(OPERATOR_ERROR, match="has no forward-mode derivative"):
            ROUNDED[name](given)


def test_tracking_keeps_tangents_of_forward_mode():
    net, x, t = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    tangents = []
    for model in (net, track_scales(net)):
        for needed in (False, True):
            with torch.autograd.forward_ad.dual_level():
                given = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(needed), t)
                tangents.append(torch.autograd.forward_ad.unpack_dual(model(given)).tangent)
    for tangent in tangents[1:]:
        assert torch.equal(tangent, tangents[0])


def test_sparse_inputs_of_every_layout_are_tracked():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, graph, x):
            return graph @ self.layer(x)

    dense, x, model = torch.eye(3), torch.randn(3, 4), Spread()
    for graph in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        tracked = track_scales(model)
        y = tracked(graph, x)
        assert torch.equal(y, model(graph, x))
        y.sum().backward()
        assert "layer" in str([n for n in tracked.scales_graph().nodes if "metrics" in n.meta])


def test_gradients_of_several_calls_are_summed_call_by_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(self.layer(x).tanh()).tanh()

    model = Twice()
    tracked, inputs = track_scales(model), [torch.randn(5, 6) for _ in range(2)]
    of_calls = []
    for x in reversed(inputs):
        of_calls.append(torch.autograd.grad(model(x).sum(), model.layer.weight)[0])
        assert torch.equal(torch.autograd.grad(tracked(x).sum(), tracked.layer.weight)[0], of_calls[-1])
    sum(tracked(x).sum() for x in inputs).backward()
    assert torch.equal(tracked.layer.weight.grad, of_calls[0] + of_calls[1])


def test_what_a_frozen_module_returns_requires_a_gradient_where_it_is_tracked():
    frozen, x = nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4)
    tracked = track_scales(frozen)
    y = tracked(x)
    assert torch.equal(y, frozen(x)) and y.requires_grad and not x.requires_grad
    y.sum().backward()
    assert x.grad is None and any(n.meta["metrics"].bwd for n in tracked.scales_graph().nodes if "metrics" in n.meta)
    with torch.no_grad():
        assert not tracked(x).requires_grad


def test_a_first_call_with_other_parameters_never_scales_those_and_names_the_remedy():
    class Bare(nn.Module):  # whose weight no layer has, so that the first graph scales it
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4) * 0.2)

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    torch.manual_seed(0)
    module, x = unit_scale(Bare()), torch.randn(3, 4)
    for given in (module.weight.detach().clone(), module.weight * 1.0):
        before = given.detach().clone()
        with pytest.raises(plumb.Error, match="'weight'.*functional_call has (.|\n)*call the unit-scaled module once, on a batch"):
            torch.func.functional_call(module, {"weight": given}, (x,))
        assert torch.equal(given, before)
    y = module(x)
    assert abs(module.weight.std() - 1) < 1e-5
    assert torch.equal(torch.func.functional_call(module, {"weight": module.weight.detach().clone()}, (x,)), y)


class Checked(nn.Module):
    """Convolutions, products and an einsum, of which the last is an exponent, behind which torch checks values."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(16 * 64, 8), nn.Linear(16 * 64, 8)
        self.mix = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.decoder = nn.Linear(8, 64)

    def forward(self, x):
        h = self.encoder(x).flatten(1)
        sigma = torch.exp(0.5 * torch.einsum("bi,ij->bj", self.log_variance(h), self.mix))
        z = torch.distributions.Normal(self.mean(h), sigma).rsample()
        return nn.functional.binary_cross_entropy(torch.sigmoid(self.decoder(z)), x.flatten(1))


def test_values_that_a_forward_checks_do_not_grow_while_a_unit_scaled_module_is_captured():
    torch.manual_seed(0)
    x = torch.rand(4, 1, 8, 8)
    scaled = unit_scale(Checked())
    loss = scaled(x)
    loss.backward()
    assert loss < 2 and all(torch.isfinite(p.grad).all() for p in scaled.parameters())


def test_capturing_a_unit_scaled_module_writes_no_tensor_of_which_an_einsum_is_a_view():
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("shift", torch.randn(4, 4) * 9)

        def forward(self, x):
            return super().forward(x) + torch.einsum("ij->ji", self.shift)

    torch.manual_seed(0)
    module = Shifted()
    scaled = unit_scale(module)
    scaled(torch.randn(4, 4)).sum().backward()
    assert torch.equal(scaled.shift, module.shift)
