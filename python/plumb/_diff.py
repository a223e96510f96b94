"""The first tensor in which two runs differ: :func:`diff`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _C, checkpoint
from ._capture.forward import capture
from ._errors import Error
from ._exported import load_pt2
from ._graph_module import GraphModule
from ._recorder import History, read_history
from ._state import FULL, refuse_sharded, sync_state
from ._transformed import forward_of
from .transforms._apply import copy_module


class Diff:
    """The result of :func:`diff`. ``print(it)`` shows the conclusion and the tensors that differ."""

    def __init__(self, engine: Any):
        self._engine = engine
        found = json.loads(engine.to_json())
        self.equal: bool = found["equal"]
        """True if something was compared, nothing of it differs, and no state dict lacks a name, no module an output or the
        gradient of a parameter of the other."""
        self.conclusion: str = found["conclusion"]
        """Names the first tensor that differs, how far apart it is, and how many follow from it."""
        self.statement: str = found["statement"]
        """The bits that could be expected to be equal: every bit, what does not depend on the microbatches, or nothing."""
        self.first: dict[str, Any] = found.get("first") or {}
        """``tensor``, ``kind`` (``"value"``, ``"gradient"``, ``"gradient_sum"``, ``"after_step"``, ``"optimizer_state"``), ``module``,
        ``operator``, ``source``, ``stage``, ``rank``, ``microbatch``, ``first_row``, ``rows`` (-1 and 0 if unknown), and ``step``, ``ulps``,
        ``relative`` and ``output`` (of outputs of other names in one place) where they are known. Empty if nothing differs."""
        self.compared: int = found["compared"]
        self.differing: int = found["differing"]
        self.following: int = found["following"]
        """Number of tensors compared in the step; those of them that differ; those that follow from the first."""
        self.only_a: list[str] = found["only_a"]
        self.only_b: list[str] = found["only_b"]
        """Names of tensors that only one of them has."""
        self.other_outputs: list[str] = found["other_outputs"]
        """Keys or places of outputs that one of two modules lacks, or has another constant in."""

    def page(self, path: str) -> None:
        """Writes an HTML page with the graph in colors, which needs no other file."""
        _C.write_file(os.fspath(path), self._engine.page())

    def __str__(self) -> str:
        return self._engine.to_text()

    def __repr__(self) -> str:
        return f"<Diff: {self.conclusion}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def diff(
    a: Any, b: Any, inputs: Any = None, *, loss: Callable[[Any], Tensor] | None = None, tolerance: float = 0.0
) -> Diff:
    """Names the first tensor in which `a` and `b` differ, in the order of the graph.

    ::

        print(plumb.diff("a.history", "b.history"))
        print(plumb.diff(net, plumb.transforms.simulate_fp8(net), x))

    a, b: two histories (:class:`plumb.History`, or their paths) with hashes; two state dicts, also an optimizer's, each a
        dict or the folder of a checkpoint (of a run: its newest); or two modules, each a ``torch.nn.Module`` or the path of a
        ``.pt2`` file.
    inputs: of two modules: a tensor, or a tuple of arguments. Each module gets them on the device of its parameters.
    loss: takes a module's output and returns the scalar whose backward is compared; None: the sum of the outputs.
    tolerance: relative differences of two modules' tensors up to this one count as none.

    The modules stay as they are, their gradients and buffers too, and both draw the same random numbers. Raises :class:`plumb.Error` for histories without hashes of a common
    step, and for what :func:`plumb.capture` refuses.
    """
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < float("inf"):
        raise Error(f"tolerance={tolerance!r}", remedy="a relative difference, 0.001")
    if loss is not None and not callable(loss):
        raise Error(f"loss={loss!r}", remedy="a function of a module's output that returns a scalar")
    a, b = (dict(checkpoint._find(x).read_all()) if _is_path(x) and os.path.isdir(x) else x for x in (a, b))
    is_module = [isinstance(x, nn.Module) or _is_path(x, ".pt2") for x in (a, b)]
    if not any(is_module) and (inputs is not None or loss is not None or tolerance):
        raise Error("inputs, loss and tolerance are for two modules", remedy="diff(a, b)")
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        try:
            return Diff(_C.diff_tensors(_tensors(a), _tensors(b)))
        except RecursionError:
            raise Error("a state dict is nested too deeply, or holds itself", remedy="diff() of its parts") from None
    if not any(is_module):
        if not all(isinstance(x, History) or _is_path(x) for x in (a, b)):
            kinds = " and ".join(type(x).__name__ for x in (a, b))
            raise Error(f"{kinds} are not compared", remedy="two histories, two state dicts or two modules")
        names = ["ab"[i] if isinstance(x, History) else os.fspath(x) for i, x in enumerate((a, b))]
        histories = [x if isinstance(x, History) else read_history(os.fspath(x)) for x in (a, b)]
        return Diff(_C.diff_histories(histories[0]._engine, histories[1]._engine, *names))
    if not all(is_module):
        remedy = "two modules, two .pt2 files, or one of each; with a checkpoint or a state dict, the module's state_dict()"
        raise Error("a module is compared with a module", remedy=remedy)
    if inputs is None:
        raise Error("two modules are compared on inputs", remedy="diff(a, b, inputs)")
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    (of_a, args_a), (of_b, args_b) = (_graph(x, args) for x in (a, b))
    both = _C.ModuleDiff(of_a._engine, of_b._engine, *([_constant(x) for x in g._plain_outputs] for g in (of_a, of_b)))
    engines = both.a, both.b
    calls = [(of_a.on(engines[0]), args_a), (of_b.on(engines[1]), args_b)]
    both.run(lambda engine: _loss(*calls[engines.index(engine)], loss))
    return Diff(both.report(tolerance))


def _is_path(x: Any, suffix: str = "") -> bool:
    return isinstance(x, (str, os.PathLike)) and os.fspath(x).endswith(suffix)


def _tensors(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Returns the tensors of a state dict and of what is nested in it; numbers and texts as tensors."""
    if isinstance(state, Mapping):
        items: Any = state.items()
    elif isinstance(state, (tuple, list)):
        items = enumerate(state)
    elif isinstance(state, Tensor):
        refuse_sharded(name, state, "diff() compares", FULL)
        return [(name, state.detach())]
    elif isinstance(state, (float, complex)) or (isinstance(state, int) and abs(state) < 2**63):
        return [(name, torch.tensor(state, dtype=torch.float64 if isinstance(state, float) else None))]
    elif state is None or isinstance(state, (str, bytes, int, torch.dtype, torch.device)):
        return [(name, torch.tensor(list(repr(state).encode()), dtype=torch.uint8))]
    else:
        raise Error(
            f"'{name}' is a {type(state).__name__}", remedy="state dicts of tensors, numbers and texts, nested or not"
        )
    return [pair for key, value in items for pair in _tensors(value, f"{name}.{key}" if name else str(key))]


