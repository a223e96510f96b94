"""Every transformed model goes through torch.compile as it is: one graph, and what it computes without."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from transform_models import MODELS
from zoo import Recurrent, r

from plumb.transforms import simulate_format, simulate_fp8, track_scales, unit_scale


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8)

    def forward(self, x):
        return pad_packed_sequence(self.rnn(pack_padded_sequence(x, torch.tensor([4, 3])))[0])[0]


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.rnn = nn.GRUCell(6, 8), nn.RNNCell(6, 8, nonlinearity="relu")

    def forward(self, x):
        a = b = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            a, b = self.gru(x[:, t], a), self.rnn(x[:, t], b)
        return a, b


class Prefix(nn.Module):
    """Computes with its input before any parameter comes in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        before = x.sin()
        return self.layer(before).relu()


def padded_encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def fp8(module):
    # simulate_fp8 to nearest: compiled code has its own order of backward, so it would draw other random numbers.
    return simulate_format(module, "E4M3-RN", "E5M2-RN")


TRANSFORMS = {
    "unit_scale": unit_scale,
    "simulate_fp8": fp8,
    "track_scales": track_scales,
    "both": lambda m: fp8(unit_scale(m)),
}
# Models that others stand for, or that take long to compile, in one combination alone; few in all.
ONCE = {"GPT tied", "GPT with dropout", "LSTM", "MoE", "ViT", "TransformerDecoderLayer", "Transformer", "bf16", "two-branch add",
        "GRU", "Llama", "ConvNet 1d", "ConvNet eval", "U-net", "autocast", "root Linear", "GPT-2 of transformers",
        "Llama of transformers", "BERT of transformers"}  # fmt: skip
