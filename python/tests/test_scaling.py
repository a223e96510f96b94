import copy
import math
import pickle

import plumb.functional as U
import pytest
import torch
import torch.nn.functional as F
from operator_errors import OPERATOR_ERROR
from torch import nn
from torch.library import opcheck

import plumb

ops = torch.ops.plumb


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1472)


def leaf(*size, dtype=torch.float64):
    return torch.randn(size, dtype=dtype, requires_grad=True)


def assert_scaled(fused, plain, inputs, output_scale, grad_scales):
    y, reference = fused(*inputs), plain(*inputs)
    grad = torch.randn_like(y)
    torch.testing.assert_close(y, reference * output_scale)
    got = torch.autograd.grad(y, inputs, grad)
    expected = torch.autograd.grad(reference, inputs, grad)
    for g, e, scale in zip(got, expected, grad_scales):
        torch.testing.assert_close(g, e * scale)


def test_linear_scales_by_its_fans_and_its_batch():
    assert_scaled(
        lambda x, w, b: U.linear(x, w, b, constraint=None),
        F.linear,
        [leaf(2, 3, 16), leaf(24, 16), leaf(24)],
        16**-0.5,
        [24**-0.5, 6**-0.5, 6**-0.5],
    )


def test_a_constraint_may_be_a_function_of_the_users():
    assert_scaled(
        lambda x, w: U.linear(x, w, constraint=min),
        F.linear,
        [leaf(6, 16), leaf(24, 16)],
        24**-0.5,
        [24**-0.5, 6**-0.5],
    )
    for ours, theirs in ((U.gelu, F.gelu), (U.silu, F.silu), (U.tanh, torch.tanh), (U.sigmoid, torch.sigmoid)):
        assert_scaled(lambda x, f=ours: f(x, constraint=lambda out, grad: 3.0), theirs, [leaf(9)], 3.0, [3.0])
    with pytest.raises(OPERATOR_ERROR, match="no unit-scaled function of each element named 'relu6'"):
        torch.ops.plumb.elementwise_scales("relu6", 1.0)


@pytest.mark.parametrize("padding", [0, 2, (1,), "same", "valid"])
def test_conv1d_takes_numbers_tuples_and_names_for_its_padding(padding):
    x, w = leaf(2, 3, 20), leaf(4, 3, 4)
    torch.testing.assert_close(U.conv1d(x, w, padding=padding), F.conv1d(x, w, padding=padding) * 12**-0.5)


def test_convnet_functions_take_torchs_arguments():
    x, w = leaf(2, 4, 8, 8), leaf(4, 3, 2, 2)
    ratio = U.conv_transpose2d(x, w, stride=2) / F.conv_transpose2d(x, w, stride=2)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5))
    torch.testing.assert_close(U.avg_pool2d(x, 2), F.avg_pool2d(x, 2) * 2)
    assert U.max_pool2d(x, 3, stride=2, padding=1).shape == F.max_pool2d(x, 3, 2, 1).shape
    mean, var = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    U.batch_norm(x, mean, var, training=True)
    assert mean.abs().sum() > 0
    torch.testing.assert_close(U.group_norm(x, 2), F.group_norm(x, 2))


def test_cross_entropy_has_torchs_value_for_every_option():
    x, target = leaf(8, 5, 3), torch.randint(5, (8, 3))
    target[0, 0] = 2
    weight = torch.rand(5, dtype=torch.float64) + 0.5
    for reduction in ("mean", "sum", "none"):
        options = dict(weight=weight, ignore_index=2, label_smoothing=0.1, reduction=reduction)
        got = U.cross_entropy(x, target, mult=2.0, **options)
        torch.testing.assert_close(got, F.cross_entropy(2 * x, target, **options))


def test_values_of_another_width_leave_the_logits_alone():
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 16)
    ratios = U.scaled_dot_product_attention(q, k, v) / F.scaled_dot_product_attention(q, k, v, scale=1 / 8)
    torch.testing.assert_close(ratios, ratios[0, 0, 0].expand_as(ratios))


def test_dropout_leaves_evaluation_alone():
    x = leaf(10)
    assert U.dropout(x, 0.5, training=False) is x
    assert torch.equal(U.dropout(x, 0.0), x)


