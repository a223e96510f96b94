"""Pipeline parallelism: cuts, stages, schedules and the runtime, under the names of ``torch.distributed.pipelining``."""

from . import schedules as _schedules
from ._IR import (
    CutPipe,
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeSequential,
    SplitPoint,
    TrivialLossWrapper,
    annotate_split_points,
    deserialize_stage,
    pipe_split,
    pipeline,
    scatter_stages,
)
from ._sources import Balanced, StagePolicy, split_into_equal_size, split_on_size_threshold
from .microbatch import TensorChunkSpec
from .schedules import *  # noqa: F403  (a class for every schedule that the engine knows)
from .schedules import _ScheduleForwardOnly  # noqa: F401  (imported from here by users of torch's)
from .stage import PipelineStage, build_stage

__all__ = [
    "Balanced",
    "CutPipe",
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSequential",
    "PipelineStage",
    "SplitPoint",
    "StagePolicy",
    "TensorChunkSpec",
    "TrivialLossWrapper",
    "annotate_split_points",
    "build_stage",
    "deserialize_stage",
    "pipe_split",
    "pipeline",
    "scatter_stages",
    "split_into_equal_size",
    "split_on_size_threshold",
    *_schedules.__all__,
]
