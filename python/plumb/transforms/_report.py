"""Reports of what transforms changed in a module, and why its tensors are not near unit scale."""

from __future__ import annotations

import weakref
from collections import Counter
from html import escape
from typing import Any, Callable

from torch import nn

from .. import _C
from .._arguments import checked
from .._errors import Error, ErrorKind
from .._graph_module import GraphModule
from .._state import sync_state, unwrapped
from .._transformed import forward_of, transformed_part

# Reports of plain modules that fold() made, while they live. A graph keeps its own.
folded_reports: weakref.WeakKeyDictionary[nn.Module, dict] = weakref.WeakKeyDictionary()


def rewritten(module: GraphModule, rewrite: Callable[..., tuple[Any, dict]], *how: Any) -> GraphModule:
    """Returns the graph that `rewrite` of the engine makes of this one, and keeps its report."""
    sync_state(module._engine, module._slots)
    engine, report = rewrite(module._engine, *how)
    made = module.on(engine)
    made._reports = (report,)
    return made


class Report(list):
    """A list of changes that transforms made for the last forward: dicts with ``pass`` and ``entries``. Prints as text."""

    def __repr__(self) -> str:
        counts = [f"{report['pass']}: {_counts(report['entries'])}" for report in self]
        return f"<Report of {'; '.join(counts) or 'no transform'}; print() shows every entry>"

    def _repr_html_(self) -> str:
        rows = []
        for report in self:
            rows.append(f'<tr><th colspan="4" style="text-align:left">{escape(report["pass"])}: {escape(_counts(report["entries"]))}</th></tr>')
            for e in report["entries"]:
                cells = [e["kind"], e["node"], _what(e), _where(e)]
                rows.append("<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in cells) + "</tr>")
        return "<table>" + "".join(rows) + "</table>"

    def __str__(self) -> str:
        lines = []
        for report in self:
            lines.append(f"{report['pass']}: {len(report['entries'])} entries")
            for e in report["entries"]:
                where = _where(e)
                at = f"  at {where}" if where else ""
                lines.append(f"  {e['kind']:<14} {e['node']:<24} {_what(e)}{at}")
        return "\n".join(lines)


def _counts(entries: list[dict]) -> str:
    kinds = Counter(e["kind"] for e in entries)
    return ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in kinds.items()) or "no entries"


def _what(entry: dict) -> str:
    what = " -> ".join(x for x in (entry.get("from", ""), entry.get("to", "")) if x)
    tau = f" tau={entry['tau']:g}" if entry.get("tau") is not None else ""
    return what + tau + (f": {entry['reason']}" if entry.get("reason") else "")


def _where(entry: dict) -> str:
    return " ".join(x for x in (entry.get("module", ""), f"({entry['source']})" if entry.get("source") else "") if x)


def report(module: nn.Module) -> Report:
    """The report of a transformed module: what was replaced by what, which adds are residual, what was left alone and why.

    Known after its first forward. The report of a module that :func:`plumb.transforms.fold` made: what was divided by what."""
    module = unwrapped(module)
    is_module = isinstance(module, nn.Module)
    done = [folded_reports[module]] if is_module and module in folded_reports else list(getattr(module, "_reports", ()))
    forward = forward_of(module) if is_module else None
    if forward is None and done:
        return Report(done)
    if forward is None:
        part = transformed_part(module) if is_module else ""
        raise Error(
            "the module was not transformed" + (", a part of it was" if part else "") if is_module else f"a {type(module).__name__} is no module",
            kind=ErrorKind.InvalidState,
            remedy=f"plumb.report({part})" if part else "plumb.transforms.unit_scale(module) and the like first",
        )
    if forward.last is None:
        raise Error(
            "the module has not run yet: its graph is made by the first forward",
            kind=ErrorKind.InvalidState,
            remedy="call it once",
        )
    return Report(done + forward.last.reports)


class ScaleCauses(list[dict[str, Any]]):
    """Dicts with ``gradients``, ``small``, ``target``, ``reason``, ``factor``, ``least``, ``most``, ``nodes``, ``tensors`` and
    ``text``, one for each cause. Prints as text, a line each."""

    def __repr__(self) -> str:
        return f"<{len(self)} causes of {sum(len(cause['tensors']) for cause in self)} tensors; print() shows each>"

    def _repr_html_(self) -> str:
        return "<ul>" + "".join(f"<li>{escape(cause['text'])}</li>" for cause in self) + "</ul>"

    def __str__(self) -> str:
        return "".join(cause["text"] for cause in self) or "every standard deviation lies within the limits\n"


@checked
def scale_causes(module: nn.Module, low: float = 0.25, high: float = 4.0) -> ScaleCauses:
    """Explains which tensors of a tracked module have a standard deviation outside of [low, high], and why.

    `module` is what :func:`plumb.transforms.track_scales` returned, after a forward and a backward. Looks at every value that a
    gradient flows through and at every gradient, parameters' among them. Each cause is a kind of operator: where the scale changes
    most on the way to these tensors, by which factor, and what :func:`plumb.transforms.unit_scale` reported of that operator.

    Raises plumb.Error(InvalidState) if the module is not tracked or no backward has run, plumb.Error(InvalidArgument) unless 0 < low < high.
    """
    module = unwrapped(module)
    said = [
        (entry["node"], entry["reason"])
        for part in report(module)
        for entry in part["entries"]
        if entry["kind"] in ("replaced", "residual", "left_alone") and entry.get("reason")
    ]
    forward = forward_of(module)  # None of what fold() made, which has a report
    last = forward.last if forward is not None else None
    tracker = last.results.get("track_scales") if last is not None else None
    if last is None or tracker is None:
        raise Error(
            "the module does not measure its scales",
            kind=ErrorKind.InvalidState,
            remedy="plumb.transforms.track_scales(module) first",
        )
    return ScaleCauses(_C.scale_causes(last.engine, tracker, said, low, high))
