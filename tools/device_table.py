#!/usr/bin/env python3
"""Writes the table of operators and devices into docs/devices.md, as torch's dispatcher has them; --check only compares."""

import os
import pathlib
import re
import sys

import torch
from tables import put, table

import plumb

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "devices.md"

# The purpose of the kernels of plumb/cuda, by their file. Tests compile each of them, and run their texts on the CPU.
KINDS = {
    "pass": "rounding, codes and metrics", "measure": "rounding, codes and metrics", "blocks": "rounding, codes and metrics",
    "pointwise": "pointwise programs", "dropout": "dropout", "hash": "hashes",
}  # fmt: skip


def own_kernels():
    """By operator what its kernels do, as it asks for them."""
    import kernel_calls  # module in python/tests

    found = {}
    for name, call in kernel_calls.calls():
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
    for cells, ops in sorted(by_cells.items(), key=lambda item: (-len(item[1]), item[1])):
        yield [", ".join(ops), *cells]


def main():
    sys.path.insert(0, str(ROOT / "python" / "tests"))
    os.environ.setdefault("PLUMB_BUILD_DIR", str(ROOT / "build"))
    import device

    device._load_testdevice()
    text = PAGE.read_text()
    head = ["operators", "CPU", "test device", "CUDA, compiled", "CUDA, run", "meta", "gradient"]
    new = put(text, "tools/device_table.py", table(head, rows()))
    if "--check" in sys.argv[1:]:
        return 0 if new == text else f"{PAGE} is not what the dispatcher has: run tools/device_table.py"
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
