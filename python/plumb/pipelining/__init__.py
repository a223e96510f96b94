"""Pipeline parallelism: cuts, stages, schedules and the runtime, under the names of ``torch.distributed.pipelining``."""

from ._IR import (
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
)
from ._policies import Balanced, StagePolicy, split_into_equal_size, split_on_size_threshold
from ._send import scatter_stages
from .microbatch import TensorChunkSpec
from .schedules import (
    Schedule1F1B,
    ScheduleDualPipe,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleTable,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,  # noqa: F401  (imported from here by users of torch's)
    search_schedule,
)
from .stage import PipelineStage, build_stage

__all__ = [
    "Balanced",
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSequential",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleTable",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
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
    "search_schedule",
    "split_into_equal_size",
    "split_on_size_threshold",
]
