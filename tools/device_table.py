#!/usr/bin/env python3
"""Writes the table of operators and devices into docs/devices.md, as torch's dispatcher has them; --check only compares."""

import pathlib
import sys

import torch

import plumb  # noqa: F401

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "devices.md"
BEGIN, END = "<!-- tools/device_table.py -->", "<!-- end -->"

# Which kernels of plumb/cuda do an operator's work on CUDA tensors (float32, bfloat16, float16); the dispatcher has one
# registration for all devices. Everything else is ATen operators there.
CUDA_KERNELS = {
    "rounding, codes and metrics": "quantise simulate_format encode encode_weight decode tensor_metrics track track_rounded "
    "track_traced",
    "pointwise programs": "pointwise gelu gelu_backward silu silu_backward silu_glu silu_glu_backward",
}


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
    by_cells = {}
    for name in names:
        op = name.removeprefix("plumb::")
        cuda = next((f"kernels of its own: {k}" for k, ops in CUDA_KERNELS.items() if op in ops.split()), kernel_of(name, "CUDA"))
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
