"""Unit-scaled layers: the names of :mod:`plumb._modules`, as ``plumb.nn.Linear`` and so on."""

from ._modules import *  # noqa: F403
from ._modules import __all__  # noqa: F401
