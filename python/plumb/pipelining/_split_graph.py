"""The top of a cut model as a ``torch.fx`` graph, and the executor that runs it with the stages apart."""

from __future__ import annotations

import inspect
import logging
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from .._errors import Error, ErrorKind
from .._fx import graph_module, placeholder
from ._backward import _null_coalesce_accumulate, stage_backward
from ._utils import InvalidSchedule

logger = logging.getLogger("plumb.pipelining")

PP_SUBMOD_PREFIX = "submod_pp"


def get_submod_name(stage_idx: int) -> str:
    """Returns the name of a stage's module in ``Pipe.split_gm``: "submod_pp_0"."""
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


def _insert_stage_symbolic_backward(
    g: fx.Graph, loss_node: fx.Node, output_node: fx.Node, sum_inputs: bool = False
) -> fx.Graph:
    """Writes a `stage_backward` call for every stage that the loss depends on, from the last to the first, before the
    output. A value with several users has its gradients added as they come; an input of the graph only with
    `sum_inputs`."""
    parts: dict[fx.Node, dict[int, fx.Node]] = {}
    for node in g.nodes:
        if node.op == "call_function":
            if node.target is not operator.getitem or len(node.args) != 2:
                raise InvalidSchedule(f"'{node.format_node()}' is neither a stage's call nor a part of its output")
            source, index = node.args
            parts.setdefault(source, {})[index] = node
    needed = {loss_node}
    grads: dict[fx.Node, fx.Node | None] = {loss_node: None}
    with g.inserting_before(output_node):
        for node in reversed(list(g.nodes)):
            if node not in needed:
                continue
            needed.update(node.all_input_nodes)
            if node.op != "call_module":
                continue
            outputs: tuple[fx.Node | None, ...] = (node,)
            if node in parts:
                outputs = tuple(parts[node].get(i) for i in range(max(parts[node]) + 1))
            call = g.call_function(
                stage_backward,
                kwargs={
                    "stage_output": outputs,
                    "output_grads": tuple(grads.get(output) for output in outputs),
                    "input_values": list(node.all_input_nodes),
                    "outputs_with_grads_idxs": [i for i, output in enumerate(outputs) if output in needed],
                },
            )
            for i, value in enumerate(node.all_input_nodes):
                grad = g.call_function(operator.getitem, (call, i))
                if value in grads and (sum_inputs or value.op != "placeholder"):
                    grad = g.call_function(_null_coalesce_accumulate, (grads[value], grad))
                grads[value] = grad
    return g


def top_graph(input_names: list[str], table: Any, with_backward: bool) -> fx.Graph:
    """Inputs, one call a stage, the outputs; before these, if asked for, the backward as `stage_backward` nodes."""
    graph = fx.Graph()
    inputs = [placeholder(graph, name) for name in input_names]
    made: list[list[fx.Node]] = []
    for s in range(table.num_stages):
        values = [inputs[p["index"]] if p["stage"] < 0 else made[p["stage"]][p["index"]] for p in table.inputs(s)]
        call = graph.create_node("call_module", get_submod_name(s), tuple(values), {})
        call.meta["stage_idx"] = s
        count = len(table.outputs(s))
        made.append([call] if count == 1 else [graph.call_function(operator.getitem, (call, i)) for i in range(count)])
    outputs = tuple(made[-1][port] if port is not None else value for port, value in table.outputs_of_whole)
    output = graph.output(outputs)
    if with_backward:
        _insert_stage_symbolic_backward(graph, outputs[table.loss_output], output, sum_inputs=True)
    return graph


def _number_and_count_forward_stages(gm: fx.GraphModule) -> int:
    """Returns how many stages a top graph calls; each call learns its number as ``meta["stage_idx"]``."""
    calls = [n for n in gm.graph.nodes if n.op == "call_module" and n.target.startswith("submod_")]
    for node in calls:
        node.meta["stage_idx"] = int(node.target.rpartition("_")[2])
    return len(calls)


def _modify_graph_op_device(gm: fx.GraphModule, new_device: torch.device) -> None:
    """Device arguments of a graph's operators, and of the graphs in it, name another device."""
    changed = False
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("device", new_device) != new_device:
            logger.debug("Changing device of Node %s from %s to %s", node.name, node.kwargs["device"], new_device)
            node.update_kwarg("device", new_device)
            changed = True
        elif node.op == "call_module":
            inner = gm.get_submodule(node.target)
            inner = getattr(inner, "graph_module", inner)
            if isinstance(inner, fx.GraphModule):
                _modify_graph_op_device(inner, new_device)
            else:
                logger.warning("Skipping device modification for submodule %s because it is a %s", node.target, type(inner))
    if changed:
        gm.recompile()


def split_module(graph: fx.Graph, stages: list[nn.Module]) -> fx.GraphModule:
    """Returns the graph with its stages as children. It is run by a `Pipe`, not by itself."""
    root = nn.Module()
    for s, stage in enumerate(stages):
        root.add_module(get_submod_name(s), stage)
    split = graph_module(root, graph, class_name="SplitModule")
    split.train(stages[0].training)
    split.forward = refuse_to_run
    return split


def refuse_to_run(*_: Any, **__: Any) -> None:
    raise Error(
        "split_gm holds the stages and does not run. To run pipeline locally, invoke the Pipe object directly",
        kind=ErrorKind.Unsupported,
        remedy="pipe(...), or DetachExecutor(pipe).run(...)",
    )