def test_dropout_of_nothing_hands_its_input_on_watched_or_not():
    for x in (torch.randn(8, 4), torch.randn(8, 4, requires_grad=True), torch.randn(8, 4, requires_grad=True) * 2):
        for p, training in ((0.0, True), (0.5, False)):
            y = plumb.functional.dropout(x, p, training)
            assert y.data_ptr() == x.data_ptr()
            if x.requires_grad:
                (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
                assert torch.equal(grad, torch.ones_like(x))


@pytest.mark.parametrize(
    "call",
    [
        lambda: U.linear(torch.ones(2, 3), torch.ones(4, 3), constraint="median"),
        lambda: U.dropout(torch.ones(3), inplace=True),
        lambda: U.embedding(torch.tensor([0]), torch.ones(3, 2), sparse=True),
        lambda: U.mse_loss(torch.ones(3), torch.ones(3), reduction="average"),
        lambda: U.mse_loss(torch.ones(3), torch.ones(2)),
        lambda: plumb.Parameter(torch.ones(3), "wait"),
        lambda: plumb.MHSA(10, 3, False),
        lambda: plumb.MHSA(10, 0, False),
        lambda: plumb.TransformerLayer(8, -2, 0.5, 0.5, False),
        lambda: plumb.TransformerStack(-1, hidden_size=8, heads=2, is_causal=True),
        lambda: plumb.DepthSequential(nn.Linear(2, 2)),
        lambda: plumb.optim.lr_scale_func_sgd("gmean"),
        lambda: plumb.optim.Adam([{"parameters": []}]),
    ],
)
def test_misuse_is_a_value_error(call):
    with pytest.raises(ValueError):
        call()


def test_parameters_keep_their_tags_through_copies_and_pickles():
    p = plumb.Parameter(torch.ones(3), "norm", 4)
    p.requires_grad_(False)
    for q in (copy.deepcopy(p), pickle.loads(pickle.dumps(p)), copy.deepcopy(pickle.loads(pickle.dumps(p)))):
        assert (q.mup_type, q.mup_scaling_depth, q.requires_grad) == ("norm", 4, False)
        assert torch.equal(q, p)
    assert not plumb.parameter.has_parameter_data(nn.Parameter(torch.ones(3)))


def test_learning_rates_follow_type_fan_in_and_depth():
    model = nn.Sequential(
        plumb.Embedding(64, 16), plumb.DepthSequential(plumb.Linear(16, 16, bias=True)), plumb.LinearReadout(16, 8)
    )
    groups = plumb.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01).param_groups
    assert [g["lr"] for g in groups] == pytest.approx([0.025, 0.025, 0.1, 0.1])
    assert [g["lr"] * g["weight_decay"] for g in groups] == pytest.approx([0.01] * 4)


class Stored(nn.Module):
    """Weights whose first dimension is not their outputs."""

    def __init__(self):
        super().__init__()
        self.product = nn.Parameter(torch.randn(16, 4))
        self.addmm, self.shift = nn.Parameter(torch.randn(4, 64)), nn.Parameter(torch.zeros(64))
        self.experts = nn.Parameter(torch.randn(3, 16, 64))
        self.batched = nn.Parameter(torch.randn(2, 16, 9))
        self.turned = nn.Parameter(torch.randn(25, 9))
        self.spread = nn.ConvTranspose1d(25, 9, 6, stride=3, bias=False)

    def forward(self, x):
        x = torch.addmm(self.shift, x @ self.product, self.addmm)
        x = F.linear(x, self.experts[0]) + F.linear(x, self.experts[2])
        x = torch.bmm(torch.stack([x, -x]), self.batched)
        x = (x @ self.turned.t()).sum(0)
        return self.spread(x.unsqueeze(-1))


def test_the_fan_in_is_what_an_output_sums_over_however_a_weight_is_stored():
    net = plumb.transforms.unit_scale(Stored())
    net(torch.randn(5, 16))
    optimizer = plumb.optim.AdamW(net.named_parameters(), lr=1.0)
    rates = {g["param_names"][0]: g["lr"] ** -2 for g in optimizer.param_groups}
    expected = {"product": 16, "addmm": 4, "experts": 64, "batched": 16, "turned": 9, "spread.weight": 25 * 6 / 3, "shift": 1}
    assert rates == pytest.approx(expected)
    assert {n for n, p in net.named_parameters() if p.mup_fan_in is None} == {"turned", "shift"}  # their shape says so


def test_parameters_may_come_by_name_and_without_dimensions():
    net = plumb.transforms.unit_scale(nn.Sequential(nn.Linear(16, 4)))
    net.gain = plumb.Parameter(torch.tensor(1.0), "norm")
    plain = plumb.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.1)
    named = plumb.optim.AdamW(net.named_parameters(), lr=0.5, weight_decay=0.1)
    assert [g["lr"] for g in named.param_groups] == [g["lr"] for g in plain.param_groups] == [0.5, 0.125, 0.5]
    assert [g["param_names"] for g in named.param_groups] == [["gain"], ["0.weight"], ["0.bias"]]
    sgd = plumb.optim.SGD([{"params": list(net.named_parameters())}], lr=0.5, readout_constraint="to_output_scale")
    assert [g["lr"] for g in sgd.param_groups] == [0.5, 2.0, 2.0]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "copied"])
