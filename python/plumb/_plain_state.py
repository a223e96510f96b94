"""State that users keep in a checkpoint, a DataLoader's or their own, as JSON, exactly, without pickle."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ._errors import Error, ErrorKind

_REMEDY = "a state of numbers, texts, bytes, tensors, arrays, lists, tuples and dicts"


def to_plain(value: Any, where: str = "state") -> Any:
    """Returns a value that JSON holds and from which :func:`from_plain` makes an equal value: None, bools, ints, texts,
    finite floats and lists as they are, dicts with texts as keys as {"dict": {...}}, all else as an object with one key
    that names the type. What is of a subclass of these comes back as its base, a tensor on the CPU. Raises
    :class:`plumb.Error` that names the place of a value that it cannot keep."""
    try:
        return _plain(value, where)
    except RecursionError:
        raise Error(f"a checkpoint cannot keep {where}: it is nested too deep, or holds itself", remedy=_REMEDY) from None


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:  # (JSON's numbers end at 64 bits)
        return value if -(2**63) <= value < 2**63 else {"int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (bytes, bytearray):
        return {type(value).__name__: base64.b64encode(value).decode()}
    if type(value) is list:
        return [_plain(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [_plain(each, f"{where}[{i}]") for i, each in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and type(value) is not Counter:
            return {"dict": {key: _plain(each, f"{where}[{key!r}]") for key, each in value.items()}}
        kind = "counter" if type(value) is Counter else "items"
        return {kind: [[_plain(key, f"a key of {where}"), _plain(each, f"{where}[{key!r}]")] for key, each in value.items()]}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        dense = value.detach().cpu().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return {"tensor": [str(dense.dtype).removeprefix("torch."), list(dense.shape), base64.b64encode(data).decode()]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    for base, plain in ((str, str.__str__), (int, int), (float, float), (list, list), (tuple, tuple)):
        if isinstance(value, base):
            return _plain(plain(value), where)
    raise Error(f"a checkpoint cannot keep {where}: it is a {type(value).__name__}", kind=ErrorKind.Unsupported, remedy=_REMEDY)


def from_plain(plain: Any, what: str) -> Any:
    """Inverse of :func:`to_plain`. Raises :class:`plumb.Error` if that cannot have made the value."""
    try:
        return _value(plain)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        remedy = "another checkpoint"
        raise Error(f"the checkpoint's {what} is damaged", kind=ErrorKind.BadFile, remedy=remedy) from error


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, inside),) = plain.items()
    if kind == "dict":
        return {key: _value(each) for key, each in inside.items()}
    if kind in ("items", "counter"):
        return {"items": dict, "counter": Counter}[kind]({_value(key): _value(each) for key, each in inside})
    if kind == "tuple":
        return tuple(_value(each) for each in inside)
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](inside)
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind](base64.b64decode(inside, validate=True))
    dtype, shape, text = inside
    data = base64.b64decode(text, validate=True)
    if kind == "tensor":
        of = getattr(torch, dtype)
        if not isinstance(of, torch.dtype):
            raise ValueError(dtype)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return flat.view(of).reshape(shape)
    if np.dtype(dtype).kind not in "biufc" or kind not in ("array", "scalar"):
        raise ValueError(kind)
    array = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
    return array if kind == "array" else array[()]
