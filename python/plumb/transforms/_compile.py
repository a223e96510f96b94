"""``torch.compile`` as one of the transforms."""

from __future__ import annotations

import copy
from typing import Any

from ._apply import Module


def compile(module: Module, **options: Any) -> Module:
    """Returns a copy of `module` that compiles itself when it is called; the options are those of ``torch.compile``.

    A transformed module also goes through ``torch.compile`` as it is, in one graph. This one composes with the other
    transforms in every order: those applied to it come before.
    """
    module = copy.deepcopy(module)
    module.__dict__["compile_options"] = options
    module.compile(**options)
    return module
