"""Helpers of every module here: errors (plumb's, also as the built-in types that users of ``torch.distributed.pipelining``
catch), and what a rank has to know of the whole pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from .._errors import Error, ErrorKind
from .._errors import InvalidType as InvalidType
from .._trees import check_layouts, check_plain_inputs, differences, flatten
from ..formats import FPFormat, format_text


class InvalidSchedule(Error, AssertionError):
    """A table that cannot run."""

    default_kind = ErrorKind.Schedule


class InvalidValue(Error, ValueError):
    """An argument with a value that makes no sense."""


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


_AS_CUT = "give it as the model was cut, or cut the model with inputs like these"


def leaves_of_argument(name: str, value: Any, structure: Any) -> list:
    """Returns the leaves of an argument in the order of its structure at the cut (None: unknown), dicts by their keys. Raises `plumb.Error`
    for another structure."""
    if structure is None:
        return pytree.tree_leaves(value)
    try:
        return structure.flatten_up_to(value)
    except ValueError as error:
        text = "; ".join(differences(structure, flatten(value)[1], f"'{name}'")) or f"input '{name}': {error}"
        raise Error(text, kind=ErrorKind.StructureMismatch, remedy=_AS_CUT) from None


@dataclass
class PipeInfo:
    """The picture of a cut model without the model: it keeps no stage alive, and may be sent to other ranks."""

    graph: fx.Graph  # inputs, one call a stage, the backward if there is one, output
    num_stages: int
    has_loss_and_backward: bool
    table: Any = field(default=None, repr=False)  # plumb._C.PipeTable: where every stage's inputs come from
    input_names: list[tuple[str, int]] = field(default_factory=list, repr=False)  # argument and leaf of each flat input
    positional: list[str] = field(default_factory=list, repr=False)  # names of the model's arguments by position
    structures: dict[str, Any] = field(default_factory=dict, repr=False)  # tree specs of the arguments when the model was cut
    plain_inputs: list | None = field(default=None, repr=False)  # flat inputs that are no tensors; None: the graph has every input
    takes_tensor: list[bool] = field(default_factory=list, repr=False)  # by flat input
    layouts: tuple[str, dict[int, Any]] = field(default=("", {}), repr=False)  # by flat input, if the forward asks for one; and its line
    stages_here: set[int] = field(default_factory=set, repr=False)  # that were built here for a schedule over several ranks

    def flat_inputs(self, args: tuple, kwargs: dict[str, Any]) -> list:
        """Returns the flat inputs of a call of the model that may leave arguments out: None for what is not given. Raises `plumb.Error` for
        other arguments than the model was cut with: other names or structures, or other values of what is no tensor."""
        names = list(dict.fromkeys([*self.structures, *(name for name, _ in self.input_names)]))
        positional = self.positional or names
        given = dict(zip(positional, args))
        if len(args) > len(positional) or (given | kwargs).keys() - set(names):
            by_position = [*given, *(f"a {type(more).__name__}" for more in args[len(given) :])]
            raise Error(
                f"the model was cut with {names}, and got {by_position} by position and {list(kwargs)} by name",
                kind=ErrorKind.StructureMismatch,
                remedy="leave the others out, or cut the model with inputs like these",
            )
        if twice := given.keys() & kwargs.keys():
            raise Error(f"the model got '{min(twice)}' by position and by name", kind=ErrorKind.StructureMismatch)
        leaves = {name: self._leaves(name, value) for name, value in (given | kwargs).items()}
        flat = [leaves[name][i] if name in leaves else None for name, i in self.input_names]
        check_layouts(flat, self.layouts, lambda: [name for name, _ in self.input_names], "the model was cut", "cut it")
        return flat

    def _leaves(self, name: str, value: Any) -> list:
        leaves = leaves_of_argument(name, value, self.structures.get(name))
        if self.plain_inputs is not None:
            flat = [i for i, (argument, _) in enumerate(self.input_names) if argument == name]
            plain, tensors = [self.plain_inputs[i] for i in flat], [self.takes_tensor[i] for i in flat]
            check_plain_inputs(leaves, plain, tensors, f"input '{name}': the model was cut", _AS_CUT)
        return leaves
