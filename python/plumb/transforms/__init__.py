"""Transforms of modules: unit scaling, simulated number formats, scale tracking. They nest in every order."""

from . import utils as utils
from ._compile import compile as compile
from ._fold import fold as fold
from ._passes import PassResult as PassResult
from ._passes import join_vocabulary as join_vocabulary
from ._passes import run_passes as run_passes
from ._report import Report as Report
from ._report import ScaleCauses as ScaleCauses
from ._report import report as report
from ._report import scale_causes as scale_causes
from ._simulate_format import simulate_format as simulate_format
from ._simulate_format import simulate_fp8 as simulate_fp8
from ._simulate_format import use_fp8 as use_fp8
from ._track_scales import Metrics as Metrics
from ._track_scales import ScaleTrackingAutogradFunction as ScaleTrackingAutogradFunction
from ._track_scales import ScaleTrackingBackend as ScaleTrackingBackend
from ._track_scales import TrackedModule as TrackedModule
from ._track_scales import prune_non_float_tensors as prune_non_float_tensors
from ._track_scales import prune_same_scale_tensors as prune_same_scale_tensors
from ._track_scales import prune_selected_nodes as prune_selected_nodes
from ._track_scales import track_scales as track_scales
from ._unit_scale import unit_scale as unit_scale
from ._unit_scale import unit_scaling_backend as unit_scaling_backend

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