def test_groups_that_are_added_later_are_scaled_as_the_first_ones(later):
    first, second = plumb.nn.Linear(64, 16, bias=True), plumb.nn.Linear(256, 16, bias=True)
    how = {"lr": 0.5, "weight_decay": 0.1}
    whole = plumb.optim.AdamW([*first.parameters(), *second.parameters()], **how)
    optimizer = plumb.optim.AdamW(first.parameters(), **how)
    if later:
        optimizer = copy.deepcopy(optimizer)
    optimizer.add_param_group({"params": list(second.parameters())})
    rates = [[(g["lr"], g["weight_decay"]) for g in o.param_groups] for o in (whole, optimizer)]
    assert rates[0] == rates[1] and len({lr for lr, _ in rates[0]}) == 3
    with pytest.raises(ValueError, match="no mup_type"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_decoder_trains():
    model = plumb.TransformerDecoder(32, 64, layers=2, heads=4, dropout_p=0.1)
    optimizer = plumb.optim.Adam(model.parameters(), lr=0.2)
    tokens = torch.arange(64).repeat(4, 1)
    first = model.loss(tokens)
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
    assert first.item() == pytest.approx(math.log(64), abs=1)
    assert loss < 0.7 * first


def f32(*size):
    return leaf(*size, dtype=torch.float32)


CASES = {
    "linear": lambda: (ops.linear, (f32(2, 3, 16), f32(24, 16), f32(24))),
    "linear_readout": lambda: (ops.linear_readout, (f32(3, 16), f32(24, 16))),
    "matmul": lambda: (ops.matmul, (f32(4, 8), f32(3, 8, 5))),
    "gelu": lambda: (ops.gelu, (f32(5, 7).t(),)),
    "silu": lambda: (ops.silu, (f32(5, 7),)),
    "silu_glu": lambda: (ops.silu_glu, (f32(5, 7), f32(5, 7))),
    "softmax": lambda: (ops.softmax, (f32(5, 7), -1)),
    "layer_norm": lambda: (ops.layer_norm, (f32(3, 4, 16), [16], f32(16), f32(16))),
    "rms_norm": lambda: (ops.rms_norm, (f32(3, 4, 16), [16], f32(16))),
    "embedding": lambda: (ops.embedding, (f32(50, 6), torch.randint(50, (4, 7)))),
    "add": lambda: (ops.add, (f32(4, 8), f32(8))),
    "residual_split": lambda: (ops.residual_split, (f32(5, 7), 0.5)),
    "residual_add": lambda: (ops.residual_add, (f32(5, 7), f32(5, 7), 0.5)),
    "scale_fwd": lambda: (ops.scale_fwd, (f32(5), 0.5)),
    "scale_bwd": lambda: (ops.scale_bwd, (f32(5), 0.5)),
    "attention": lambda: (ops.scaled_dot_product_attention, tuple(f32(2, 3, 16, 8) for _ in range(3))),
    "cross_entropy": lambda: (ops.cross_entropy, (f32(9, 11), torch.randint(11, (9,)))),
    "mse_loss": lambda: (ops.mse_loss, (f32(9, 11), f32(9, 11))),
    "conv1d": lambda: (ops.conv1d, (f32(3, 8, 30), f32(12, 8, 5), f32(12))),
    "conv2d": lambda: (ops.conv2d, (f32(3, 8, 9, 9), f32(12, 8, 3, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_torch_finds_nothing_wrong_with_the_operator(name):
    op, args = CASES[name]()
    opcheck(op.default, args)


def test_an_exported_program_keeps_the_operators_and_its_free_sizes():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = plumb.RMSNorm(16, elementwise_affine=True), plumb.MLP(16)

        def forward(self, x):
            return U.residual_apply(lambda r: self.mlp(self.norm(r)), x, 0.5)

    model = Model()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (torch.randn(3, 16),), dynamic_shapes=({0: batch},)).run_decompositions()
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"plumb.linear.default", "plumb.silu_glu.default", "plumb.rms_norm.default"} <= names
    x = torch.randn(7, 16)
    torch.testing.assert_close(program.module()(x), model(x))


def test_a_compiled_layer_has_the_same_gradients():
    layer = plumb.TransformerLayer(16, 2, 0.5, 0.5, is_causal=True)
    x = torch.randn(2, 8, 16)
    layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for p, e in zip(layer.parameters(), expected):
        torch.testing.assert_close(p.grad, e)


def test_autocast_casts_what_it_casts_for_torch():
    x, w = f32(4, 16), f32(8, 16)
    with torch.autocast(x.device.type, torch.bfloat16):
        y = U.linear(x, w)
        assert y.dtype == U.matmul(x, w.t()).dtype == torch.bfloat16
        assert U.softmax(y, -1).dtype == U.mse_loss(y, y.detach()).dtype == torch.float32
        assert U.gelu(y).dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), U.linear(x, w), rtol=2e-2, atol=2e-2)


def test_a_constraint_without_a_finite_scale_is_refused():
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"returns {wrong} for the scales .* return one finite scale"):
            U.linear(torch.ones(2, 3), torch.ones(4, 3), constraint=lambda *scales, wrong=wrong: wrong)
