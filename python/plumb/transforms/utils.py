"""For transforms of one's own, written against ``torch.fx``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from .._errors import Error, ErrorKind
from .._fx import engine_to_fx
from ._apply import CapturedGraph, Pass, apply_pass

Backend = Callable[[GraphModule, List[Tensor]], Callable[..., Any]]


@dataclass
class BackendPass:
    backend: Backend

    def __call__(self, module: nn.Module, captured: CapturedGraph) -> dict:
        if captured.gm is None:
            captured.gm, captured.attributes = engine_to_fx(captured.engine, module.training)
        if not isinstance(captured.gm, GraphModule):
            raise Error(
                "an earlier backend of apply_transform() returned no torch.fx.GraphModule, so this one has no graph to work "
                "on",
                kind=ErrorKind.InvalidState,
                remedy="apply it first",
            )
        state = {name: tensor for name, _, tensor, _ in captured.engine.state()}
        captured.gm = self.backend(captured.gm, [state[n] for n in captured.attributes])
        return {"pass": getattr(self.backend, "__name__", type(self.backend).__name__), "entries": []}


def apply_transform(
    module: nn.Module, backend: Backend, non_recurse_functions: List[Callable[..., Any]] = []  # noqa: B006
) -> nn.Module:
    """A copy of `module` whose captured graph goes through `backend`, as it would under ``torch.compile``.

    backend: takes a :class:`torch.fx.GraphModule` on ``torch.ops`` and the tensors of its first inputs (the module's
        parameters and buffers; the inputs follow), and returns what is to be called instead.
    non_recurse_functions: taken for the sake of programs that give it; a graph holds operators, whose insides are not seen.

    Transforms of plumb applied to the result still come before it.
    """
    return apply_pass(module, Pass("backend", BackendPass(backend)))


def replace_node_with_function(
    graph: Graph,
    source: Node,
    target_fn: Callable[..., Any],
    args: Optional[Tuple[Any, ...]] = None,
    kwargs: Optional[Dict[Any, Any]] = None,
    keep_type_expr: bool = True,
) -> None:
    """Puts a call of `target_fn` in the place of a node of a ``torch.fx`` graph, by default with the node's arguments."""
    with graph.inserting_after(source):
        call = graph.call_function(
            target_fn,
            source.args if args is None else args,
            source.kwargs if kwargs is None else kwargs,
            source.type if keep_type_expr else None,
        )
    source.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
    graph.erase_node(source)


__all__ = ["Backend", "apply_transform", "replace_node_with_function"]
