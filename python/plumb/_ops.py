"""torch.ops.plumb: importing the extension module loads libplumb, which registers the operators."""

import torch

from . import _C  # noqa: F401

ops = torch.ops.plumb
