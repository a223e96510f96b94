"""Private functions of torch's ``_utils``."""

from __future__ import annotations

from typing import Any

import torch
from plumb.pipelining._utils import InvalidValue
from torch.utils import _pytree as pytree

from ._metadata import (  # noqa: F401
    TensorMeta,
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    validate_and_normalize_to_tuple,
    validate_metadata,
    validate_tensors_metadata,
)


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """Returns the leaves of nested arguments. With `detach` the arguments and the leaves, tensors detached but with the
    same wish for a gradient."""
    leaves, spec = pytree.tree_flatten(args)
    if not detach:
        return leaves
    leaves = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in leaves]
    return pytree.tree_unflatten(leaves, spec), leaves


def flatten_args_detach(args: Any) -> Any:
    return flatten_args(args, detach=True)


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """Which rank runs a stage, for stages that go round the ranks ("loop") or forth and back ("v")."""
    if style not in ("loop", "v"):
        raise InvalidValue(f"stages are placed as 'loop' or 'v', not as '{style}'")
    if style == "v" and num_stages % pp_size != 0:
        raise InvalidValue(f"{num_stages} stages do not go forth and back over {pp_size} ranks: give a multiple")
    places = {}
    for stage in range(num_stages):
        turn, place = divmod(stage, pp_size)
        places[stage] = pp_size - 1 - place if style == "v" and turn % 2 else place
    return places


def generate_rank_to_stage_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, list[int]]:
    """Returns the stages of every rank, in ascending order."""
    stages: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages.setdefault(rank, []).append(stage)
    return stages
