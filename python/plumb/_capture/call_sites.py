"""Finds the caller of an operator in Python: the function or method, and the variable that its result goes to.

Read from the calling frames' bytecode while a module is captured; nothing is patched, so the module runs as it always does.
Without positions in the bytecode (Python 3.10, or with them switched off) only operators such as ``+`` and the functions
of ``torch.nn.functional`` are known.
"""

from __future__ import annotations

import builtins
import keyword
import operator
import os
import sys
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from .cpython import Code, of_mode, past_modes, running
from .torch_patches import INSIDE, PLUMB

_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and_", "|": "or_", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
_OLD_OPERATORS = {
    "ADD": "+", "SUBTRACT": "-", "MULTIPLY": "*", "TRUE_DIVIDE": "/", "FLOOR_DIVIDE": "//", "MODULO": "%", "POWER": "**",
    "MATRIX_MULTIPLY": "@", "AND": "&", "OR": "|", "XOR": "^", "LSHIFT": "<<", "RSHIFT": ">>",
}  # fmt: skip
_COMPARISONS = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
_UNARY = {"UNARY_NEGATIVE": operator.neg, "UNARY_INVERT": operator.invert, "UNARY_POSITIVE": operator.pos}
_FUNCTIONAL = F.__file__
_CALL_MODULE = torch.nn.modules.module.__file__
_OPS = torch._ops.__file__
_TENSOR = torch._tensor.__file__
_PLUMB_FUNCTIONAL = PLUMB + "functional"
_CAPTURE = tuple(f"{PLUMB}_capture{os.sep}{name}.py" for name in ("forward", "custom_functions", "torch_patches"))


@dataclass
class Call:
    """``target`` is a function, or the name of a Tensor method; ``names`` the variables assigned, None for none."""

    target: Any
    names: list[str] | None
    operator: str = ""  # the one it called
    replaced: Any = None  # (function of the user's, what stands for it) when the operator is part of a replacement


def _callee(code: Code, n: int, frame: FrameType) -> Any:
    """Returns the function that the call at instruction n calls, a method's name, or None."""
    m = code.function_of(n)
    if m is None:
        return None
    i = code.instructions[m]
    if i.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        owner = _value(code, m - 1, frame)
        if owner is not None and not isinstance(owner, torch.Tensor):
            return getattr(owner, i.argval, None)
        return i.argval if hasattr(torch.Tensor, i.argval) else None
    return _value(code, m, frame)


def _value(code: Code, m: int, frame: FrameType) -> Any:
    """Returns a module, class or function that instruction m loads; None for anything else."""
    i = code.instructions[m]
    value = None
    if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        value = frame.f_globals.get(i.argval, getattr(builtins, i.argval, None))
    elif i.opname in ("LOAD_ATTR", "LOAD_METHOD") and m > 0:
        owner = _value(code, m - 1, frame)
        value = getattr(owner, i.argval, None) if isinstance(owner, ModuleType) else None
    return value if isinstance(value, (ModuleType, type)) or callable(value) else None


def _target(frame: FrameType) -> Any:
    found = running(frame)
    if found is None:
        return None
    code, n = found
    i = code.instructions[n]
    if i.opname == "BINARY_OP":
        text = i.argrepr
    elif i.opname.startswith(("BINARY_", "INPLACE_")):
        kind, _, name = i.opname.partition("_")
        text = _OLD_OPERATORS.get(name, "") + ("=" if kind == "INPLACE" else "")
    elif i.opname == "COMPARE_OP":
        return getattr(operator, _COMPARISONS.get(str(i.argval), ""), None)
    elif i.opname in _UNARY:
        return _UNARY[i.opname]
    elif i.is_call:
        return _callee(code, n, frame)
    else:
        return None
    name = _OPERATORS.get(text.rstrip("="))
    if i.is_subscript:
        return operator.getitem
    if name is None:
        return None
    return getattr(operator, "i" + name.strip("_") if text.endswith("=") else name, None)


def _names(frame: FrameType | None) -> list[str] | None:
    """Returns the variables of the user's that take what this frame's current instruction gives."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file in _CAPTURE:
            return None  # what lies outside of the module's forward is not its own
        if file != _CALL_MODULE and not of_mode(frame):
            found = running(frame)
            where = found[0].assigned(found[1]) if found else None
            if where is not True:
                # Variables inside torch and plumb are not the user's.
                return None if file.startswith(INSIDE) else where
        frame = frame.f_back
    return None


replacing: list[Any] = []  # (from, to), innermost last: see replacements.py


def _library_function(frame: FrameType) -> tuple[Any, FrameType] | None:
    """The innermost public function of torch.nn.functional or plumb.functional that runs here, and its caller."""
    inner: FrameType | None = frame
    while inner is not None:
        file = inner.f_code.co_filename
        if file == _OPS or of_mode(inner):
            inner = inner.f_back
            continue
        if file != _FUNCTIONAL and not file.startswith(_PLUMB_FUNCTIONAL):
            return None
        name = inner.f_code.co_name
        namespace = F if file == _FUNCTIONAL else sys.modules["plumb.functional"]
        function = getattr(namespace, name, None)
        if not name.startswith("_") and getattr(function, "__code__", None) is inner.f_code:
            # This one is made of many operators, which are worth more than its name.
            return None if function is F.multi_head_attention_forward or inner.f_back is None else (function, inner.f_back)
        inner = inner.f_back
    return None


def here() -> Call:
    """Returns the call in Python of the operator that is being recorded."""
    frame = past_modes(sys._getframe(1))
    stand_in = replacing[-1] if replacing else None
    if known := _library_function(frame):
        return Call(known[0], _names(known[1]), replaced=stand_in)
    return Call(_target(frame), _names(frame), replaced=stand_in)


def written() -> Any:
    """Returns what the caller of torch's function mode has written: ``operator.add`` for ``+``. None if unknown."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (of_mode(frame) or frame.f_code.co_filename == _TENSOR):
        frame = frame.f_back
    return _target(frame)


def hint(call: Call, operator_name: str) -> str:
    """Returns a name for a result that no variable takes."""
    target = call.target
    name = target if isinstance(target, str) else getattr(target, "__name__", None)
    if name is None:
        name = operator_name.partition("::")[2].partition(".")[0]
    name = name.strip("_") or "value"
    return f"{name}_1" if keyword.iskeyword(name) or hasattr(builtins, name) else name
