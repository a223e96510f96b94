"""The numerics operators as torch sees them, and their values against ml_dtypes."""

import os
import pathlib

import ml_dtypes
import numpy as np
import pytest
import torch


def _load():
    if hasattr(torch.ops.plumb, "quantise"):
        return
    root = pathlib.Path(__file__).resolve().parents[2]
    library = os.environ.get("PLUMB_LIBRARY", str(root / "build" / "libplumb.so"))
    torch.ops.load_library(library)


_load()
ops = torch.ops.plumb

FORMATS = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m4": ml_dtypes.float8_e3m4,
    "e2m3fn": ml_dtypes.float6_e2m3fn,
    "e3m2fn": ml_dtypes.float6_e3m2fn,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}


def _all_halves():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_ml_dtypes_code(name):
    bits = ml_dtypes.finfo(FORMATS[name]).bits
    codes = np.arange(2**bits, dtype=np.uint8)
    expected = codes.view(FORMATS[name]).astype(np.float64)
    got = ops.decode(torch.from_numpy(codes), name, torch.float64).numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(expected[~np.isnan(expected)]))


@pytest.mark.parametrize("carrier", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_values_round_as_ml_dtypes_rounds(name, carrier):
    dtype = FORMATS[name]
    if carrier == torch.float32:
        torch.manual_seed(0)
        x = torch.randn(200000) * torch.exp2(torch.randint(-20, 20, (200000,)).float())
    else:
        x = _all_halves().view(carrier)
        x = x[~x.isnan()]
    expected = torch.from_numpy(x.double().numpy().astype(dtype).astype(np.float64))
    # ml_dtypes overflows to infinity or NaN where the format has them: that is "-inf" here; else it saturates.
    special = name not in ("e2m3fn", "e3m2fn", "e2m1fn")
    got = ops.quantise(x, f"{name}-RN-inf" if special else f"{name}-RN").double()
    inside = x.double().abs() <= 1e30
    assert torch.equal(got.isnan(), expected.isnan())
    keep = inside & ~expected.isnan()
    assert torch.equal(got[keep], expected[keep])
    assert torch.equal(torch.signbit(got[keep]), torch.signbit(expected[keep]))


@pytest.mark.parametrize("name,dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_sixteen_bit_formats_round_as_torch_does(name, dtype):
    torch.manual_seed(0)
    spread = torch.randn(100000) * torch.exp2(torch.randint(-40, 40, (100000,)).float())
    x = torch.cat([spread, torch.tensor([65519.9, 65520.0, 3.4e38])])
    assert torch.equal(ops.quantise(x, name), x.to(dtype).float())


@pytest.mark.parametrize(
    "name,arguments",
    [
        ("quantise", ("E4M3",)),
        ("simulate_format", ("E4M3", "E5M2")),
        ("simulate_format", ("none", "E5M2")),
        ("encode", ("E4M3",)),
        ("tensor_metrics", (True,)),
    ],
)
def test_operators_pass_torchs_own_checks(name, arguments):
    x = torch.randn(16, 16, requires_grad=name in ("quantise", "simulate_format"))
    results = torch.library.opcheck(getattr(ops, name).default, (x, *arguments))
    assert set(results.values()) == {"SUCCESS"}


def test_compiled_without_a_break_and_with_the_same_values():
    def layer(x, w):
        y = ops.simulate_format(x, "E4M3", "none") @ ops.simulate_format(w, "E4M3", "none")
        return ops.simulate_format(y, "none", "E5M2").relu()

    def run(function):
        x = torch.arange(256.0).view(16, 16).sin().requires_grad_()
        w = torch.arange(256.0).view(16, 16).cos().requires_grad_()
        y = function(x, w)
        y.square().sum().backward()
        return y.detach(), x.grad, w.grad

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for eager, other in zip(run(layer), run(compiled), strict=True):
        assert torch.equal(eager, other)


def test_an_unknown_format_is_named():
    with pytest.raises(RuntimeError, match="'e4m3' is not a number format"):
        ops.quantise(torch.ones(2), "e4m3")


MX = {
    "mxfp8e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8),
    "mxfp8e5m2": (ml_dtypes.float8_e5m2, 57344.0, 15),
    "mxfp6e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 2),
    "mxfp6e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 4),
    "mxfp4": (ml_dtypes.float4_e2m1fn, 6.0, 2),
}


def many_scales(columns):
    torch.manual_seed(1)
    x = torch.randn(400, columns) * torch.logspace(-37, 37, 400, 10.0)[:, None]
    x[7] = 0
    return x


@pytest.mark.parametrize("name", MX)
def test_shared_scales_are_codes_of_ml_dtypes(name):
    element, largest, exponent = MX[name]
    x = many_scales(64)
    blocks = x.numpy().reshape(400, 2, 32)
    wanted = np.frexp(np.abs(blocks).max(-1, keepdims=True))[1] - 1 - exponent
    wanted = np.where((blocks == 0).all(-1, keepdims=True), -127, np.clip(wanted, -127, 127))
    scales = np.exp2(wanted.astype(np.float64))
    codes = scales.astype(ml_dtypes.float8_e8m0fnu)
    assert (codes.astype(np.float64) == scales).all()
    elements = np.clip(blocks / scales, -largest, largest).astype(element)
    expected = (elements.astype(np.float64) * scales).astype(np.float32).reshape(400, 64)
    assert torch.equal(torch.ops.plumb.quantise(x, name), torch.from_numpy(expected))


def test_nvfp4_is_codes_of_ml_dtypes():
    x = many_scales(48)[150:250]
    for part in (x, x[40:60]):
        blocks = part.numpy().reshape(len(part), 3, 16)
        unit = np.maximum(np.float32(float(np.abs(blocks).max()) / (6.0 * 448.0)), np.float32(2.0**-126))
        scales = (np.abs(blocks).max(-1, keepdims=True) / np.float32(6) / unit).astype(ml_dtypes.float8_e4m3fn)
        scales = scales.astype(np.float32) * unit
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(scales > 0, blocks / scales, 0 * blocks)
        elements = np.clip(ratio, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        expected = (elements.astype(np.float32) * scales).reshape(len(part), 48)
        assert torch.equal(torch.ops.plumb.quantise(part.contiguous(), "nvfp4"), torch.from_numpy(expected))


def test_shared_scales_run_along_a_dimension_and_in_a_model():
    x = many_scales(64)[100:300]
    for dim in (0, 1):
        expected = torch.ops.plumb.quantise(x.movedim(dim, -1).contiguous(), "mxfp8").movedim(-1, dim)
        assert torch.equal(torch.ops.plumb.quantise(x, "mxfp8", dim=dim), expected)
    import plumb

    torch.manual_seed(0)
    model, x = torch.nn.Linear(40, 8), torch.randn(5, 40)
    simulated = plumb.transforms.simulate_format(model, "mxfp8-RN", "mxfp8e5m2-RN")
    q = torch.ops.plumb.quantise
    y = torch.nn.functional.linear(q(x, "mxfp8"), q(model.weight, "mxfp8"), model.bias)
    assert torch.equal(simulated(x), y)
