"""plumb: takes a PyTorch model as a graph and rewrites it."""

import torch  # noqa: F401  (its libraries must be loaded before ours)

from ._C import Error, Graph, parse_graph
from ._capture import GraphModule, capture

__all__ = ["Error", "Graph", "GraphModule", "capture", "parse_graph"]
__version__ = "0.1.0"
