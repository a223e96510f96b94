"""Stages on their way to the ranks that run them, so that one rank at most ever holds the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .._C import Error
from ._IR import Pipe, deserialize_stage
from ._stage_module import StageModule
from ._utils import PipeInfo


def scatter_stages(
    pipe: Pipe | None, group: Any = None, src: int = 0, rank_of: Callable[[int], int] | None = None
) -> tuple[dict[int, StageModule], PipeInfo]:
    """Sends every stage of rank `src`'s pipe to its rank: a collective call, `pipe` is None on the others.

    `rank_of` says which rank of the group runs a stage (default: stage % group size, as schedules place loops). Answers
    this rank's stages by number, and the picture of the pipe.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parcels: list[Any] | None = None
    if rank == dist.get_group_rank(group or dist.group.WORLD, src):
        if pipe is None:
            raise Error(f"rank {src} has no pipe to send the stages of")
        parcels = [(pipe.info(), {}) for _ in range(size)]
        for s in range(pipe.num_stages):
            parcels[rank_of(s) if rank_of else s % size][1][s] = pipe.serialize_stage(s)
        pipe._stages_here.add(-1)  # none of its own stages runs
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, parcels, src=src, group=group)
    info, stages = mine[0]
    return {s: deserialize_stage(data)[0] for s, data in stages.items()}, info
