"""Models that mark themselves, and models together with their loss."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ._marks import pipe_split


class PipeSequential(nn.Sequential):
    """A sequence with a mark between any two neighbours: one stage a module."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """The same modules (shallow copies, shared parameters) under the same names."""
        marked = PipeSequential()
        for name, module in sequential_instance.named_children():
            marked.add_module(name, copy.copy(module))
        return marked

    def forward(self, input: Any) -> Any:
        for i, module in enumerate(self):
            if i:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model together with its loss: subclasses say in ``forward`` how they are connected.

    ``self.module`` and ``self.loss_fn`` hold the two; what ``forward`` returns holds the loss.
    """

    def __init__(self, module: nn.Module, loss_fn: Any):
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no forward: say there how inputs, self.module, self.loss_fn and the loss hang together"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``; its one output is the loss."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        return self.loss_fn(self.module(x), targets)
