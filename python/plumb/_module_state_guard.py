"""Modules that a capture refuses, and the state of modules that it puts back."""

from __future__ import annotations

import random
import reprlib
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._changed_attributes import Change
from ._errors import Error, ErrorKind
from ._tables import MISSING, tables
from ._trees import PLAIN, holds_tensors


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


class ModuleStateGuard:
    """Keeps attributes of modules and the random states of Python and NumPy, puts them back after a capture, and tells what
    the forward did to them."""

    def __init__(self, module: nn.Module) -> None:
        self.tables = tables(module)
        self.parts = [  # those of a scripted module are C++'s
            (name, what, table, dict(table))
            for name, sub in module.named_modules()
            for what, table in (("parameter", sub._parameters), ("module", sub._modules))
            if isinstance(table, dict)
        ]
        self.parameters = list(module.parameters())
        self.modes = [(sub, sub.training) for sub in module.modules()]
        self.changes: list[Change] = []  # of values that are no tensors, as the last restore() found them
        self.kept: list[Change] = []  # of slots that held no tensors, as the last tensors() found them
        self.left: dict[str, Any] = {}  # by their names, the very objects
        self.written: set[tuple[int, Any]] = set()  # all slots that the forward has written: (id of the table, key)
        self.random = random.getstate()
        self.numpy = getattr(sys.modules.get("numpy"), "random", None)
        self.numpy_state = self.numpy.get_state() if self.numpy else None

    def tensors(self) -> list[tuple[str, Tensor, Tensor]]:
        """Tensors outside of parameters and buffers that were re-assigned: (name, old, new). The old ones, and buffers that
        were None, are there again afterwards; new ones are gone."""
        changed = []
        self.kept, self.left = [], {}
        for table in self.tables:
            for key, old, now in list(table.differences()):
                leaves, spec = pytree.tree_flatten(now)
                if not any(isinstance(x, Tensor) for x in leaves):
                    continue
                self.written.add((id(table.live), key))
                name = table.slot(key)
                before, before_spec = pytree.tree_flatten(old)
                alike = spec == before_spec and all(
                    isinstance(a, Tensor) == isinstance(b, Tensor) for a, b in zip(before, leaves)
                )
                if alike:
                    pairs = [
                        (i, a, b)
                        for i, (a, b) in enumerate(zip(before, leaves))
                        if isinstance(a, Tensor) and a is not b
                    ]
                    changed += [(f"{name}[{i}]" if len(leaves) > 1 else name, a, b) for i, a, b in pairs]
                else:
                    self.left[name] = now
                    computed = self._hang_on_inputs(leaves)
                    plain = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), now)
                    self.kept.append(Change(table, key, name, old, plain, computed))
                table.put(key, old)
        return changed

    def refuse_new_parts(self) -> None:
        """Raises `plumb.Error` if the forward has made or replaced parameters or modules, after it has taken them away again."""
        found = None
        for owner, what, now, before in self.parts:
            changed = [key for key in {**before, **now} if now.get(key) is not before.get(key)]
            if changed:
                found = found or (what, _full(owner, changed[0]))
                now.clear()
                now.update(before)
        if found:
            what, name = found
            raise Error(
                f"the forward makes the {what} '{name}', and a graph has those that were there before",
                kind=ErrorKind.Capture,
                remedy="if the layer makes it on its first batch, run the model once before; else make it in the constructor",
            )

    def _hang_on_inputs(self, tensors: list) -> bool:
        """Whether autograd would hand a gradient of these on to anything but the module's parameters."""
        own = {id(p) for p in self.parameters}
        nodes = [x.grad_fn for x in tensors if isinstance(x, Tensor) and x.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if hasattr(node, "variable") and id(node.variable) not in own:
                return True
            further = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= further
            nodes += further
        return False

    def restore(self, warn: bool = True) -> list[str]:
        """Puts everything back. Returns notes on changes; `warn`: random draws are warned of, too."""
        notes, drawn = [], []
        self.changes = []
        for table in self.tables:
            for key, before, now in list(table.differences()):
                if table.dotted and (key == "training" or not (isinstance(before, PLAIN) or holds_tensors(now))):
                    continue
                if isinstance(before, PLAIN) and type(now) is type(before) and (now == before or now != now):
                    continue
                self.written.add((id(table.live), key))
                table.put(key, before)
                name = table.slot(key)
                self.changes.append(Change(table, key, name, before, now))
                if all(
                    isinstance(x, PLAIN) for x in pytree.tree_leaves([b for b in (before, now) if b is not MISSING])
                ):
                    told = ["nothing" if x is MISSING else reprlib.repr(x) for x in (before, now)]
                    notes.append(
                        f"attribute '{name}' changed from {told[0]} to {told[1]} in the forward: a graph does not"
                    )
        for sub, training in self.modes:
            sub.training = training
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