def _graph(module: Any, args: tuple) -> tuple[GraphModule, tuple]:
    net = module if isinstance(module, nn.Module) else load_pt2(os.fspath(module))
    if any(forward_of(sub) for sub in net.modules()):  # whose first call may scale weights, and whose last one is shown
        net = copy_module(net)
    device = next((p.device for p in net.parameters()), None)

    def copies() -> tuple:  # copies: neither module sees what the other writes into its inputs
        return pytree.tree_map_only(
            Tensor, lambda x: x.detach().to(device, copy=True).requires_grad_(x.requires_grad), args
        )

    graph = net if isinstance(net, GraphModule) and net.runs_its_graph else capture(net, *copies())
    sync_state(graph._engine, graph._slots)
    return graph, copies()


def _constant(value: Any) -> Any:
    """Returns an output of a forward that is no tensor as the engine compares it."""
    if value is None or isinstance(value, (bool, float, str)) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return repr(value) if isinstance(value, (int, complex, bytes, torch.dtype, torch.device)) else type(value).__qualname__


def _loss(graph: GraphModule, args: tuple, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """Returns the scalar to go backward from, None if nothing requires a gradient."""
    out = graph(*args)
    if loss is not None:
        value = loss(out)
        if not isinstance(value, Tensor):
            raise Error(
                f"the loss is a {type(value).__name__}", remedy="return a tensor of one element to go backward from"
            )
        if value.is_complex():
            raise Error("the loss is complex: there is no way backward from it", remedy="return a real one, loss.abs()")
        return value
    return _C.sum_of_outputs([x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)])
