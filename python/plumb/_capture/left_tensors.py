"""Tensors that a forward leaves in attributes, such as an auxiliary loss: a graph returns them besides its outputs, and they are
put into the attributes after every run."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any, Callable, Iterable, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._state import constants_of
from .._trees import PLAIN
from .attribute_writes import Table, changed_slots, same_objects
from .torch_patches import patched


class _Slot:
    """Stands for a tensor in a template: output number `place` of a run."""

    def __init__(self, place: int):
        self.place = place

    def __deepcopy__(self, memo: dict) -> Tensor:
        return memo["outputs"][self.place]


class _Same:
    """Stands for an object that copies share."""

    def __init__(self, it: Any):
        self.it = it

    def __deepcopy__(self, memo: dict) -> Any:
        return self.it


def _template(value: Any, outputs: list[Tensor]) -> Any:
    """A copy of `value` with slots in place of the tensors that the forward has computed, which are added to `outputs`."""

    thread = threading.get_ident()  # other threads make copies as usual

    def taking(original: Callable[[Any, dict], Any]) -> Callable[[Any, dict], Any]:
        def take(tensor: Any, memo: dict) -> Any:
            if threading.get_ident() != thread:
                return original(tensor, memo)
            if not _C.is_computed(tensor):
                return _Same(tensor)
            outputs.append(tensor)
            return _Slot(len(outputs) - 1)

        return take

    def share(module: nn.Module, memo: dict) -> Any:
        if threading.get_ident() != thread:
            return copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # as copy.deepcopy does without the patch
        return _Same(module)

    with (
        patched(Tensor, __deepcopy__=taking(Tensor.__deepcopy__)),
        patched(nn.Parameter, __deepcopy__=taking(nn.Parameter.__deepcopy__)),
        patched(nn.Module, __deepcopy__=share),
    ):
        return copy.deepcopy(value)


class _Written(NamedTuple):
    table: Table
    key: Any
    template: Any
    before: Any
    grown: bool  # a list, by the elements of the template


class LeftTensors:
    """Tensors that a forward has left in `tables`, taken while its capture runs. `outputs`: the tensors, in order."""

    def __init__(self, tables: Iterable[Table]):
        self.outputs: list[Tensor] = []
        self._written: list[_Written] = []
        for table, key, before, now in changed_slots(tables):
            if (
                isinstance(now, (*PLAIN, nn.Module))
                or callable(now)
                or (table.holds_buffers and isinstance(before, Tensor))
            ):
                continue
            grown = key is None and isinstance(table.live, list) and same_objects(now[: len(before)], before)
            outputs = list(self.outputs)
            with contextlib.suppress(Exception):  # objects that cannot be copied stay as they are
                template = _template(now[len(before) :] if grown else now, outputs)
                if len(outputs) > len(self.outputs):
                    self._written.append(_Written(table, key, template, before, grown))
                    self.outputs = outputs

    @property
    def names(self) -> list[str]:
        return [w.table.slot(w.key) for w in self._written]

    def forget_state(self, engine: Any) -> None:
        """Leaves out tensors that the graph itself keeps from call to call."""
        kept = set(map(id, constants_of(engine).values()))
        self._written = [w for w in self._written if not any(id(x) in kept for x in pytree.tree_leaves(w.before))]
        self.outputs = []

    def compare(self, again: LeftTensors) -> None:
        """`again`: of a second call, which began with what this one has left. A list that is no longer then is made anew."""
        lengths = {w.table.slot(w.key): len(w.template) for w in again._written if w.grown}
        self._written = [
            w._replace(grown=w.grown and lengths.get(w.table.slot(w.key), 0) > len(w.template)) for w in self._written
        ]

    def put(self, outputs: list[Tensor]) -> None:
        """Writes what a run has returned for `outputs`."""
        for w in self._written:
            value, table = copy.deepcopy(w.template, {"outputs": outputs}), w.table.current()
            if w.grown:
                table.live.extend(value)
            else:
                table.put(w.key, value)
