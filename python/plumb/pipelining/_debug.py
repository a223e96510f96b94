"""Values as short text, for messages."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def friendly_debug_info(v: object) -> str:
    """A tensor's sizes, dtype and whether it requires a gradient; of anything else its text."""
    if isinstance(v, torch.Tensor):
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})"
    return str(v)


def map_debug_info(a: Any) -> Any:
    """The same for every value in nested tuples, lists and dicts."""
    return pytree.tree_map(friendly_debug_info, a)
