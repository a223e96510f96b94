"""Low-precision formats around matrix products, simulated or multiplied."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Sequence

from torch import nn

from .. import _C
from ..formats import FPFormat, format_text
from ._apply import CapturedGraph, Pass, apply_pass, logger


@dataclass
class SimulateFormatPass:
    fwd: str
    bwd: str
    operators: list[str]
    exclude: list[str]

    def __call__(self, module: nn.Module, captured: CapturedGraph) -> dict:
        logger.info("running quantisation backend")
        report = json.loads(_C.simulate_format(captured.engine, self.fwd, self.bwd, self.operators, self.exclude))
        for entry in report["entries"]:
            if entry["kind"] == "quantised":
                logger.info("quantising function: %s", entry["node"])
        return report


def simulate_format(
    module: nn.Module,
    fwd_format: FPFormat | str,
    bwd_format: FPFormat | str,
    *,
    operators: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> nn.Module:
    """A copy of `module` in which the inputs of every matrix product are rounded to `fwd_format` and the gradient of its
    output to `bwd_format`.

    fwd_format, bwd_format: a :class:`plumb.formats.FPFormat`, or a text such as ``"e4m3fn-RN"``, ``"E5M2-SR"``, ``"none"``.
    operators: treat these alone (``"aten::linear"``); exclude: patterns of module paths or parameter names left alone.
    """
    run = SimulateFormatPass(format_text(fwd_format), format_text(bwd_format), list(operators), list(exclude))
    return apply_pass(module, Pass("simulate_format", run, before=("track_scales",)))


def simulate_fp8(module: nn.Module, **options: Any) -> nn.Module:
    """``simulate_format`` with E4M3 forward and E5M2 backward, rounded stochastically; the options are its own."""
    return simulate_format(module, FPFormat(4, 3), FPFormat(5, 2), **options)


@dataclass
class UseFp8Pass:
    fwd: str
    bwd: str
    kernel: str
    operators: list[str]
    exclude: list[str]
    recipe: str

    def __call__(self, module: nn.Module, captured: CapturedGraph) -> dict:
        given = (self.fwd, self.bwd, self.kernel, self.operators, self.exclude, self.recipe)
        return json.loads(_C.use_fp8(captured.engine, *given))


def use_fp8(
    module: nn.Module,
    fwd_format: FPFormat | str = "e4m3fn",
    bwd_format: FPFormat | str = "e5m2",
    *,
    recipe: str | None = None,
    kernel: str = "auto",
    operators: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> nn.Module:
    """A copy of `module` whose matrix products take FP8: what :func:`simulate_format` would round is cast to one-byte
    codes, multiplied and saved for the backward pass as such. What has no FP8 kernel stays simulated; the report says
    which and why.

    fwd_format, bwd_format: ``"e4m3fn"`` or ``"e5m2"``, with any rounding, of inputs and of gradients.
    recipe: for plain models and to compare with: scale factors for tensors, ``"tensorwise"``, ``"rowwise"``,
        ``"blocks128"``, ``"mxfp8"`` (scales rounded down) or ``"mxfp8-up"``. Linear layers alone are treated, their casts
        are torchao's bit for bit, and their values are multiplied.
    kernel: who multiplies. ``"scaled_mm"``: torch's ``_scaled_mm``; ``"decoded"``: the values, bit for bit the simulation;
    ``"auto"``: FP8 units where the device has them, else the values.
    operators: treat these alone (``"aten::linear"``); exclude: patterns of module paths or parameter names left alone.
    """
    run = UseFp8Pass(format_text(fwd_format), format_text(bwd_format), kernel, list(operators), list(exclude), recipe or "")
    _C.check_fp8(run.fwd, run.bwd, run.kernel, run.recipe)
    return apply_pass(module, Pass("use_fp8", run, before=("track_scales",)))
