"""use_fp8 with a recipe: casts with scale factors as torchao and ml_dtypes make them."""

import sys
from unittest.mock import MagicMock

import pytest
import torch
import zoo
from command import run
from torch import nn

import plumb
from plumb.transforms import report, simulate_format, use_fp8

RECIPES = ["tensorwise", "rowwise", "blocks128", "mxfp8", "mxfp8-up"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
cast = torch.ops.plumb.fp8_cast


def values():
    """Matrices with large and small rows, zeros, ties, subnormals and infinity."""
    torch.manual_seed(0)
    x = torch.randn(256, 384) * torch.exp2(torch.randint(-20, 20, (256, 1)).float())
    x[3], x[5, :128], x[7, 0] = 0, 0, 1e30
    x[9] = torch.arange(384) / 256
    x[11] *= 2.0**-130
    return {"mixed": x, "half": x[:128].clamp(-6e4, 6e4).bfloat16(), "odd": torch.randn(5, 70)}


@pytest.mark.parametrize("fmt, dtype", [("e4m3fn", E4M3), ("e5m2", E5M2)])
def test_tensorwise_and_rowwise_casts_are_torchaos(fmt, dtype):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    config = pytest.importorskip("torchao.float8.config")
    for x in values().values():
        scale = utils.tensor_to_scale(x, dtype)
        codes, inverse = cast(x, fmt, "tensorwise")
        assert torch.equal(codes, utils.to_fp8_saturated(x.float() * scale, dtype).view(torch.uint8))
        assert torch.equal(inverse, scale.reciprocal())
        for dim in (0, 1):
            scale = utils.tensor_to_scale(
                x, dtype, scaling_granularity=config.ScalingGranularity.AXISWISE, axiswise_dim=dim,
                round_scales_to_power_of_2=True,
            )  # fmt: skip
            codes, inverse = cast(x, fmt, "rowwise", dim)
            assert torch.equal(codes, utils.to_fp8_saturated(x.float() * scale, dtype).view(torch.uint8))
            assert torch.equal(inverse.flatten(), scale.reciprocal().flatten())


def test_casts_of_128_blocks_are_torchaos(monkeypatch):
    pytest.importorskip("torchao")
    for name in ("triton", "triton.language"):  # imports of torchao's GPU kernels, beside which its casts by torch stand
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, MagicMock())
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = values()["mixed"]
    for weight, theirs in (
        (False, kernels.torch_blockwise_scale_act_quant_lhs),
        (True, kernels.torch_blockwise_scale_weight_quant),
    ):
        expected, inverse = theirs(x)
        codes, scales = cast(x, "e4m3fn", "blocks128", 1, weight)
        assert torch.equal(codes, expected.view(torch.uint8))
        assert torch.equal(scales, inverse.float())


@pytest.mark.parametrize("fmt, dtype", [("e4m3fn", E4M3), ("e5m2", E5M2)])
@pytest.mark.parametrize("recipe, mode", [("mxfp8", "FLOOR"), ("mxfp8-up", "RCEIL")])
def test_mx_casts_are_torchaos(fmt, dtype, recipe, mode):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    for name in ("mixed", "half"):
        x = values()[name]
        scale, expected = mx.to_mx(x, dtype, 32, config.ScaleCalculationMode[mode])
        codes, scales = cast(x, fmt, recipe)
        assert torch.equal(codes, expected.to(dtype).view(torch.uint8)), name
        theirs = torch.exp2(scale.view(torch.uint8).float() - 127).reshape(scales.shape)
        ordinary = theirs > 2.0**-126  # what stands for less is one there
        assert torch.equal(scales[ordinary], theirs[ordinary])


