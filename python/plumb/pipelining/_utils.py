"""Helpers of every module here: errors (plumb's, also as the built-in types that users of ``torch.distributed.pipelining``
catch), and what a rank has to know of the whole pipeline."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .._errors import Error, ErrorKind
from ..formats import FPFormat, format_text


class InvalidSchedule(Error, AssertionError):
    """A table that cannot run."""

    default_kind = ErrorKind.Schedule


class InvalidValue(Error, ValueError):
    """An argument with a value that makes no sense."""


class InvalidType(Error, TypeError):
    """An argument of a type that makes no sense."""


class PipeliningMetadataError(Error):
    """A value between stages is not like the first microbatch's."""

    default_kind = ErrorKind.TensorMismatch


PipeliningShapeError = PipeliningMetadataError  # its name until torch 2.10


Wire = tuple["FPFormat | str", "FPFormat | str"]  # formats of values between stages, and of their gradients


def wire_texts(wire: Wire | None) -> tuple[str, str]:
    if wire is None:
        return "", ""
    if isinstance(wire, (str, FPFormat)) or len(wire) != 2:
        raise InvalidValue(f"wire is {wire!r}", remedy='formats of values and of gradients: wire=("e4m3fn", "e5m2")')
    return format_text(wire[0]), format_text(wire[1])


def is_of(value: Any, module: str, name: str) -> bool:
    """Returns whether a value is of a class whose module takes long to import: there is none before somebody has."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


@dataclass
class PipeInfo:
    """The picture of a cut model without the model: it keeps no stage alive, and may be sent to other ranks."""

    graph: fx.Graph  # inputs, one call a stage, the backward if there is one, output
    num_stages: int
    has_loss_and_backward: bool
    table: Any = field(default=None, repr=False)  # plumb._C.PipeTable: where every stage's inputs come from
    input_names: list[tuple[str, int]] = field(default_factory=list, repr=False)  # argument and leaf of each flat input
    stages_here: set[int] = field(default_factory=set, repr=False)  # that were built here for a schedule over several ranks
