"""For transforms of one's own, written against ``torch.fx``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from .._errors import Error, ErrorKind
from .._fx import engine_to_fx
from .._transformed import forward_of
from ._apply import CapturedGraph, Module, Pass, TransformedForward, apply_pass, logger

Backend = Callable[[GraphModule, List[Tensor]], Callable[..., Any]]
"""The type of ``torch.compile(backend=...)``: a function of a graph and its first inputs that returns a callable."""


class BackendForward(TransformedForward):
    """The callable that a backend of plumb returns: runs the given graph, transformed."""

    example_inputs: Optional[List[Tensor]] = None  # until it has run

    @property
    def graph(self) -> Graph:
        """The transformed graph on ``torch.ops``: of what ran last, and before that for the example inputs."""
        if self.last is None:
            try:
                self.prepare(tuple(self.example_inputs or ()), {})
            except TypeError as error:  # a backend of apply_transform() is given the first inputs alone
                raise Error(
                    f"the example inputs are not all inputs of the graph, which shows itself after its first run: {error}",
                    kind=ErrorKind.InvalidState,
                    remedy="run it once",
                ) from error
        return engine_to_fx(self.last.engine, self.module.training)[0].graph

    def prepare(self, args: tuple, kwargs: dict) -> Tuple[CapturedGraph, Any]:
        self.example_inputs = None
        return super().prepare(args, kwargs)


class PassBackend(ABC):
    """A transform of plumb as a backend: of `apply_transform`, or of ``torch.compile(backend=...)``, whose graph it captures."""

    @abstractmethod
    def as_pass(self) -> Pass: ...

    def watch(self, forward: TransformedForward) -> None:
        """Learns what runs the pass."""

    def __call__(self, gm: GraphModule, example_inputs: List[Tensor]) -> BackendForward:
        forward = BackendForward(gm, [self.as_pass()])
        forward.example_inputs = example_inputs
        self.watch(forward)
        return forward


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
        name = getattr(self.backend, "__name__", type(self.backend).__name__)
        graph, before = captured.gm.graph, str(captured.gm.graph)
        captured.gm = self.backend(captured.gm, [state[n] for n in captured.attributes])
        entries = []
        if isinstance(captured.gm, GraphModule) and str(captured.gm.graph) == before:  # the given one, or one made of its graph
            found = sorted({str(n.target) for n in graph.nodes if n.op == "call_function"})
            reason = "it changed nothing: the graph's nodes are operators of torch.ops, not functions of torch"
            logger.warning("backend %s: %s (%s)", name, reason, ", ".join(found))
            entries = [{"kind": "left_alone", "node": name, "reason": reason}]
        return {"pass": name, "entries": entries}


def apply_transform(
    module: Module, backend: Backend, non_recurse_functions: List[Callable[..., Any]] = []  # noqa: B006
) -> Module:
    """Returns a copy of `module` whose captured graph goes through `backend`, as it would under ``torch.compile``.

    backend: takes a :class:`torch.fx.GraphModule` on ``torch.ops`` (``torch.ops.aten.gelu.default``, not
        ``torch.nn.functional.gelu``) and the tensors of its first inputs (the module's parameters and buffers; the inputs
        follow), and returns what is to be called instead. One that finds nothing to change is reported and logged. plumb's
        own backends are taken as the transforms they are.
    non_recurse_functions: refused unless empty: a graph holds operators, so a function of Python is no node of it.

    Transforms of plumb applied to the result still come before it.
    """
    if non_recurse_functions:
        names = ", ".join(getattr(f, "__qualname__", str(f)) for f in non_recurse_functions)
        raise Error(
            f"non_recurse_functions: calls of {names} cannot stay one node each, because a graph holds operators",
            kind=ErrorKind.Unsupported,
            remedy="make the function an operator with torch.library.custom_op, or unit_scale(module, replace={function: other})",
        )
    if not isinstance(backend, PassBackend):
        return apply_pass(module, Pass("backend", BackendPass(backend)))
    transformed = apply_pass(module, backend.as_pass())
    backend.watch(forward_of(transformed))
    return transformed


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