def test_mx_codes_are_those_of_ml_dtypes_on_scaled_values():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = values()["mixed"]
    codes, scales = cast(x, "e4m3fn", "mxfp8")
    scaled = (x.view(256, -1, 32) / scales.unsqueeze(-1)).clamp(-448, 448).view(256, -1)
    assert (codes.numpy() == scaled.numpy().astype(ml_dtypes.float8_e4m3fn).view("uint8")).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_multiplies_the_casts_in_all_three_products(recipe):
    torch.manual_seed(0)
    layer, x = nn.Linear(160, 96), torch.randn(2, 40, 160, requires_grad=True)
    y = use_fp8(layer, "e4m3fn", "e5m2", recipe=recipe)(x)
    g = torch.randn_like(y)
    y.backward(g)

    def rounded(matrix, fmt, dim, weight=False):
        matrix = matrix.detach()
        codes, scales = cast(matrix, fmt, recipe, dim, weight)
        lines = torch.ops.plumb.decode(codes, fmt)
        lines = lines.t() if dim == 0 else lines
        if scales.dim() == 0:
            lines = lines * scales
        else:
            length = {"rowwise": lines.shape[1], "blocks128": 128}.get(recipe, 32)
            wide = scales.repeat_interleave(length, 1)[:, : lines.shape[1]]
            if recipe == "blocks128" and weight:
                wide = wide.repeat_interleave(128, 0)[: lines.shape[0]]
            lines = lines * wide
        return lines.t() if dim == 0 else lines

    rows, grads, w = x.reshape(-1, 160), g.reshape(-1, 96), layer.weight
    expected = rounded(rows, "e4m3fn", 1) @ rounded(w, "e4m3fn", 1, True).t() + layer.bias
    assert torch.allclose(y.reshape(-1, 96), expected, atol=1e-5)
    assert torch.allclose(x.grad.reshape(-1, 160), rounded(grads, "e5m2", 1) @ rounded(w, "e4m3fn", 0, True), atol=1e-4)


