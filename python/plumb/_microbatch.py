"""What a schedule tells of the microbatch that a stage runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

Sizes = dict[int, tuple[int, ...]]  # of the whole model's flat inputs, by their number; those that are known

_sizes: ContextVar[Sizes | None] = ContextVar("_sizes", default=None)


@contextlib.contextmanager
def microbatch_sizes(sizes: Sizes) -> Iterator[None]:
    token = _sizes.set(sizes)
    try:
        # What torch.compile made of a stage is of the sizes it was cut for, and does not ask for these.
        with torch.compiler.set_stance("force_eager") if sizes else contextlib.nullcontext():
            yield
    finally:
        _sizes.reset(token)


def current_sizes() -> Sizes | None:
    """In a schedule of a cut model: the sizes of the model's inputs, empty if they are as they were cut. Else None."""
    return _sizes.get()
