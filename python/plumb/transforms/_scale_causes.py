"""Why tensors of a tracked module are not near unit scale."""

from __future__ import annotations

from html import escape
from typing import Any

from torch import nn

from .. import _C
from .._errors import Error, ErrorKind
from ._apply import forward_of
from ._report import report


class ScaleCauses(list[dict[str, Any]]):
    """Dicts with ``gradients``, ``small``, ``target``, ``reason``, ``factor``, ``least``, ``most``, ``nodes``, ``tensors`` and
    ``text``, one for each cause. Prints as text, a line each."""

    def __repr__(self) -> str:
        return f"<{len(self)} causes of {sum(len(cause['tensors']) for cause in self)} tensors; print() shows each>"

    def _repr_html_(self) -> str:
        return "<ul>" + "".join(f"<li>{escape(cause['text'])}</li>" for cause in self) + "</ul>"

    def __str__(self) -> str:
        return "".join(cause["text"] for cause in self)


def scale_causes(module: nn.Module, low: float = 0.25, high: float = 4.0) -> ScaleCauses:
    """Explains which tensors of a tracked module have a standard deviation outside of [low, high], and why.

    `module` is what :func:`plumb.transforms.track_scales` returned, after a forward and a backward. Looks at every value that a
    gradient flows through and at every gradient, parameters' among them. Each cause is a kind of operator: where the scale changes
    most on the way to these tensors, by which factor, and what :func:`plumb.transforms.unit_scale` reported of that operator.

    Raises plumb.Error(InvalidState) if the module is not tracked or has not run, plumb.Error(InvalidArgument) unless 0 < low < high.
    """
    said = [
        (entry["node"], entry["reason"])
        for part in report(module)
        for entry in part["entries"]
        if entry["kind"] in ("replaced", "residual", "left_alone") and entry.get("reason")
    ]
    forward = forward_of(module)
    assert forward is not None and forward.last is not None, "report() has raised"
    tracker = forward.last.results.get("track_scales")
    if tracker is None:
        raise Error(
            "the module does not measure its scales",
            kind=ErrorKind.InvalidState,
            remedy="plumb.transforms.track_scales(module) first",
        )
    return ScaleCauses(_C.scale_causes(forward.last.engine, tracker, said, low, high))
