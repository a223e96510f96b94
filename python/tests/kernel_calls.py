"""Calls of operators that may have kernels of their own, for the tests of devices and tools/device_table.py."""

import torch

import plumb


def calls():
    """Calls of operators that may have kernels of their own, on the test device: (operator, call)."""
    ops, x = torch.ops.plumb, torch.ones(8, 8, device="testdevice")
    codes, row = x.to(torch.uint8), torch.ones(8, device="testdevice")
    rstd, both = torch.ones(8, 1, device="testdevice"), [True, True]
    tracked = plumb.transforms.track_scales(plumb.transforms.simulate_fp8(torch.nn.Linear(8, 8).to("testdevice")))
    yield "quantise", lambda: ops.quantise(x, "E4M3")
    yield "simulate_format", lambda: ops.simulate_format(x, "E4M3", "E5M2")
    yield "encode", lambda: ops.encode(x, "e4m3fn")
    yield "encode_weight", lambda: ops.encode_weight(x, "e4m3fn")
    yield "decode", lambda: ops.decode(codes, "e4m3fn")
    yield "tensor_metrics", lambda: ops.tensor_metrics(x)
    yield "tensor_hash", lambda: ops.tensor_hash(x)
    yield "pointwise", lambda: ops.pointwise([x, x], "add #0 #1; neg $0")
    yield "gelu", lambda: ops.gelu(x)
    yield "gelu_backward", lambda: ops.gelu_backward(x, x, "none", 1.0, None, None, [True])
    yield "silu", lambda: ops.silu(x, mult=2.0)
    yield "silu_backward", lambda: ops.silu_backward(x, x, 2.0, None, None, [True])
    yield "silu_glu", lambda: ops.silu_glu(x, x)
    yield "silu_glu_backward", lambda: ops.silu_glu_backward(x, x, x, 1.0, None, both)
    yield "softmax", lambda: ops.softmax(x, 1)
    yield "softmax_backward", lambda: ops.softmax_backward(x, x, 1, 1.0, None, None, [True])
    for name in ("rms_norm", "native_rms_norm"):
        yield name, lambda name=name: getattr(ops, name)(x, [8], row)
    yield "rms_norm_backward", lambda: ops.rms_norm_backward(x, x, [8], row, None, rstd, both)
    for name in ("layer_norm", "native_layer_norm"):
        yield name, lambda name=name: getattr(ops, name)(x, [8], row, row)
    yield "layer_norm_backward", lambda: ops.layer_norm_backward(x, x, [8], row, row, rstd, rstd, [True] * 3)
    for name in ("dropout", "native_dropout"):
        yield name, lambda name=name: getattr(ops, name)(x, 0.5, True)
    yield "fp8_cast", lambda: ops.fp8_cast(x, "e4m3fn", "tensorwise")
    # Operators of tracking have a tracker behind them: a tracked module runs them.
    for name in ("track", "track_rounded", "track_traced"):
        yield name, lambda: tracked(x).sum().backward()
