"""Transforms of modules: unit scaling, simulated number formats, scale tracking. They nest in every order."""

from . import utils as utils
from ._compile import compile
from ._fold import fold
from ._passes import PassResult, join_vocabulary, run_passes
from ._report import Report, ScaleCauses, report, scale_causes
from ._simulate_format import simulate_format, simulate_fp8, use_fp8
from ._track_scales import (
    Metrics,
    ScaleTrackingAutogradFunction,
    ScaleTrackingBackend,
    TrackedModule,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    track_scales,
)
from ._unit_scale import unit_scale, unit_scaling_backend

__all__ = [
    "Metrics",
    "PassResult",
    "Report",
    "ScaleCauses",
    "ScaleTrackingAutogradFunction",
    "ScaleTrackingBackend",
    "TrackedModule",
    "compile",
    "fold",
    "join_vocabulary",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
    "report",
    "run_passes",
    "scale_causes",
    "simulate_format",
    "simulate_fp8",
    "track_scales",
    "unit_scale",
    "unit_scaling_backend",
    "use_fp8",
]
