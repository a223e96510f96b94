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
