"""plumb: takes a PyTorch model as a graph and rewrites it."""

import torch  # noqa: F401  (its libraries must be loaded before ours)

from ._C import Error

__all__ = ["Error"]
__version__ = "0.1.0"
