"""Low-precision formats around matrix products, simulated or multiplied."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Sequence

from torch import Tensor, nn

from .. import _C
from .._arguments import checked
from .._errors import Error
from .._state import BUFFER
from ..formats import FPFormat, format_text
from ._apply import CapturedGraph, Module, Pass, apply_pass, display_name, logger


@dataclass
class FormatPass:
    """`simulate_format` or `use_fp8` of the engine, with what it takes behind the graph."""

    name: str
    arguments: tuple

    def __call__(self, module: nn.Module, captured: CapturedGraph) -> dict:
        logger.info("running %s backend", display_name(self.name))
        report = getattr(_C, self.name)(captured.engine, *self.arguments)
        for entry in report["entries"]:
            if entry["kind"] == "quantised":
                logger.info("quantising function: %s", entry["node"])
        for name, kind, tensor, _ in captured.engine.state():
            if kind == BUFFER and name.endswith(_STATE):
                _give_state(module, name, tensor)
        return report

    def apply(self, module: Module) -> Module:
        return apply_pass(module, Pass(self.name, self, before=("track_scales",)))


def simulate_format(
    module: Module,
    fwd_format: FPFormat | str | None = None,
    bwd_format: FPFormat | str | None = None,
    *,
    recipe: str | os.PathLike | None = None,
    operators: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Module:
    """Returns a copy of `module` in which the inputs of every matrix product are rounded to `fwd_format` and the
    gradient of its output to `bwd_format`.

    fwd_format, bwd_format: a :class:`plumb.formats.FPFormat`, or a text such as ``"e4m3fn-RN"``, ``"E5M2-SR"``, ``"none"``.
    recipe: instead of both, formats by product and direction: a file (``NAME.toml``) or its text, as
        :func:`plumb.verdict` makes them, or a name (``"fp8"``, ``"mxfp4"``).
    operators: treat these alone (``"aten::linear"``); exclude: patterns of module paths or parameter names left alone.
    """
    if recipe is not None:
        if fwd_format is not None or bwd_format is not None or operators or exclude:
            raise Error(
                "a recipe says all formats, so no other option goes with it",
                remedy="simulate_format(module, recipe=...)",
            )
        text = _C.read_recipe(os.fsencode(recipe))
        return FormatPass("simulate_format", ("none", "none", [], [], text)).apply(module)
    if fwd_format is None or bwd_format is None:
        raise Error(
            "simulate_format needs two formats, or a recipe", remedy='simulate_format(module, "e4m3fn", "e5m2")'
        )
    formats = format_text(fwd_format), format_text(bwd_format)
    chosen = _texts("operators", operators), _texts("exclude", exclude)
    return FormatPass("simulate_format", (*formats, *chosen)).apply(module)


def simulate_fp8(module: Module, *, operators: Sequence[str] = (), exclude: Sequence[str] = ()) -> Module:
    """``simulate_format`` with E4M3 forward and E5M2 backward, rounded stochastically; the options are its own."""
    return simulate_format(module, FPFormat(4, 3), FPFormat(5, 2), operators=operators, exclude=exclude)


def _texts(option: str, given: Sequence[str]) -> list[str]:
    """Returns the texts as a list. Raises TypeError for one text alone: each of its letters would be a pattern."""
    if isinstance(given, str) or not all(isinstance(text, str) for text in given):
        raise TypeError(f"{option} is {given!r}, not a list of texts: {option}=[{given if isinstance(given, str) else 'layer.0'!r}]")
    return list(given)


_STATE = "_fp8_state"


def _give_state(module: nn.Module, name: str, state: Tensor) -> None:
    """Makes `state` a buffer of `module`, if it has none of that name."""
    owner, _, leaf = name.rpartition(".")
    sub = module.get_submodule(owner)
    if leaf not in sub._buffers:
        sub.register_buffer(leaf, state)


@checked
def use_fp8(
    module: Module,
    fwd_format: FPFormat | str = "e4m3fn",
    bwd_format: FPFormat | str = "e5m2",
    *,
    recipe: str | os.PathLike | None = None,
    history: int = 1024,
    kernel: str = "auto",
    operators: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Module:
    """Returns a copy of `module` whose matrix products take FP8: tensors that :func:`simulate_format` would round are
    cast to one-byte codes, multiplied and saved for the backward pass as such. Products without an FP8 kernel stay
    simulated; the report names them and the reason.

    fwd_format, bwd_format: ``"e4m3fn"`` or ``"e5m2"``, with any rounding, of inputs and of gradients.
    recipe: for plain models and to compare with: scale factors for tensors, ``"tensorwise"``, ``"rowwise"``,
        ``"blocks128"``, ``"mxfp8"`` (scales rounded down) or ``"mxfp8-up"``. Linear layers alone are treated, their casts
        are torchao's bit for bit, and their values are multiplied. ``"delayed"``: scales from the largest values of the
        last `history` casts of a tensor, as Transformer Engine's delayed scaling; a buffer ``NAME_fp8_state`` beside a
        weight has them, so that a ``state_dict`` and checkpoints do. Or a recipe file (``NAME.toml``) or its text, as
        :func:`plumb.verdict` makes them: it says the formats of every product, and those that no unit multiplies stay
        simulated.
    kernel: who multiplies. ``"scaled_mm"``: torch's ``_scaled_mm``; ``"decoded"``: the values, bit for bit the simulation;
    ``"auto"``: FP8 units where the device has them, else the values.
    operators: treat these alone (``"aten::linear"``); exclude: patterns of module paths or parameter names left alone.
    """
    recipe = os.fspath(recipe or "")
    if recipe.endswith(".toml") or "\n" in recipe:
        if (fwd_format, bwd_format) != ("e4m3fn", "e5m2") or operators or exclude:
            raise Error(
                "a recipe file says all formats, so no other option goes with it", remedy="use_fp8(module, recipe=...)"
            )
        _C.check_fp8("e4m3fn", "e5m2", kernel, "", history)
        given = ("none", "none", kernel, "", history, [], [], _C.read_recipe(os.fsencode(recipe)))
        return FormatPass("use_fp8", given).apply(module)
    how = format_text(fwd_format), format_text(bwd_format), kernel, recipe, history
    _C.check_fp8(*how)
    chosen = _texts("operators", operators), _texts("exclude", exclude)
    result = FormatPass("use_fp8", (*how, *chosen)).apply(module)
    if recipe == "delayed":  # there before the first call, for a state_dict that is loaded
        weights = {id(m.weight) for m in result.modules() if isinstance(m, nn.Linear)}
        for name, parameter in list(result.named_parameters()):
            names = (name, name.rpartition(".")[0])
            if id(parameter) in weights and not any(fnmatchcase(n, pattern) for pattern in exclude for n in names):
                _give_state(result, name + _STATE, _C.delayed_fp8_state(history, parameter.device))
    return result