def stage_calls(graph: fx.Graph) -> list[fx.Node]:
    """Returns the calls of stages in a top graph, in order. Raises `plumb.Error` (an AssertionError too) for a node
    that is no part of one."""
    functions = (operator.getitem, stage_backward, _null_coalesce_accumulate)
    for node in graph.nodes:
        fits = node.op in ("placeholder", "call_module", "output") or (node.op == "call_method" and node.target == "backward")
        if not fits and not (node.op == "call_function" and node.target in functions):
            raise InvalidSchedule(
                f"'{node.format_node()}' stands between the stages: a graph of stages calls them, and takes parts of outputs",
                remedy="put the operator into a stage",
            )
    return [node for node in graph.nodes if node.op == "call_module"]


def check_chain(graph: fx.Graph) -> None:
    """Raises `plumb.Error` unless every stage takes what the one before returns, all of it and nothing else."""
    calls = stage_calls(graph)
    for before, call in zip(calls, calls[1:]):
        parts = {n.args[1]: n for n in before.users if n.op == "call_function" and n.target is operator.getitem}
        if call.kwargs or call.args not in ((before,), tuple(parts[i] for i in sorted(parts))):
            raise Error(
                f"stage '{call.target}' takes other values than what '{before.target}' returns",
                kind=ErrorKind.Unsupported,
                remedy="pipeline(model, ...), whose stages may take values of any stage before",
            )


def log_cut(pipe: nn.Module, names: list[str]) -> None:
    """Logs where the whole model's parameters and buffers, `names`, went."""
    for by_stage in pipe.replicated_params:
        name = next(iter(by_stage.values()))
        logger.info("Parameter %s used in multiple stages: %s.", name, ", ".join(by_stage))
    if not logger.isEnabledFor(logging.DEBUG):
        return
    left = dict.fromkeys(names)
    for stage, module in pipe.split_gm.named_children():
        for name in module.state_dict(keep_vars=True):
            left.pop(name, None)
            logger.debug("Moved parameter %s to %s", name, stage)
    for name in left:
        logger.debug("Deleted %s: no stage uses it", name)
    training = "training mode, backward pass generated" if pipe.has_loss_and_backward else "inference mode, backward pass not generated"
    logger.debug("Pipeline is in %s", training)
    logger.debug("Full pipe model:\n%s", pipe)


def shared_parameters(split_gm: fx.GraphModule) -> list[dict[str, str]]:
    """Returns, for each parameter that several stages hold, its name by stage."""
    users: dict[nn.Parameter, dict[str, str]] = {}
    for stage, module in split_gm.named_children():
        for name, parameter in module.named_parameters():
            users.setdefault(parameter, {})[stage] = name
    return [by_stage for by_stage in users.values() if len(by_stage) > 1]


def bind_inputs(module: fx.GraphModule, args: tuple, kwargs: dict) -> tuple:
    """Returns a call's values in the order of the graph's placeholders, whose names may be keywords."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())[1:]


class DetachExecutor(fx.Interpreter):
    """Runs a graph of stages (a `Pipe`'s ``split_gm``, or one made by hand) node by node, as on separate ranks: what enters
    a stage is detached, so that only the graph's own `stage_backward` calls lead from stage to stage.

    ``run(*inputs)`` takes the graph's inputs in order, or of a `Pipe` what the model takes; the backward adds to the
    parameters' ``.grad``. ``initial_env`` gives values of nodes, which are then not computed. Values stay in ``env``.
    """

    def __init__(self, module: nn.Module, garbage_collect_values: bool = True):
        # The backward's nodes use every stage's values again.
        super().__init__(getattr(module, "split_gm", module), garbage_collect_values=False)
        self.value_remap: dict[torch.Tensor, torch.Tensor] = {}

    def run(self, *args: Any, initial_env: dict[fx.Node, Any] | None = None, **kwargs: Any) -> Any:
        self.value_remap = {}
        pipe = self.module.__dict__.get("_pipe_ref", lambda: None)()
        if pipe is None:
            return super().run(*bind_inputs(self.module, args, kwargs), initial_env=initial_env)
        if any(format not in ("", "none") for format in (pipe._cut_arguments or {}).get("wire", ())):
            raise Error("values are rounded between these stages, and here not", kind=ErrorKind.Unsupported, remedy="pipe(...)")
        return pipe.plain_outputs(super().run(*pipe.flat_inputs(args, kwargs), initial_env=initial_env))

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.requires_grad and value not in self.value_remap:
                self.value_remap[value] = value.detach().requires_grad_()
        args, kwargs = pytree.tree_map(self._as_given, (args, kwargs))
        return super().call_module(target, args, kwargs)

    def _as_given(self, value: Any) -> Any:
        return self.value_remap.get(value, value) if isinstance(value, torch.Tensor) else value

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not stage_backward:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        kwargs = {**kwargs, "input_values": [self._as_given(v) for v in kwargs["input_values"]]}  # values that its
                                                                                                  # result belongs to
        if (taking_part := kwargs.get("outputs_with_grads_idxs")) is not None:
            # A gradient that the graph names and that is None here: the loss does not depend on that output.
            named, grads = n.kwargs["output_grads"], kwargs["output_grads"]
            kwargs["outputs_with_grads_idxs"] = [i for i in taking_part if named[i] is None or grads[i] is not None]
        return stage_backward(*args, **kwargs)
