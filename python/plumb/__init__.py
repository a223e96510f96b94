"""plumb: takes a PyTorch model as a graph and rewrites it."""

from ._version import __version__ as __version__  # isort: skip  (first: it says so if this is another torch than plumb's)
from ._errors import Error as Error  # isort: skip  (before all that may raise one)
from . import _dispatch_keys as _dispatch_keys
from . import analysis as analysis
from . import checkpoint as checkpoint
from . import constraints as constraints
from . import core as core
from . import formats as formats
from . import functional as functional
from . import hf as hf
from . import nn as nn
from . import optim as optim
from . import parameter as parameter
from . import pipelining as pipelining
from . import scale as scale
from . import transforms as transforms
from . import utils as utils
from ._C import DeferredChecks as DeferredChecks
from ._C import ErrorKind as ErrorKind
from ._C import Graph as Graph
from ._C import allow_operators as allow_operators
from ._C import keep_freed_memory as keep_freed_memory
from ._C import parse_graph as parse_graph
from ._C import release_freed_memory as release_freed_memory
from ._capture.forward import capture as capture
from ._diff import Diff as Diff
from ._diff import diff as diff
from ._doctor import doctor as doctor
from ._exported import load_pt2 as load_pt2
from ._exported import save_pt2 as save_pt2
from ._graph_module import GraphModule as GraphModule
from ._recorder import History as History
from ._recorder import Recorder as Recorder
from ._recorder import read_history as read_history
from ._trainer import Trainer as Trainer
from ._trainer import TrainResult as TrainResult
from ._verdict import Verdict as Verdict
from ._verdict import verdict as verdict
from ._writers import TensorBoardWriter as TensorBoardWriter
from ._writers import WandbWriter as WandbWriter
from .core.functional import transformer_residual_scaling_rule as transformer_residual_scaling_rule
from .nn import *  # noqa: F403
from .parameter import MupType as MupType
from .parameter import Parameter as Parameter
from .transforms import report as report
