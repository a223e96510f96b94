"""A module's code with the scale of every tensor beside it."""

from __future__ import annotations

import keyword
import math
import re
from collections import OrderedDict
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Callable, Optional, Tuple, Union

import torch
from torch import Tensor, fx, nn

from . import functional


@dataclass
class ScalePair:
    """Standard deviations of a tensor and of its gradient, None where there is none."""

    forward: Optional[float] = None
    backward: Optional[float] = None

    def __str__(self) -> str:
        def text(value: Optional[float]) -> str:
            return "n/a" if value is None else f"{value:.3}"

        return f"(-> {text(self.forward)}, <- {text(self.backward)})"


ScaleDict = "OrderedDict[str, ScalePair]"


def _std(t: Tensor) -> float:
    return float(torch.ops.plumb.tensor_metrics(t.detach())[2])


class ScaleTracker(torch.autograd.Function):
    """Hands a tensor on and writes its standard deviation, and its gradient's, into a :class:`ScalePair`."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, pair: ScalePair) -> Tensor:
        ctx.pair = pair
        pair.forward = _std(t)
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None]:  # type: ignore[override]
        ctx.pair.backward = _std(grad)
        return grad, None

    @staticmethod
    def track(t: Tensor, pair: ScalePair) -> Tensor:
        return ScaleTracker.apply(t, pair)  # type: ignore[no-any-return, no-untyped-call]


class ScaleTrackingInterpreter(fx.Interpreter):
    """Runs a ``torch.fx`` module and keeps the scale of every floating-point value in ``scales``, by its name."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.scales: OrderedDict[str, ScalePair] = OrderedDict()

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        pair = self.scales[n.name] = ScalePair()
        return ScaleTracker.track(out, pair)


class _Tracer(fx.Tracer):
    """Goes into every module (or none), and takes each function of these Python modules as one call."""

    def __init__(self, into_modules: bool, modules: Tuple[ModuleType, ...], functions: Tuple[Callable[..., Any], ...]):
        # fx would wrap the class FunctionType, too, where a module has it among its names.
        super().__init__(autowrap_modules=modules, autowrap_functions=functions)
        self._autowrap_function_ids.discard(id(FunctionType))
        self.into_modules = into_modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.into_modules


def _lines(code: str, scales: "OrderedDict[str, ScalePair]") -> list[str]:
    lines = []
    for line in code.splitlines():
        if not line.strip() or line.startswith("torch.fx._symbolic_trace.wrap"):
            continue
        line = line.split(";")[0].rstrip()  # what follows frees values
        head = re.match(r"\s*def \w+\((.*)\)", line)
        if head:
            # How torch.fx writes annotations: with their module, or between underscores where they are texts.
            line = re.sub(r"\b_(\w+)_\b", r"\1", line.replace("torch.Tensor", "Tensor"))
            of_inputs = [str(scales[n]) for n in re.findall(r"(\w+)(?: : [^,]+)?", head[1]) if n in scales]
            lines.append(line + ("  " + ", ".join(of_inputs) if of_inputs else ""))
            continue
        name = line.split(" ", 1)[0] if line[:1] != " " else line.split()[0]
        lines.append(f"{line};  {scales[name]}" if name in scales and not keyword.iskeyword(name) else line)
    return lines


def analyse_module(
    module: nn.Module,
    inputs: Union[Tensor, Tuple[Tensor, ...]],
    backward: Optional[Tensor] = None,
    recurse_modules: bool = True,
    syntax_highlight: bool = True,
    autowrap_modules: Tuple[ModuleType, ...] = (math, functional),
    autowrap_functions: Tuple[Callable[..., Any], ...] = (),
) -> str:
    """`module` as ``torch.fx`` traces it, one line an operation, each with the standard deviations of its value and gradient.

    ::

        linear = torch._C._nn.linear(x, fc1_weight, fc1_bias);  (-> 0.578, <- 0.204)

    Args:
        module: what ``torch.fx.symbolic_trace`` can follow. (:func:`plumb.transforms.track_scales` takes any module.)
        inputs: of its forward.
        backward: the gradient of its output; without one the output must be a single value.
        recurse_modules: go into modules; otherwise each is one line.
        syntax_highlight: with colors for a terminal, if pygments is installed.
        autowrap_modules: Python modules whose functions are one line each.
        autowrap_functions: further such functions.
    """
    tracer = _Tracer(recurse_modules, autowrap_modules, autowrap_functions)
    traced = fx.GraphModule(tracer.root if hasattr(tracer, "root") else module, tracer.trace(module))
    interpreter = ScaleTrackingInterpreter(traced)
    interpreter.run(*(inputs if isinstance(inputs, tuple) else (inputs,))).backward(backward)
    code = "\n".join(_lines(traced.code, interpreter.scales)).replace(functional.__name__.replace(".", "_") + "_", "U.")
    if syntax_highlight:
        try:
            from pygments import highlight
            from pygments.formatters import TerminalFormatter
            from pygments.lexers import PythonLexer
        except ImportError:
            return code
        return highlight(code, PythonLexer(), TerminalFormatter())
    return code


__all__ = ["ScalePair", "ScaleTracker", "ScaleTrackingInterpreter", "analyse_module"]
