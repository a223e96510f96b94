"""A module before a run of its graph. A run that a guard ends, or that is made before the measured one, is not to be seen afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, ContextManager

import torch
from torch import nn

from .._capture.attribute_writes import random_states, set_random_states
from .._state import sync_state

if TYPE_CHECKING:
    from ._apply import CapturedGraph


class BeforeRun:
    """Keeps torch's random states, and the contents of the buffers and of whatever else the graph writes."""

    def __init__(self, module: nn.Module, captured: CapturedGraph, leaves: list) -> None:
        names, inputs = captured.writes
        if names:
            sync_state(captured.engine, captured.slots)
        state = {name: tensor for name, _, tensor, _ in captured.engine.state()} if names else {}
        self.inputs = [leaves[i] for i in inputs]
        written = {id(t): t for t in (*module.buffers(), *(state[name] for name in names), *self.inputs)}
        self.random = random_states()
        # A second tensor on the memory: sizes and memory of the first may change in the run, too.
        self.kept = [(t, t.data, t.detach().clone()) for t in written.values()]

    def trial(self) -> ContextManager | None:
        """Returns the mode of a run that only asks the guards, if the run itself would leave its history on an input; else None."""
        return torch.no_grad() if any(x.requires_grad for x in self.inputs) else None

    def put_back(self) -> None:
        set_random_states(self.random)
        with torch.no_grad():
            for tensor, memory, contents in self.kept:
                if tensor.layout is torch.strided and not tensor.is_set_to(memory):
                    tensor.data = memory
                memory.copy_(contents)  # the same version for backwards to come
