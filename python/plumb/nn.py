"""Unit-scaled modules, as ``plumb.nn.Linear`` and so on."""

from . import _modules, _transformer
from ._modules import *  # noqa: F403
from ._transformer import *  # noqa: F403

__all__ = [*_modules.__all__, *_transformer.__all__]
