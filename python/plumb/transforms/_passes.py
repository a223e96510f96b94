"""Passes of the engine's table on a captured graph."""

from __future__ import annotations

import os
from typing import NamedTuple

from .._capture import GraphModule


class PassResult(NamedTuple):
    """What a pass did: its name, whether it changed the graph, how long it took, and its notes."""

    name: str
    changed: bool
    seconds: float
    notes: list[str]


def run_passes(module: GraphModule, *passes: str, dump: str | os.PathLike | None = None) -> list[PassResult]:
    """Runs passes on a graph in place, in order: ``run_passes(plumb.capture(net, x), "dead_code", "optimise,fuse=true")``.

    passes: ``"NAME[,option=value]..."``; ``plumb opt --list`` shows names and options.
    dump: a folder for the graph's text before the first pass and after every pass.

    The graph is linted after every pass. Raises `plumb.Error` for a pass or option that there is not.
    """
    done = module._engine.run_passes(list(passes), "" if dump is None else os.fspath(dump))
    module.__dict__["_fx"] = None
    module._register()
    return [PassResult(*result) for result in done]
