"""What the forward asks tensors while it is captured, as far as only Python can tell: whether a branch on a value is a mere
check, and which sizes are read."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from . import _C
from ._calls import _look

_LONGEST_RAISE = 120  # instructions


def _only_raises(instructions: list, start: int) -> bool:
    for i in instructions[start : start + _LONGEST_RAISE]:
        if i.opname in ("RAISE_VARARGS", "RERAISE"):
            return True
        if "JUMP" in i.opname or i.opname.startswith(("RETURN_", "YIELD_", "FOR_", "STORE_ATTR", "STORE_SUBSCR")):
            return False
    return False


def is_check() -> bool:
    """Whether the truth of a tensor that the calling frame asks for only decides if it raises: one of the two ways does
    nothing else."""
    found = _look(sys._getframe(1))
    if found is None:
        return False
    instructions, n = found[0].instructions, found[1]
    if instructions[n].opname.startswith("CALL"):  # bool(t), or a conversion before a jump
        n += 1
    while n < len(instructions) and instructions[n].opname in ("UNARY_NOT", "TO_BOOL"):
        n += 1
    if n >= len(instructions):
        return False
    jump = instructions[n]
    if not jump.opname.startswith("POP_JUMP") or "_NONE" in jump.opname or "_NOT_NONE" in jump.opname:
        return False
    targets = [m for m, i in enumerate(instructions) if i.offset >= jump.argval][:1]
    return any(_only_raises(instructions, start) for start in [n + 1, *targets])


def _asks_for_emptiness(frame: FrameType) -> bool:
    """Whether the size that this frame reads is only held against zero."""
    found = _look(frame)
    if found is None:
        return False
    following = found[0].instructions[found[1] + 1 :][:5]
    ops = [i.opname for i in following]
    if ops[:2] == ["LOAD_CONST", "BINARY_SUBSCR"] or (ops[:2] == ["LOAD_CONST", "BINARY_OP"] and following[1].argrepr == "[]"):
        following, ops = following[2:], ops[2:]
    if not ops:
        return False
    if ops[0] in ("LOAD_CONST", "LOAD_SMALL_INT") and ops[1:2] == ["COMPARE_OP"]:
        return following[0].argval == 0 and any(c in str(following[1].argval) for c in (">", "==", "!=")) and (
            ">=" not in str(following[1].argval)
        )
    return ops[0].startswith("POP_JUMP") or ops[0] in ("UNARY_NOT", "TO_BOOL")


def _watched(read: Callable[..., Any]) -> Callable[..., Any]:
    def watch(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.size_depends_on_values(self):
            _C.guard_size(self, not _asks_for_emptiness(sys._getframe(1)))
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
