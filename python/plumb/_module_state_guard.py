"""Modules that a capture refuses, and the state of modules that it puts back."""

from __future__ import annotations

import collections
import copy
import random
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ._changed_attributes import Change
from ._errors import Error, ErrorKind
from ._trees import PLAIN


def _full(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def refuse_modules(module: nn.Module, with_root: bool) -> None:
    """Refuses what a graph would leave out in silence: layers without parameters yet, hooks on gradients."""
    for name, sub in module.named_modules():
        for key, p in [*sub._parameters.items(), *sub._buffers.items()]:
            if torch.nn.parameter.is_lazy(p):
                raise Error(
                    f"'{_full(name, key)}' of {type(sub).__name__} has no shape yet",
                    kind=ErrorKind.InvalidState,
                    remedy="call the model once, lazy layers take their shapes from the first input",
                )
        if (sub._backward_hooks or sub._backward_pre_hooks) and (sub is not module or with_root):
            raise Error(
                f"module '{name}' ({type(sub).__name__}) has backward hooks, which a graph would not call",
                kind=ErrorKind.Capture,
                remedy="remove them (the handle's remove()), hook parameters or the model's output, or write them as a "
                "torch.autograd.Function",
            )


def random_states() -> tuple[Tensor, Tensor | None]:
    """Of torch's generators: the CPU's, and that of the current accelerator if there is one and it was used."""
    device = torch.accelerator.current_accelerator()
    module = device and torch.get_device_module(device)
    used = module is not None and getattr(module, "is_initialized", lambda: True)()
    return torch.get_rng_state(), module.get_rng_state() if used else None


def set_random_states(states: tuple[Tensor, Tensor | None]) -> None:
    cpu, accelerator = states
    torch.set_rng_state(cpu)
    if accelerator is not None:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(accelerator)


class _Container:
    """A list, dict or set that a module has as an attribute (results kept for later, hooks), and what is in it."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self.module, self.key, self.value = module, key, module.__dict__[key]
        self.before = self.now = copy.copy(self.value)

    def look(self) -> bool:
        """Whether the forward has changed it."""
        self.now = copy.copy(self.value)
        here = self.module.__dict__.get(self.key) is self.value
        return not here or len(self.now) != len(self.before) or not all(map(_is, self._all(self.now), self._all(self.before)))

    def _all(self, content: Any) -> list:
        if isinstance(content, set):
            return sorted(map(id, content))
        return [x for item in content.items() for x in item] if isinstance(content, dict) else list(content)

    def fill(self, content: Any) -> None:
        self.module.__dict__[self.key] = self.value
        self.value.clear()
        self.value.update(content) if isinstance(self.value, (dict, set)) else self.value.extend(content)


def _is(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)


_CONTAINERS = {list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque}
_KEPT_BY_MODULES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


class ModuleStateGuard:
    """Keeps attributes of modules and the random states of Python and NumPy, puts them back after a capture, and tells what
    the forward did to them."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [
            (name, sub, dict(sub.__dict__), dict(sub._buffers.items()), sub.training) for name, sub in module.named_modules()
        ]
        self.containers = [
            _Container(sub, key)
            for _, sub, before, *_ in self.modules
            for key, value in before.items()
            if key not in _KEPT_BY_MODULES and type(value) in _CONTAINERS
        ]
        self.changes: list[Change] = []  # as the last restore() found them
        self.random = random.getstate()
        self.numpy = getattr(sys.modules.get("numpy"), "random", None)
        self.numpy_state = self.numpy.get_state() if self.numpy else None

    def tensors(self) -> list[tuple[str, Tensor, Tensor]]:
        """Tensors that are mere attributes and were re-assigned: (name, old, new). The old ones, and buffers that were
        None, are there again afterwards; new ones are gone."""
        changed = []
        for name, sub, before, buffers, _ in self.modules:
            for key, now in list(sub.__dict__.items()):
                old = before.get(key)
                if not isinstance(now, Tensor) or now is old:
                    continue
                if isinstance(old, Tensor):
                    changed.append((_full(name, key), old, now))
                if key in before:
                    sub.__dict__[key] = old
                else:
                    del sub.__dict__[key]
            for key in [k for k, b in sub._buffers.items() if b is not None and buffers.get(k) is None]:
                if key in buffers:
                    sub._buffers[key] = None
                else:
                    del sub._buffers[key]
        return changed

    def restore(self, warn: bool = True) -> list[str]:
        """Puts everything back. Returns notes on changes; `warn`: random draws are warned of, too."""
        notes, drawn = [], []
        self.changes = []
        for name, sub, before, _, training in self.modules:
            for key, value in before.items():
                now = sub.__dict__.get(key)
                if key == "training" or not isinstance(value, PLAIN):
                    continue
                if type(now) is not type(value) or (now != value and now == now):
                    sub.__dict__[key] = value
                    full = _full(name, key)
                    self.changes.append(Change(sub, key, full, value, now))
                    notes.append(f"attribute '{full}' changed from {value!r} to {now!r} in the forward: a graph does not")
            sub.training = training
        for container in self.containers:
            if container.look():
                container.fill(container.before)
        if random.getstate() != self.random:
            random.setstate(self.random)
            drawn.append("Python's random")
        if self.numpy and not _same(self.numpy.get_state(), self.numpy_state):
            self.numpy.set_state(self.numpy_state)
            drawn.append("NumPy's random")
        for generator in drawn:
            note = f"the forward draws from {generator} generator: what follows from it is the same in every run of the graph"
            notes.append(note)
            if warn:
                warnings.warn(f"{note}. Draw with torch to have it drawn in every run.", stacklevel=2)
        return notes


def _same(a: tuple, b: tuple) -> bool:
    return (a[1] == b[1]).all() and a[2:] == b[2:]
