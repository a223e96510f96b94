"""Passes of the engine's table on a captured graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from .. import _C
from .._arguments import checked
from .._graph_module import GraphModule
from .._state import own_parameters
from .._unit_scaled import mark_state_dict, unmark
from ..parameter import has_parameter_data, tag_parameter, tell_engine, untag_parameter


class PassResult(NamedTuple):
    """The result of one pass: its name, whether it changed the graph, how long it took, and its notes."""

    name: str
    changed: bool
    seconds: float
    notes: list[str]


def _show_tags(module: GraphModule) -> bool:
    """Shows the engine's tags on the parameters; returns whether there are any."""
    for parameter in module.parameters():
        tag = _C.tag_of(parameter)
        if tag is not None:
            tag_parameter(parameter, *tag)
        elif has_parameter_data(parameter):
            untag_parameter(parameter)
    return any(map(has_parameter_data, module.parameters()))


@checked
def run_passes(module: GraphModule, *passes: str, dump: str | os.PathLike | None = None) -> list[PassResult]:
    """Runs passes on a graph in place, in order: ``run_passes(plumb.capture(net, x), "dead_code", "optimise,fuse=true")``.

    passes: ``"NAME[,option=value]..."``; ``plumb opt --list`` shows names and options.
    dump: a folder for the graph's text before the first pass and after every pass.

    The tensors are the captured module's own: weights that a pass rescales (``unit_scale``) are rescaled there, too.
    The graph is linted after every pass. Raises `plumb.Error` for a pass or option that there is not.
    """
    if not isinstance(module, GraphModule):
        raise TypeError(
            f"run_passes takes a plumb.GraphModule, got {type(module).__name__}\n  try: run_passes(plumb.capture(module, *inputs), ...)"
        )
    module.require_its_graph("run_passes")
    for parameter in module.parameters():
        tell_engine(parameter)
    had_tags = _show_tags(module)
    done = module._engine.run_passes(list(passes), "" if dump is None else os.fsencode(dump))
    module.__dict__["_fx"] = None
    own_parameters(module._engine)
    before = module._slots
    module._register()
    kept = {name for _, _, name, _ in module._slots}
    for table, leaf, name, _ in before:
        if name not in kept:  # a pass has divided it
            table.pop(leaf, None)
    if _show_tags(module) != had_tags:  # it was unit-scaled, or folded
        (unmark if had_tags else mark_state_dict)(module)
    return [PassResult(*result) for result in done]


def join_vocabulary(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state with the parts of each parameter that the pass ``split_vocabulary`` divided as one tensor again,
    under the name that it had: what the undivided model loads."""
    return dict(_C.join_vocabulary(list(state.items())))
