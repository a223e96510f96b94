"""Reads of tensors that only Python sees while a forward is captured: branches that are mere checks, sizes, lists of values."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from . import _C
from ._bytecode import past_modes, running


def is_check() -> bool:
    """Whether the truth of a tensor that the calling frame asks for only decides if it raises: one of the two ways does
    nothing else."""
    found = running(past_modes(sys._getframe(1)))
    return found is not None and found[0].decides_a_raise(found[1])


def _asks_for_emptiness(frame: FrameType) -> bool:
    found = running(frame)
    return found is not None and found[0].asks_for_emptiness(found[1])


def _reader() -> FrameType:
    """The caller of the function that calls this: not torch's function modes, and not a watch that they call again."""
    frame = past_modes(sys._getframe(2))
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = past_modes(frame.f_back)
    return frame


def _watched(read: Callable[..., Any]) -> Callable[..., Any]:
    def watch(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.size_depends_on_values(self):
            _C.guard_size(self, not _asks_for_emptiness(_reader()))
        return read(self, *args, **kwargs)

    return watch


def _set_requires_grad(self: Tensor, value: bool) -> None:
    # Inputs of a capture are no leaves and require grad: who asks them to gets what he wants.
    if not (value and self.requires_grad):
        torch._C.TensorBase.requires_grad.__set__(self, value)


def _refuse_hook(self: Tensor, *_: Any) -> None:
    _C.refuse(
        "a hook is registered on a tensor in the forward, which a graph would not call",
        "write it as a torch.autograd.Function, or register the hook on the model's output or on a parameter",
    )


def _tolist(self: Tensor) -> Any:
    known = _C.guard_values(self)
    return torch._C.TensorBase.tolist(self if known is None else known)


@contextlib.contextmanager
def watched_tensors() -> Iterator[None]:
    """While it lasts, reading a size that depends on the data, or a list of values, is noticed, and hooks on tensors are refused."""
    base = torch._C.TensorBase
    if "shape" in Tensor.__dict__:  # a capture inside of another
        yield
        return
    length = Tensor.__dict__["__len__"]
    hook = Tensor.__dict__["register_hook"]

    def register_hook(self: Tensor, function: Callable[..., Any]) -> Any:
        if _C.is_capturing() and self.requires_grad and not self.is_leaf:
            _refuse_hook(self)
        return hook(self, function)

    Tensor.shape = property(_watched(base.shape.__get__))
    Tensor.requires_grad = property(base.requires_grad.__get__, _set_requires_grad)
    for name in ("size", "numel", "nelement"):
        setattr(Tensor, name, _watched(getattr(base, name)))
    Tensor.__len__ = _watched(length)
    Tensor.register_hook = register_hook
    Tensor.tolist = _tolist
    try:
        yield
    finally:
        for name in ("shape", "requires_grad", "size", "numel", "nelement", "tolist"):
            delattr(Tensor, name)
        Tensor.__len__ = length
        Tensor.register_hook = hook