ALL = {"GPT", "ConvNet training", "in place", "matmul and bmm", "shared"}
ALSO = {
    "TransformerEncoder eval, padding": lambda: (
        padded_encoder(), (r(2, 5, 16),), {"src_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3]])}
    ),
    "RNN": lambda: (Recurrent(nn.RNN), (r(2, 5, 6),), {}),
    "LSTM alone": lambda: (nn.LSTM(6, 8), (r(5, 2, 6),), {}),
    "LSTM with projections": lambda: (nn.LSTM(6, 8, proj_size=4, bias=False), (r(5, 2, 6),), {}),
    "GRU and RNN cells": lambda: (Cells(), (r(2, 5, 6),), {}),
}  # fmt: skip
CASES = [
    (m, t) for m in MODELS for t in (["both"] if m in ONCE else TRANSFORMS if m in ALL else ["both", "track_scales"])
]
CASES += [(m, t) for m in ALSO for t in ("both", "unit_scale")]
# Eager runs these by fused operators, compiled code by the operators that they are made of; simulate_fp8 takes them apart.
FUSED = {"LSTM", "GRU", "RNN", "LSTM alone", "GRU and RNN cells"}


def made(name):
    torch.manual_seed(0)
    model, args, kwargs = {**MODELS, **ALSO}[name]()
    if isinstance(model, Recurrent):
        model.rnn.dropout = 0.0  # the fused operator draws other random numbers than its parts
    return model, args, kwargs


def fresh(tree, grad=True):
    def copied(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().clone().requires_grad_(grad and x.is_floating_point())

    return pytree.tree_map(copied, tree)


def run(called, module, args, kwargs, grad=True):
    """Outputs, gradients of inputs and parameters, buffers afterwards."""
    args, kwargs = fresh((args, kwargs), grad)
    module.zero_grad()
    torch.manual_seed(1)
    out = [t for t in pytree.tree_leaves(called(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    sum(t.float().square().mean() for t in out if t.is_floating_point()).backward()
    inputs = [x.grad for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return [*out, *inputs, *(p.grad for p in module.parameters()), *module.buffers()]


def same(ours, theirs, exact, **close):
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs)):
        if a is None or b is None or exact:
            assert (a is None and b is None) or torch.equal(a, b), i
        else:
            torch.testing.assert_close(a, b, **close)


def metrics(module):
    return {n.name: n.meta["metrics"] for n in module.scales_graph().nodes if "metrics" in n.meta}


@pytest.mark.parametrize("name, transform", CASES)
def test_one_graph_with_the_same_bits(name, transform):
    if torch.__version__ < (2, 12) and name.startswith("LSTM ") and transform == "unit_scale":
        pytest.skip("torch 2.11 compiles no nn.LSTM that trains")
    torch._dynamo.reset()
    model, args, kwargs = made(name)
    plain = TRANSFORMS[transform](model)
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    exact = name not in FUSED or transform in ("both", "simulate_fp8")
    same(run(compiled, other, args, kwargs), run(plain, plain, args, kwargs), exact, rtol=1e-5, atol=1e-6)
    if transform == "track_scales":
        ours, theirs = metrics(other), metrics(plain)
        assert ours.keys() == theirs.keys()
        for n, expected in theirs.items():
            assert ours[n].fwd.numel == expected.fwd.numel
            assert ours[n].fwd.std == pytest.approx(expected.fwd.std, rel=1e-5, nan_ok=True), n
            assert (ours[n].bwd is None) == (expected.bwd is None), n
            if expected.bwd:
                assert ours[n].bwd.std == pytest.approx(expected.bwd.std, rel=1e-4, abs=1e-12, nan_ok=True), n


@pytest.mark.parametrize("name", ["MoE", "RNN", "ConvNet training", "GPT"])
def test_other_sizes_are_compiled_again(name):
    torch._dynamo.reset()
    model, args, kwargs = made(name)
    plain = fp8(unit_scale(model))
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for rows in (None, 3, 5, 3):
        given = pytree.tree_map(lambda x: x if rows is None else torch.cat([x] * 3)[:rows], args)  # noqa: B023
        same(run(compiled, other, given, kwargs), run(plain, plain, given, kwargs), exact=True)


# Inductor sums in another order: equal but for rounding.
@pytest.mark.parametrize("name, transform", [("root Sequential", "track_scales"), ("matmul and bmm", "unit_scale")])
def test_inductor_gives_the_same_numbers(name, transform):
    torch._dynamo.reset()
    model, args, kwargs = made(name)
    plain = TRANSFORMS[transform](model)
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, fullgraph=True)
    same(run(compiled, other, args, kwargs), run(plain, plain, args, kwargs), exact=False, rtol=1e-4, atol=1e-5)
    if transform == "track_scales":
        ours, theirs = metrics(other), metrics(plain)
        assert ours.keys() == theirs.keys()
        assert all((ours[n].bwd is None) == (theirs[n].bwd is None) for n in theirs)


def test_only_gradients_of_inputs_that_ask_for_none_are_not_measured():
    torch._dynamo.reset()
    plain = track_scales(Prefix())
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for asked, missing in ((False, {"x", "before"}), (True, set())):
        for called, module in ((plain, plain), (compiled, other)):
            run(called, module, (torch.randn(3, 4),), {}, grad=asked)
        assert all(m.bwd for m in metrics(plain).values())
        assert {n for n, m in metrics(other).items() if m.bwd is None} == missing


def test_packed_sequences_are_refused_by_name():
    torch._dynamo.reset()
    model, x = simulate_fp8(Packed()), torch.randn(4, 2, 6)
    with pytest.raises(Exception, match="sizes of what aten::_pack_padded_sequence returns are values of a tensor"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert model(x).shape == (4, 2, 8)
    assert torch._dynamo.config.allow_rnn is False


def test_a_condition_that_was_checked_is_checked_in_compiled_code():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            if (x <= 0).any():
                raise ValueError("not positive")
            return self.layer(x)

    torch._dynamo.reset()
    model = unit_scale(Checked())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 4)
    assert torch.equal(compiled(x), model(x))
    with pytest.raises(RuntimeError, match="a check that the model makes in its forward fails"):
        compiled(-x)
    assert torch.equal(compiled(2 * x), model(2 * x))


def test_sizes_that_depend_on_values_are_refused_in_one_graph_and_run_uncompiled_in_several():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            rows = (x[:, 0] > 0).nonzero().squeeze(1)
            return torch.zeros_like(x).index_add(0, rows, self.layer(x[rows]))

    torch._dynamo.reset()
    model, x = unit_scale(Chosen()), torch.randn(8, 4)
    with pytest.raises(Exception, match="sizes of what some operators of the forward return are values of a tensor"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for x in (torch.randn(8, 4), torch.randn(8, 4)):
        assert torch.equal(compiled(x), model(x))
