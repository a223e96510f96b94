"""Unit-scaled modules, as ``plumb.nn.Linear`` and so on."""

# ruff: noqa: F403, F405
from . import _modules, _transformer
from ._modules import *
from ._transformer import *

__all__: list[str] = []
__all__ += _modules.__all__
__all__ += _transformer.__all__
