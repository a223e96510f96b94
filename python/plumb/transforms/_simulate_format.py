"""Low-precision formats around matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from torch import nn

from .. import _C
from ._apply import Pass, apply_pass, parse


@dataclass
class _Run:
    fwd: str
    bwd: str
    operators: list[str]
    exclude: list[str]

    def __call__(self, engine: Any) -> dict:
        return parse(_C.simulate_format(engine, self.fwd, self.bwd, self.operators, self.exclude))


def simulate_format(
    module: nn.Module, fwd_format: Any, bwd_format: Any, *, operators: Sequence[str] = (), exclude: Sequence[str] = ()
) -> nn.Module:
    """A copy of `module` in which the inputs of every matrix product are rounded to `fwd_format` and the gradient of its
    output to `bwd_format`: names such as ``"e4m3fn-RN"``, ``"E5M2-SR"``, ``"none"``.

    operators: treat these alone (``"aten::linear"``); exclude: patterns of module paths or parameter names left alone.
    """
    run = _Run(str(fwd_format), str(bwd_format), list(operators), list(exclude))
    return apply_pass(module, Pass("simulate_format", run, before=("track_scales",)))


def simulate_fp8(module: nn.Module) -> nn.Module:
    """``simulate_format`` with E4M3 forward and E5M2 backward, rounded stochastically."""
    return simulate_format(module, "E4M3-SR", "E5M2-SR")
