"""What transforms did to a module."""

from __future__ import annotations

import json
import weakref
from typing import Any, Callable

from torch import nn

from .._errors import Error, ErrorKind
from .._graph_module import GraphModule
from .._state import sync_state
from ._apply import forward_of

# Of modules that fold() and the like made, while they live.
folded_reports: weakref.WeakKeyDictionary[nn.Module, dict] = weakref.WeakKeyDictionary()


def rewritten(module: GraphModule, rewrite: Callable[..., tuple[Any, str]], *how: Any) -> GraphModule:
    """The graph that `rewrite` of the engine makes of this one, and keeps its report."""
    sync_state(module._engine, module._slots)
    engine, text = rewrite(module._engine, *how)
    made = module.on(engine)
    folded_reports[made] = json.loads(text)
    return made


class Report(list):
    """A list of changes that transforms made for the last forward: dicts with ``pass`` and ``entries``. Prints as text."""

    def __str__(self) -> str:
        lines = []
        for report in self:
            lines.append(f"{report['pass']}: {len(report['entries'])} entries")
            for e in report["entries"]:
                where = " ".join(x for x in (e.get("module", ""), f"({e['source']})" if e.get("source") else "") if x)
                what = " -> ".join(x for x in (e.get("from", ""), e.get("to", "")) if x)
                tau = f" tau={e['tau']:g}" if e.get("tau") is not None else ""
                reason = f": {e['reason']}" if e.get("reason") else ""
                at = f"  at {where}" if where else ""
                lines.append(f"  {e['kind']:<14} {e['node']:<24} {what}{tau}{reason}{at}")
        return "\n".join(lines)


def report(module: nn.Module) -> Report:
    """The report of a transformed module: what was replaced by what, which adds are residual, what was left alone and why.

    Known after its first forward. Of a module that :func:`plumb.transforms.fold` made: what was divided by what."""
    if module in folded_reports:
        return Report([folded_reports[module]])
    forward = forward_of(module)
    if forward is None:
        raise Error(
            "the module was not transformed",
            kind=ErrorKind.InvalidState,
            remedy="plumb.transforms.unit_scale(module) and the like first",
        )
    if forward.last is None:
        raise Error(
            "the module has not run yet: its graph is made by the first forward",
            kind=ErrorKind.InvalidState,
            remedy="call it once",
        )
    return Report(forward.last.reports)
