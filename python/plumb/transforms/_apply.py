"""Transformed modules: a copy of the user's module whose ``forward`` runs a captured and rewritten graph."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._capture import BUFFER, CONSTANT, capture_engine, signature, sync_state


@dataclass
class Pass:
    """One transform: `run(engine)` changes the engine's graph in place and answers its report (a dict)."""

    name: str
    run: Callable[[Any], dict]
    before: tuple[str, ...] = ()  # passes that this one must come before


@dataclass
class _Captured:
    engine: Any
    out_spec: Any
    plain: list
    slots: list
    reports: list[dict]
    notes: list[str]
    simple: bool


def _key(leaves: list, spec: Any, module: nn.Module) -> Any:
    modes = tuple(m.training for m in module.modules())
    autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    key = (spec, signature(leaves), modes, autocast)
    try:
        hash(key)
    except TypeError:
        key = (str(spec), repr([x if not isinstance(x, Tensor) else None for x in leaves]), signature([x for x in leaves if isinstance(x, Tensor)]), modes, autocast)
    return key


class TransformedForward:
    """The ``forward`` of a transformed module.

    The first call with new shapes, dtypes, devices, modes or constants captures the module's own forward and applies the
    passes in order; the graph is kept for the next call like it.
    """

    def __init__(self, module: nn.Module, passes: list[Pass]):
        self.module, self.passes = module, passes
        self._cache: dict[Any, _Captured] = {}
        self.last: _Captured | None = None

    @property
    def original(self) -> Callable[..., Any]:
        return type(self.module).forward.__get__(self.module)

    def _capture(self, args: tuple, kwargs: dict) -> _Captured:
        engine, _, (out_spec, plain), notes = capture_engine(self.module, args, kwargs, forward=self.original)
        reports = [p.run(engine) for p in self.passes]
        slots = []
        for name, kind, tensor, _ in engine.state():
            if kind == CONSTANT:
                continue
            owner, _, leaf = name.rpartition(".")
            sub = self.module.get_submodule(owner)
            slots.append((sub._buffers if kind == BUFFER else sub._parameters, leaf, name, tensor))
        simple = out_spec.is_leaf() and plain == [None]
        return _Captured(engine, out_spec, plain, slots, reports, notes, simple)

    def prepare(self, args: tuple, kwargs: dict) -> tuple[_Captured, list]:
        """The graph for inputs like these, captured now if there is none yet; and the inputs' leaves."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = _key(leaves, spec, self.module)
        captured = self._cache.get(key)
        if captured is None:
            captured = self._cache[key] = self._capture(args, kwargs)
        return captured, leaves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        captured, leaves = self.prepare(args, kwargs)
        self.last = captured
        sync_state(captured.engine, captured.slots)
        out = captured.engine.run([x if isinstance(x, Tensor) else None for x in leaves])
        if captured.simple:
            return out[0]
        return pytree.tree_unflatten([p if p is not None else o for o, p in zip(out, captured.plain)], captured.out_spec)

    # A copy belongs to the copied module and captures afresh; the passes know how to copy what they hold.
    def __deepcopy__(self, memo: dict) -> TransformedForward:
        return TransformedForward(copy.deepcopy(self.module, memo), copy.deepcopy(self.passes, memo))

    def __getstate__(self) -> dict:
        return {"module": self.module, "passes": self.passes}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["module"], state["passes"])


def forward_of(module: nn.Module) -> TransformedForward | None:
    forward = module.__dict__.get("forward")
    return forward if isinstance(forward, TransformedForward) else None


def apply_pass(module: nn.Module, new: Pass) -> nn.Module:
    """A deep copy of `module` whose forward applies `new` after the transforms it has already (or before those that must
    follow it)."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"a transform takes a torch.nn.Module, got {type(module).__name__}")
    module = copy.deepcopy(module)
    known = forward_of(module)
    passes = list(known.passes) if known else []
    place = next((i for i, p in enumerate(passes) if p.name in new.before), len(passes))
    passes.insert(place, new)
    module.__dict__["forward"] = TransformedForward(module, passes)
    return module


class Report(list):
    """What the transforms of a module did in its last forward: dicts with ``pass`` and ``entries``. Prints as text."""

    def __str__(self) -> str:
        lines = []
        for report in self:
            lines.append(f"{report['pass']}: {len(report['entries'])} entries")
            for e in report["entries"]:
                where = " ".join(x for x in (e.get("module", ""), f"({e['source']})" if e.get("source") else "") if x)
                what = " -> ".join(x for x in (e.get("from", ""), e.get("to", "")) if x)
                tau = f" tau={e['tau']:g}" if e.get("tau") is not None else ""
                reason = f": {e['reason']}" if e.get("reason") else ""
                lines.append(f"  {e['kind']:<14} {e['node']:<24} {what}{tau}{reason}" + (f"  at {where}" if where else ""))
        return "\n".join(lines)


def report(module: nn.Module) -> Report:
    """The report of a transformed module: what was replaced by what, which adds are residual, what was left alone and why.

    Known after its first forward."""
    forward = forward_of(module)
    if forward is None:
        raise _C.Error("the module was not transformed\n  try: plumb.transforms.unit_scale(module) and the like first")
    if forward.last is None:
        raise _C.Error("the module has not run yet: its graph is made by the first forward\n  try: call it once")
    return Report(forward.last.reports)


def parse(text: str) -> dict:
    return json.loads(text)
