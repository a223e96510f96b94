"""Pipeline parallelism: stages, schedules and the runtime, under the names of ``torch.distributed.pipelining``."""

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
    "TensorChunkSpec",
    "build_stage",
    "search_schedule",
]
