"""The way back from unit scaling."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from .. import _C
from .._errors import Error, ErrorKind
from .._graph_module import GraphModule
from .._state import CONSTANT, in_modes, slot_of, sync_state
from .._transformed import forward_of, transformed_part
from .._unit_scaled import mark_state_dict, unmark
from ._apply import CapturedGraph, Module, TransformedForward, copy_module, logger
from ._own_copies import without_transforms
from ._report import folded_reports, rewritten

_SHOWN = 5  # number of factors that an error names


def fold(module: Module, *args: Any, **kwargs: Any) -> Module:
    """Returns the plain module that computes what a unit-scaled one does: its factors are in the weights.

    The result is a copy of the module that :func:`unit_scale` was given, without any transform, whose parameters and
    buffers are the trained ones divided by factors. Its state dict loads into the original model.
    ``print(plumb.report(result))`` says what was divided by what.

    args, kwargs: an example of the forward's inputs; without them the graph of the last forward is folded. Factors of
    attention, softmax and products of activations follow from the inputs' length: the result holds for that length, as
    the report says. The function is that of evaluation. The numbers differ by rounding, and by what the ``eps`` of a
    norm weighs where the values before it have another scale.

    A captured graph (:func:`plumb.capture`, :func:`plumb.load_pt2`) gives a graph of torch's own operators. A factor that
    no parameter can take stays in it as a multiplication, and ``eps`` is adjusted: the plain module refuses the state dict of
    such a graph.

    Raises :class:`plumb.Error` (Unsupported) for a module whose factors do not all go into parameters (one tensor that
    would have to have two factors), naming them, and (InvalidState) for what was not unit-scaled.
    """
    if isinstance(module, GraphModule):
        graph = rewritten(module, _C.fold)
        if any(e["kind"] == "remains" for e in graph._reports[0]["entries"]):
            mark_state_dict(graph)  # its weights are a plain module's only together with what stays in the graph
        return cast(Module, graph)
    forward = forward_of(module) if isinstance(module, nn.Module) else None
    unit_scaling = next((p.run for p in forward.passes if p.name == "unit_scale"), None) if forward else None
    if forward is None or unit_scaling is None:
        part = transformed_part(module) if forward is None and isinstance(module, nn.Module) else ""
        raise Error(
            f"this {type(module).__name__} was not unit-scaled" + (", a part of it was transformed" if part else ""),
            kind=ErrorKind.InvalidState,
            remedy=f"fold the part: fold({part})"
            if part
            else "fold what plumb.transforms.unit_scale returned, or a graph of unit-scaled operators: "
            "fold(plumb.capture(module, *inputs))",
        )
    captured = _graph_of(forward, args, kwargs)
    sync_state(captured.engine, captured.slots)
    engine, report = _C.fold(captured.engine)
    _refuse_what_remains(type(module).__name__, report["entries"], captured)
    logger.info("folding factors into %d parameters", sum(e["kind"] == "folded" for e in report["entries"]))
    plain = copy_module(module)
    without_transforms(plain)
    unmark(plain)
    _untag(plain, unit_scaling.users_tags)
    with torch.no_grad():
        for name, kind, tensor, _ in engine.state():
            if kind != CONSTANT:
                table, leaf = slot_of(plain, name)
                table[leaf].copy_(tensor)
    folded_reports[plain] = report
    return plain


def _graph_of(forward: TransformedForward, args: tuple, kwargs: dict) -> CapturedGraph:
    if args or kwargs:
        with in_modes(forward.module.modules()):
            forward.module.eval()
            return forward.prepare(args, kwargs)[0]
    if forward.last is None:
        raise Error(
            "the module has not run yet: factors follow from the sizes of its inputs",
            kind=ErrorKind.InvalidState,
            remedy="an example of its inputs: fold(module, *inputs)",
        )
    return forward.last


def _refuse_what_remains(name: str, entries: list[dict], captured: CapturedGraph) -> None:
    remains = [_place(e) + ": " + e["from"] for e in entries if e["kind"] == "remains"]
    remains += [_place(e) + f": {e['reason']}" for e in entries if e["kind"] == "left_alone" and e.get("from")]
    for unit_scaling in captured.reports[:1]:
        remains += [
            f"{_place(e)}: {e['from']} became {e['to']}, as asked for"
            for e in unit_scaling["entries"]
            if e["kind"] == "replaced" and e.get("asked") and not _same_function(e, captured)
        ]
    if remains:
        more = f" and {len(remains) - _SHOWN} more" if len(remains) > _SHOWN else ""
        raise Error(
            f"the weights of a plain {name} cannot take {len(remains)} of the unit-scaled one's factors: "
            + "; ".join(remains[:_SHOWN])
            + more,
            kind=ErrorKind.Unsupported,
            remedy="fold a graph, where they stay as multiplications: fold(plumb.capture(module, *inputs))",
        )


def _same_function(entry: dict, captured: CapturedGraph) -> bool:
    """Returns whether a replacement asked for is the unit-scaled form of what it replaces, by name."""
    call = captured.calls.get(entry["node"])
    new = getattr(call.replaced[1], "__module__", "") if call is not None and call.replaced else entry["to"]
    unit_scaled = new.startswith(("plumb::", "plumb.functional"))
    return unit_scaled and entry["from"].rpartition("::")[2] == entry["to"].rpartition("::")[2]


def _place(entry: dict) -> str:
    where = ", ".join(x for x in (entry.get("module"), entry.get("source")) if x)
    return f"{entry['node']} ({where})" if where else entry["node"]


def _untag(module: nn.Module, keep: set[str]) -> None:
    """Parameters without the tags of unit scaling, tied ones tied as before."""
    tagged = {n: p for n, p in module.named_parameters(remove_duplicate=False) if hasattr(p, "mup_type") and n not in keep}
    fresh = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in tagged.values()}
    for name, p in tagged.items():
        table, leaf = slot_of(module, name)
        table[leaf] = fresh[id(p)]