@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_trains(recipe):
    torch.manual_seed(0)
    net = use_fp8(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), recipe=recipe)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x = torch.randn(64, 32)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (net(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    op = "delayed" if recipe == "delayed" else "scaled"
    assert f"plumb::fp8_{op}_linear: {recipe} scales" in str(report(net))


def test_other_products_are_left_alone_and_unknown_recipes_refused():
    conv = use_fp8(nn.Conv2d(3, 4, 3), recipe="mxfp8")
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(conv(x), nn.functional.conv2d(x, conv.weight, conv.bias))
    assert "recipes are for linear layers" in str(report(conv))
    with pytest.raises(plumb.Error, match="no recipe for FP8") as e:
        use_fp8(nn.Linear(4, 4), recipe="delayedd")
    assert "tensorwise" in e.value.remedy
    wide = use_fp8(nn.Linear(4, 4).double(), recipe="rowwise")
    with pytest.raises(plumb.Error, match="node .*not .4, 4. of Double\n.*\n  try: convert the model"):
        wide(torch.randn(2, 4).double())
    wide.float()(torch.randn(2, 4))


class Delayed:
    """A tensor's delayed scaling, by the formulas of Transformer Engine's recipe.DelayedScaling (algo "max", margin 0)."""

    def __init__(self, length, dtype):
        self.scale, self.history, self.dtype = torch.tensor(1.0), torch.zeros(length), dtype
        self.top = torch.finfo(dtype).max

    def __call__(self, x):
        x = x.detach()
        cast = (x.float() * self.scale).clamp(-self.top, self.top).to(self.dtype).float() * (1 / self.scale)
        self.history = torch.cat([x.float().abs().max().view(1), self.history[:-1]])
        amax = self.history.max()
        if amax > 0 and amax.isfinite():
            scale = torch.tensor(self.top) / amax  # (a plain number would be multiplied with the reciprocal)
            self.scale = torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)
        return cast.to(x.dtype)

    @property
    def state(self):
        return torch.cat([self.scale.view(1), self.history])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delayed_casts_are_those_of_the_published_formulas(dtype):
    torch.manual_seed(0)
    layer = use_fp8(nn.Linear(48, 24, dtype=dtype), recipe="delayed", history=3)
    of_x, of_w, of_g = Delayed(3, E4M3), Delayed(3, E4M3), Delayed(3, E5M2)
    for step, size in enumerate([1.0, 300.0, 0.0, 1e-3, 1e-42, 1.0, torch.inf, 1.0, 5.0, 7.0, 1.0]):
        x = torch.randn(4, 10, 48).to(dtype) * (size if size != torch.inf else 1)
        if size == torch.inf:
            x[0, 0, 0] = size
        x.requires_grad_()
        g = torch.randn(4, 10, 24).to(dtype) * 2.0**-step
        y = layer(x)
        layer.weight.grad = layer.bias.grad = None
        y.backward(g)
        xs, ws, gs = of_x(x).view(-1, 48), of_w(layer.weight), of_g(g).view(-1, 24)
        same = dict(rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(y.detach().view(-1, 24), torch.addmm(layer.bias.detach(), xs, ws.t()), **same)
        torch.testing.assert_close(x.grad.view(-1, 48), gs @ ws, **same)
        torch.testing.assert_close(layer.weight.grad, gs.t() @ xs, **same)
        assert torch.equal(layer.bias.grad, g.view(-1, 24).sum(0))
        assert torch.equal(layer.weight_fp8_state, torch.stack([of_x.state, of_w.state, of_g.state]))
        with torch.no_grad():
            layer.weight *= 1.5
    layer.eval()
    before = layer.weight_fp8_state.clone()
    layer(torch.randn(2, 48, dtype=dtype) * 1e4)
    assert torch.equal(layer.weight_fp8_state, before)


def steps_of(net, optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (net(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.detach()


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def test_the_state_of_delayed_scaling_travels_with_state_dict_copies_and_files(tmp_path):
    made = lambda net: (net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))  # noqa: E731
    net, optimizer = made(use_fp8(two_layers(), recipe="delayed", history=4))
    assert {"0.weight_fp8_state", "2.weight_fp8_state"} < set(net.state_dict())
    steps_of(net, optimizer, 0, 3)
    torch.save([net.state_dict(), optimizer.state_dict()], tmp_path / "at3.pt")
    graph = plumb.capture(net, torch.randn(16, 8))
    plumb.save_pt2(graph, tmp_path / "at3.pt2")
    expected = steps_of(net, optimizer, 3, 6)

    resumed, optimizer = made(use_fp8(two_layers(), recipe="delayed", history=4))
    for part, state in zip((resumed, optimizer), torch.load(tmp_path / "at3.pt"), strict=True):
        part.load_state_dict(state)
    assert torch.equal(steps_of(resumed, optimizer, 3, 6), expected)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), resumed.state_dict().values(), strict=True))

    loaded, optimizer = made(plumb.load_pt2(tmp_path / "at3.pt2"))
    optimizer.load_state_dict(torch.load(tmp_path / "at3.pt")[1])
    assert torch.equal(steps_of(loaded, optimizer, 3, 6), expected)


def test_delayed_scaling_says_what_it_cannot_take():
    with pytest.raises(plumb.Error, match="history of 0"):
        use_fp8(nn.Linear(4, 4), recipe="delayed", history=0)
    net = use_fp8(two_layers(), recipe="delayed", exclude=["2"])
    net(torch.randn(4, 8))
    assert "2.weight_fp8_state" not in net.state_dict() and "excluded" in str(report(net))
    with pytest.raises(plumb.Error, match="change the model's dtype before use_fp8"):
        net.bfloat16()(torch.randn(4, 8, dtype=torch.bfloat16))


def trained(program, folder, *options):
    """Loss and norm of each step of `plumb train`."""
    words = ["train", program, "--data", "tokens.bin", "--json", "--steps", "4", "--microbatches", "4", "--threads", "1"]
    return [(told["loss"], told["norm"]) for told in run([*words, *options], folder) if "step" in told and "loss" in told]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(i * i % 61 for i in range(4000)))
    return tmp_path


def save_gpt(folder, name, transform):
    torch.manual_seed(0)
    plumb.save_pt2(
        plumb.capture(transform(zoo.GPT(vocab=64, d=32, layers=2)), torch.randint(64, (2, 16))), folder / name
    )


def test_delayed_scaling_has_the_same_bits_in_every_layout(folder):
    save_gpt(folder, "gpt.pt2", lambda net: use_fp8(net, recipe="delayed", history=6))
    expected = trained("gpt.pt2", folder)
    for layout in (["--stages", "2"], ["--stages", "2", "--schedule", "ZBH1"]):
        assert trained("gpt.pt2", folder, *layout) == expected, layout
    groups = ["--data-parallel", "2", "--gradient-groups", "4"]
    assert trained("gpt.pt2", folder, *groups, "--stages", "2") == trained("gpt.pt2", folder, *groups)


def test_autocast_of_the_command_has_the_bits_of_the_simulation(folder):
    save_gpt(folder, "fp8.pt2", use_fp8)
    save_gpt(folder, "simulated.pt2", lambda net: simulate_format(net, "e4m3fn-RN", "e5m2-RN"))
    assert trained("fp8.pt2", folder, "--autocast", "bf16") == trained("simulated.pt2", folder, "--autocast", "bf16")
