"""Pipeline parallelism: cuts, stages, schedules and the runtime, under the names of ``torch.distributed.pipelining``."""

# ruff: noqa: F403, F405
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
from ._plan import Plan, plan
from ._sources import Balanced, StagePolicy, split_into_equal_size, split_on_size_threshold
from .microbatch import TensorChunkSpec
from .schedules import *
from .schedules import _ScheduleForwardOnly  # noqa: F401  (imported from here by users of torch's)
from .stage import PipelineStage, PipelineStageInfo, build_stage

__all__ = [
    "Balanced",
    "CutPipe",
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeSequential",
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipelineStageInfo",
    "Plan",
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
    "analyze_pipeline_activation_liveness",
    "annotate_split_points",
    "build_stage",
    "deserialize_stage",
    "get_schedule_class",
    "pipe_split",
    "pipeline",
    "plan",
    "scatter_stages",
    "search_schedule",
    "split_into_equal_size",
    "split_on_size_threshold",
]
