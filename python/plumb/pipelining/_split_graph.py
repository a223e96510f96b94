"""The top of a cut model as a ``torch.fx`` graph, and the executor that runs it with the stages apart."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch import fx, nn

from .. import _C
from .._errors import Error, ErrorKind
from .._fx import graph_module, placeholder
from ._stage_module import stage_state

PP_SUBMOD_PREFIX = "submod_pp"


def get_submod_name(stage_idx: int) -> str:
    """The name of a stage's module in ``Pipe.split_gm``: "submod_pp_0"."""
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


def top_graph(input_names: list[str], table: Any, steps: list[dict] | None) -> fx.Graph:
    """Inputs, one call a stage, the outputs; with `steps` also the backward, as `stage_backward` nodes in its order.

    A value used by several stages has its gradients added from the last user to the first.
    """
    graph = fx.Graph()
    inputs = [placeholder(graph, name) for name in input_names]
    made: list[list[fx.Node]] = []
    entered: list[list[fx.Node]] = []
    for s in range(table.num_stages):
        values = [inputs[p["index"]] if p["stage"] < 0 else made[p["stage"]][p["index"]] for p in table.inputs(s)]
        entered.append(values)
        call = graph.create_node("call_module", get_submod_name(s), tuple(values), {})
        call.meta["stage_idx"] = s
        count = len(table.outputs(s))
        made.append([call] if count == 1 else [graph.call_function(operator.getitem, (call, i)) for i in range(count)])
    if steps is not None:
        _backward_nodes(graph, made, entered, steps)
    graph.output(tuple(made[-1][port] if port is not None else value for port, value in table.outputs_of_whole))
    return graph


def _backward_nodes(graph: fx.Graph, made: list, entered: list, steps: list[dict]) -> None:
    from ._backward import _null_coalesce_accumulate, stage_backward

    grads: dict[tuple[int, int], fx.Node] = {}

    def grad(ref: tuple[int, int] | None) -> fx.Node | None:
        return None if ref is None else grads[ref]

    for step in steps:
        s = step["stage"]
        call = graph.call_function(
            stage_backward,
            kwargs={
                "stage_output": tuple(made[s]),
                "output_grads": tuple(grad(ref) for ref in step["output_grads"]),
                "input_values": list(entered[s]),
                "outputs_with_grads_idxs": list(step["outputs_with_grads"]),
            },
        )
        call.meta["stage_idx"] = s
        for i, seed in enumerate(step["input_seeds"]):
            own = graph.call_function(operator.getitem, (call, i))
            if seed is not None:
                own = graph.call_function(_null_coalesce_accumulate, (grads[seed], own))
            grads[s, i] = own


def split_module(graph: fx.Graph, stages: list[nn.Module]) -> fx.GraphModule:
    """The graph with its stages as children. It is run by a `Pipe`, not by itself."""
    root = nn.Module()
    for s, stage in enumerate(stages):
        root.add_module(get_submod_name(s), stage)
    split = graph_module(root, graph, class_name="SplitModule")
    split.train(stages[0].training)
    split.forward = _refuse
    return split


def _refuse(*_: Any, **__: Any) -> None:
    raise Error(
        "split_gm holds the stages and does not run. To run pipeline locally, invoke the Pipe object directly",
        kind=ErrorKind.Unsupported,
        remedy="pipe(...), or DetachExecutor(pipe).run(...)",
    )


class DetachExecutor:
    """Runs a `Pipe` (or its ``split_gm``) in this process with its stages apart for autograd, as on separate ranks.

    ``run(*inputs)`` is one microbatch: forward, and the backward if the pipe has a loss; gradients are added to the
    parameters' ``.grad``, to every copy of a replicated parameter the sum. Bit for bit what ``backward()`` of the
    undivided model gives. ``forward`` and ``backward`` are the two halves; `backward` answers the inputs' gradients.
    """

    def __init__(self, module: nn.Module, garbage_collect_values: bool = True):
        pipe = module.__dict__.get("_pipe_ref", lambda: None)() if isinstance(module, fx.GraphModule) else module
        if pipe is None or not hasattr(pipe, "_engine"):
            raise Error("DetachExecutor takes a Pipe, or the split_gm of one that still exists")
        self._pipe = weakref.ref(pipe)
        self._executor = _C.DetachExecutor(pipe._engine)

    def _owner(self) -> Any:
        pipe = self._pipe()
        if pipe is None:
            raise Error("the executor's pipe no longer exists")
        return pipe

    def forward(self, *args: Any, **kwargs: Any) -> tuple:
        pipe = self._owner()
        pipe._sync()
        return pipe._outputs(self._executor.forward(pipe._source.flatten(args, kwargs)))

    def backward(self) -> list[torch.Tensor | None]:
        self._owner()
        return self._executor.backward()

    def run(self, *args: Any, initial_env: Any = None, **kwargs: Any) -> tuple:
        outputs = self.forward(*args, **kwargs)
        if self._owner().has_loss_and_backward and torch.is_grad_enabled():
            self.backward()
        return outputs


def sync_stages(stages: list[nn.Module], engine: Any, devices: list) -> None:
    """Tells the engine's pipe what happened to its stages in Python: replaced tensors, and moves to other devices."""
    for s, stage in enumerate(stages):
        stage.check_mode()
        stage_state(stage)
        device = stage.device
        if device is not None and device != devices[s]:
            engine.move_stage(s, device)
            devices[s] = device
