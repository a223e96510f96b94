"""Metadata of a tensor that crosses between stages, and the difference of two."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from plumb.pipelining._utils import PipeliningMetadataError


@dataclass(frozen=True)
class _TensorMeta:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> _TensorMeta:
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> torch.Tensor:
        """Returns a tensor like that with arbitrary values."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return tensor.requires_grad_(self.requires_grad) if tensor.is_floating_point() else tensor

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """Returns the differences as text. requires_grad depends on the run and is not compared."""
        return [
            f"{what} mismatch: {getattr(self, what)} vs {getattr(other, what)}"
            for what in ("shape", "stride", "dtype")
            if getattr(self, what) != getattr(other, what)
        ]


TensorMeta = _TensorMeta


def extract_tensor_meta(tensor: torch.Tensor) -> _TensorMeta:
    return _TensorMeta.from_tensor(tensor)


def extract_tensor_metas(
    tensors: Iterable[torch.Tensor | None] | None, *, allow_none: bool = False
) -> tuple[_TensorMeta | None, ...] | None:
    """Returns one for every tensor; None for what is none, where that is allowed."""
    if tensors is None:
        return None
    metas = tuple(extract_tensor_meta(t) if isinstance(t, torch.Tensor) else None for t in tensors)
    if None in metas and not allow_none:
        raise PipeliningMetadataError(f"value {metas.index(None)} of {len(metas)} is no tensor")
    return metas


def validate_and_normalize_to_tuple(args, allow_none: bool = False) -> tuple[torch.Tensor | None, ...] | None:
    """Returns a tensor, or a list or tuple of them, as a tuple. Raises `PipeliningMetadataError` for anything else."""
    if args is None:
        return None
    values = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(values, (tuple, list)):
        raise PipeliningMetadataError(f"a {type(args).__name__} is neither a tensor nor a tuple of tensors")
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) and not (value is None and allow_none):
            raise PipeliningMetadataError(f"value {i} is a {type(value).__name__}, not a tensor")
    return tuple(values)


def _report(desc: str, diffs: list[str], raise_on_mismatch: bool, warn_on_mismatch: bool) -> list[str]:
    if diffs and raise_on_mismatch:
        raise PipeliningMetadataError(f"{desc}: {'; '.join(diffs)}")
    if diffs and warn_on_mismatch:
        warnings.warn(f"{desc}: {'; '.join(diffs)}", stacklevel=3)
    return diffs


def validate_metadata(
    desc: str,
    expected: _TensorMeta,
    actual: torch.Tensor | _TensorMeta,
    *,
    raise_on_mismatch: bool = False,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Returns how `actual` differs from what was expected; raises `PipeliningMetadataError` or warns if asked to."""
    found = extract_tensor_meta(actual) if isinstance(actual, torch.Tensor) else actual
    return _report(desc, expected.get_diff(found), raise_on_mismatch, warn_on_mismatch)


def validate_tensors_metadata(
    desc: str,
    expected: tuple[_TensorMeta | None, ...],
    actual: tuple[torch.Tensor | _TensorMeta | None, ...],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Compares a tuple value by value; None stands for a value that is no tensor."""
    if len(expected) != len(actual):
        diffs = [f"{len(actual)} values where {len(expected)} are expected"]
        return _report(desc, diffs, raise_on_mismatch, warn_on_mismatch)
    diffs = []
    for i, (meta, value) in enumerate(zip(expected, actual)):
        if (meta is None) != (value is None):
            diffs.append(f"value {i}: tensor mismatch: {meta} vs {value}")
        elif meta is not None:
            diffs += [f"value {i}: {diff}" for diff in validate_metadata(desc, meta, value)]
    return _report(desc, diffs, raise_on_mismatch, warn_on_mismatch)
