"""What stages hand on: nested values as flat tensors, and which arguments a module takes."""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._C import Error
from .._trees import load_spec
from ._errors import PipeliningMetadataError


def as_tensor(value: Any) -> torch.Tensor | None:
    return value if value is None or isinstance(value, torch.Tensor) else torch.tensor(value)


def detached(value: Any) -> Any:
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, value)


def flat_output(output: Any) -> list[torch.Tensor | None]:
    """The tensors that a stage returned, in order."""
    return [v for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]


def metas(values):
    if values is None:
        return None
    values = values if isinstance(values, (tuple, list)) else (values,)
    return tuple((list(v.shape), v.dtype) if isinstance(v, torch.Tensor) else type(v) for v in values)


def meta_of(value: Any) -> dict[str, Any] | None:
    return dict(shape=value.shape, stride=value.stride(), dtype=value.dtype) if isinstance(value, torch.Tensor) else None


def check_alike(where: str, expected: list, actual: list) -> None:
    """Raises `PipeliningMetadataError` that names what differs between the tensors that `meta_of` described."""
    diffs = [] if len(expected) == len(actual) else [f"{len(actual)} values where {len(expected)} are expected"]
    for i, (before, now) in enumerate(zip(expected, actual)):
        before, now = before or {}, now or {}
        differ = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        diffs += [f"value {i}: {key} mismatch: {before.get(key)} vs {now.get(key)}" for key in sorted(differ)]
    if diffs:
        raise PipeliningMetadataError(f"{where}: {'; '.join(diffs)}")


def pack(output) -> list[torch.Tensor | None]:
    """A stage's output as flat tensors. Unless it is a tensor or a tuple or list of them, None and the structure (as
    text in a tensor) come first."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)) and all(isinstance(v, torch.Tensor) for v in output):
        return list(output)
    leaves, spec = pytree.tree_flatten(output)
    places = [None if isinstance(leaf, torch.Tensor) else [leaf] for leaf in leaves]
    try:
        text = json.dumps([pytree.treespec_dumps(spec), places])
    except (TypeError, ValueError, NotImplementedError) as error:
        raise Error(f"a stage cannot hand on {type(output).__name__} {places}: {error}") from None
    structure = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [None, structure, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def unpack(values: list[torch.Tensor | None]) -> tuple:
    """The positional arguments that `pack` made flat."""
    if not values or values[0] is not None:
        return tuple(values)
    try:
        spec, places = json.loads(bytes(values[1].cpu().numpy()).decode())
        tensors = iter(values[2:])
        leaves = [next(tensors) if place is None else place[0] for place in places]
        output = pytree.tree_unflatten(leaves, load_spec(spec))
    except Exception as error:
        raise Error(f"another stage handed on what has no structure: {type(error).__name__}: {error}") from None
    return tuple(output) if type(output) in (tuple, list) else (output,)


def accepted(module, kwargs: dict[str, Any]) -> set[str]:
    """The names among `kwargs` that a module's forward takes."""
    try:
        parameters = inspect.signature(module.forward if isinstance(module, torch.nn.Module) else module).parameters
    except (TypeError, ValueError):
        return set(kwargs)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return set(kwargs)
    return kwargs.keys() & parameters.keys()
