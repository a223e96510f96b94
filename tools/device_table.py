#!/usr/bin/env python3
"""Writes the table of operators and devices into docs/devices.md, as torch's dispatcher has them; --check only compares."""

import os
import pathlib
import re
import sys

import torch

import plumb

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "devices.md"
BEGIN, END = "<!-- tools/device_table.py -->", "<!-- end -->"

# What the kernels of plumb/cuda do, by their file. Tests compile each of them, and run their texts on the CPU.
KINDS = {
    "pass": "rounding, codes and metrics", "measure": "rounding, codes and metrics", "blocks": "rounding, codes and metrics",
    "pointwise": "pointwise programs", "dropout": "dropout",
}  # fmt: skip


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


def own_kernels():
    """By operator what its kernels do, as it asks for them."""
    found = {}
    for name, call in calls():
        texts = plumb._C.noted_cuda_kernels("testdevice", call)
        kinds = {KINDS[file] for text in texts for file in re.findall(r'include "plumb/cuda/(\w+)\.cuh"', text)}
        if kinds:
            found[name] = ", ".join(sorted(kinds))
    return found


def kernel_of(name, device):
    """Whose kernel the dispatcher runs for this device: its own, or one for all."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(name, device):
        return "own"
    if has(name, "CompositeExplicitAutograd"):
        return "yes"
    return "of others" if has(name, "CompositeImplicitAutograd") else "no"


def rows():
    names = sorted({s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("plumb::")})
    names = [n for n in names if not n.startswith("plumb::sym_")]  # numbers, no tensors
    by_cells, kernels = {}, own_kernels()
    for name in names:
        op = name.removeprefix("plumb::")
        cuda = f"kernels of its own: {kernels[op]}" if op in kernels else kernel_of(name, "CUDA")
        cuda = {"yes": "ATen operators"}.get(cuda, cuda)
        gradient = torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd")
        meta = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta")
        cells = (
            kernel_of(name, "CPU"), kernel_of(name, "PrivateUse1"), cuda, "no" if "no" in cuda.split() else "not measured",
            "yes" if meta else "no", "yes" if gradient else "of others" if "of others" in cuda else "none",
        )  # fmt: skip
        by_cells.setdefault(cells, []).append(f"`{op}`")
    yield "| operators | CPU | test device | CUDA, compiled | CUDA, run | meta | gradient |\n|---|---|---|---|---|---|---|"
    for cells, ops in sorted(by_cells.items(), key=lambda item: (-len(item[1]), item[1])):
        yield f"| {', '.join(ops)} | {' | '.join(cells)} |"


def with_table(text):
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n\n" + "\n".join(rows()) + "\n\n" + END + after


def main():
    sys.path.insert(0, str(ROOT / "python" / "tests"))
    os.environ.setdefault("PLUMB_BUILD_DIR", str(ROOT / "build"))
    import device

    device._load_testdevice()
    text = PAGE.read_text()
    if BEGIN not in text or END not in text:
        sys.exit(f"{PAGE} has no place for the table")
    new = with_table(text)
    if "--check" in sys.argv[1:]:
        return 0 if new == text else f"{PAGE} is not what the dispatcher has: run tools/device_table.py"
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
