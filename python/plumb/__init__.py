"""plumb: takes a PyTorch model as a graph and rewrites it."""

import torch  # noqa: F401  (its libraries must be loaded before ours)

from ._version import __version__ as __version__  # isort: skip  (first: it says so if this is another torch than plumb's)
from ._errors import Error, ErrorKind  # isort: skip  (before all that may raise one)
from . import (
    analysis,
    checkpoint,
    constraints,
    core,
    formats,
    functional,
    hf,
    nn,
    optim,
    parameter,
    pipelining,
    scale,
    transforms,
    utils,
)
from ._C import DeferredChecks, Graph, allow_operators, keep_freed_memory, parse_graph, release_freed_memory
from ._capture import GraphModule, capture
from ._exported import load_pt2, save_pt2
from ._recorder import History, Recorder, read_history
from ._trainer import Trainer, TrainResult
from ._writers import TensorBoardWriter, WandbWriter
from .core.functional import transformer_residual_scaling_rule
from .nn import *  # noqa: F403
from .parameter import MupType, Parameter
from .transforms import report

__all__ = [
    "DeferredChecks",
    "Error",
    "ErrorKind",
    "Graph",
    "GraphModule",
    "History",
    "MupType",
    "Parameter",
    "Recorder",
    "TensorBoardWriter",
    "TrainResult",
    "Trainer",
    "WandbWriter",
    "allow_operators",
    "analysis",
    "capture",
    "checkpoint",
    "constraints",
    "core",
    "formats",
    "functional",
    "hf",
    "keep_freed_memory",
    "load_pt2",
    "nn",
    "optim",
    "parameter",
    "parse_graph",
    "pipelining",
    "read_history",
    "release_freed_memory",
    "report",
    "save_pt2",
    "scale",
    "transforms",
    "transformer_residual_scaling_rule",
    "utils",
    *nn.__all__,
]
