"""Objects of which one property says whether something is as it was: guards compare it like any attribute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .guards import MISSING


class Settings:
    """Settings of torch that operators read."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.get_default_dtype()


class Place:
    """A place in a list."""

    def __init__(self, of: list, at: int):
        self._list, self._at = of, at

    @property
    def value(self) -> Any:
        return self._list[self._at] if self._at < len(self._list) else MISSING


class Asked:
    """An attribute that an object's own code was asked for."""

    def __init__(self, owner: Any, key: str):
        self._owner, self._key = owner, key

    @property
    def is_there(self) -> bool:
        return hasattr(self._owner, self._key)


class Value:
    """A tensor whose value was taken, and a copy of it."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._copy = tensor, tensor.detach().clone()

    @property
    def unchanged(self) -> bool:
        now, then = self._tensor.detach(), self._copy
        return now.dtype == then.dtype and now.device == then.device and _same_bits(now, then)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


class Names:
    """The names of the parameters and buffers of a module."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._names = self._now()

    def _now(self) -> list[list[str]]:
        return [[*sub._parameters, *sub._buffers] for sub in self._module.modules()]

    @property
    def unchanged(self) -> bool:
        return self._now() == self._names


class AbsentOfClass:
    """An attribute that a class does not have."""

    def __init__(self, cls: type, key: str):
        self._classes, self._key = cls.__mro__, key

    @property
    def is_absent(self) -> bool:
        return not any(self._key in vars(cls) for cls in self._classes)
