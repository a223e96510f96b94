"""Refusals that torch's own tracers and compilers meet at a transformed module, or a transform at theirs."""

from __future__ import annotations

import sys

import torch
from torch import nn

from .._errors import Error, ErrorKind


class NotScripted(Error, AttributeError):
    """Raised for what torch.jit.script asks of a function. Others that ask find that it is not there."""


def refuse_script(module: nn.Module) -> None:
    raise NotScripted(
        f"torch.jit.script compiles Python code, and this {type(module).__name__} was transformed: it runs a graph",
        kind=ErrorKind.Unsupported,
        remedy="torch.jit.trace(module, inputs), or script the model without the transform",
    )


def get_name(module: nn.Module) -> str:
    """Returns the name of the class, for which torch.fx's tracer asks before it follows the forward of the class."""
    if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        raise Error(
            f"torch.fx.symbolic_trace follows the forward of a class, and this {type(module).__name__} runs a graph instead",
            kind=ErrorKind.Unsupported,
            remedy="plumb.capture(module, *inputs).to_fx() is that graph in torch.fx's form",
        )
    return type(module)._get_name(module)


def refuse_compiled(module: nn.Module) -> None:
    """Raises `plumb.Error` for modules whose forward is no Python that a graph could be captured of."""
    dynamo = sys.modules.get("torch._dynamo")  # loaded once something was compiled
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        raise Error(
            "the module is a result of torch.compile, and a transform takes the model that was compiled",
            kind=ErrorKind.Unsupported,
            remedy="transform first, compile then: torch.compile(plumb.transforms.unit_scale(model)), for example",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise Error(
            "the module is scripted or traced (torch.jit), and a transform takes the Python module that it was made of",
            kind=ErrorKind.Unsupported,
            remedy="the module as it was before torch.jit.script or torch.jit.trace",
        )
