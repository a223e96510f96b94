"""Other sizes than a model was cut for: how stages are told of them, and how the model is captured and cut again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind
from ._sources import Source

Sizes = dict[int, tuple[int, ...]]  # of the whole model's flat inputs, by their number; those that are known

MARK = "_plumb_model_sizes"  # of a tensor that a stage returned: the sizes of the model's inputs it comes from


def sizes_of(values: Any) -> Sizes:
    """What a stage called by hand said of the values it returned."""
    known: Sizes = {}
    for value in values:
        known.update(getattr(value, MARK, {}))
    return known


def mark(outputs: list, sizes: Sizes) -> None:
    """For stages called by hand: lets the next one know."""
    for output in outputs if sizes else []:
        if isinstance(output, Tensor):
            setattr(output, MARK, sizes)


@contextlib.contextmanager
def at_sizes(stages: list, sizes: Sizes) -> Iterator[None]:
    """Tells stages (`StageModule`) the sizes of the model's inputs that a microbatch comes from; none: as they were cut."""
    for stage in stages:
        stage.__dict__["_given"] = sizes
    try:
        # What torch.compile made of a stage is of the sizes it was cut for, and does not ask for these.
        with torch.compiler.set_stance("force_eager") if sizes else contextlib.nullcontext():
            yield
    finally:
        for stage in stages:
            stage.__dict__["_given"] = None


def cut_again(source: Source, arguments: dict) -> Callable[[list], Any]:
    """A function that captures the live model for other flat inputs, and cuts it at the same places."""
    again, plain, spec = source.again, source.plain_inputs, source.in_spec

    def cut(flat: list) -> Any:
        leaves = [value if known is None else known for value, known in zip(flat, plain)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with _C.PausedCapture():  # of a transform of the stage
            other = again(args, kwargs)
        if other is None:
            raise Error(
                "the model it was cut from no longer exists",
                kind=ErrorKind.InvalidState,
                remedy="keep the model as long as its stages are to take other sizes than they were cut for; "
                'model.to("meta") lets go of its memory and not of the stages\'',
            )
        return _C.cut(other.engine, **arguments)

    return cut


def make_specializer(engine: Any, source: Source, arguments: dict | None) -> Any:
    """The engine's `StageSpecializer` for a live model; None for what holds one graph alone."""
    if source.again is None or arguments is None or not any(isinstance(x, Tensor) for x in source.example or []):
        return None
    by_place = any(arguments.get(how) for how in ("before_ops", "before_values", "policy"))
    example = [x if isinstance(x, Tensor) else None for x in source.example]
    return _C.StageSpecializer(engine, example, cut_again(source, arguments), by_place)
