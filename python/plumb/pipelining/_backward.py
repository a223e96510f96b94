"""The backward of one stage: whole, or an input half and a weight half. The work is in C++ (stage_backward.h)."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import _pytree as pytree

from .. import _C
from .._errors import Error, ErrorKind


def map_debug_info(values: Any) -> Any:
    """Nested values with every tensor as a text of its sizes, dtype and whether it requires a gradient."""

    def text(v: object) -> str:
        is_tensor = isinstance(v, torch.Tensor)
        return f"Tensor({v.shape}, grad={v.requires_grad}, dtype={v.dtype})" if is_tensor else str(v)

    return pytree.tree_map(text, values)


def _get_grad_fn_or_grad_acc(t: torch.Tensor) -> Node | None:
    """Returns the node of autograd's graph that a gradient of `t` goes to; None if it has none."""
    return get_gradient_edge(t).node if t.requires_grad else None


def construct_reverse_graph(roots: list[Node]) -> dict[Node, list[Node]]:
    """For every node below the roots the nodes whose gradients go to it."""
    users: dict[Node, list[Node]] = collections.defaultdict(list)
    queue = collections.deque(dict.fromkeys(node for node in roots if node is not None))
    seen = set(queue)
    while queue:
        node = queue.popleft()
        for child, _ in node.next_functions:
            if child is None:
                continue
            users[child].append(node)
            if child not in seen:
                seen.add(child)
                queue.append(child)
    return users


def reverse_closure(
    roots: list[Node], target_nodes: set[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> tuple[set[Node], set[Node]]:
    """All nodes between the roots and the graph's outputs, not going past target nodes; and the target nodes met."""
    closure = {node for node in roots if node is not None}
    met: set[Node] = set()
    queue = list(closure)
    while queue:
        for user in reverse_edges_dict.get(queue.pop(), ()):
            if user in closure:
                continue
            if user in target_nodes:
                met.add(user)
            else:
                closure.add(user)
                queue.append(user)
    return closure, met


def get_param_groups(
    inputs: list[Node], params: list[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> list[dict[str, Any]]:
    """Parameters that meet the inputs' path in the same nodes, together: ``{"params": ..., "intermediates": ...}``."""
    path, _ = reverse_closure(inputs, set(), reverse_edges_dict)
    groups: list[dict[str, Any]] = []
    for param in params:
        _, met = reverse_closure([param], path, reverse_edges_dict)
        if not met:
            continue
        group = {"params": {param}, "intermediates": met}
        for other in [g for g in groups if g["intermediates"] & met]:
            group["params"] |= other["params"]
            group["intermediates"] |= other["intermediates"]
            groups.remove(other)
        groups.append(group)
    return groups


class _WeightHalf(MutableMapping):
    """The work that the input half leaves to the weight half: one group for all weights, as one run of the engine does them.

    "params", "intermediates" (nodes of autograd's graph where the weight half starts) and "grads" (for each the gradients of
    its outputs, None where there is none) are made when they are first read. Assigning "grads" makes the weight half start
    from these, in the order of "intermediates"; nodes without an entry then get none.
    """

    def __init__(self, deferred, weights: list[torch.Tensor]):
        self.deferred, self.weights = deferred, weights
        self._starts: list | None = None  # "grads" as they are unless replaced

    @functools.cached_property
    def _entries(self) -> dict[str, Any]:
        grads: dict[Node, dict[int, torch.Tensor | None]] = {}
        for node, index, grad, maker in self.deferred.starts:
            if maker is not None:  # has run, and its own gradients are gone
                grads.setdefault(maker, {})
            else:
                grads.setdefault(node, {})[index] = grad
        self._starts = [tuple(of.get(i) for i in range(_num_inputs(node))) for node, of in grads.items()]
        params = {_get_grad_fn_or_grad_acc(w) for w in self.weights}
        return {"params": params, "intermediates": tuple(grads), "grads": self._starts}

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    @property
    def replaced(self) -> bool:
        return "_entries" in self.__dict__ and self.get("grads", self._starts) is not self._starts


def _num_inputs(node: Node) -> int:
    return len(node._input_metadata)


def _as_list(values) -> list:
    return [values] if isinstance(values, torch.Tensor) else list(values)


def stage_backward_input(
    stage_outputs_or_loss: Iterable[torch.Tensor],
    output_grads: Iterable[torch.Tensor | None] | None,
    input_values: Iterable[Any],
    weights: Iterator[torch.nn.Parameter],
) -> tuple[tuple[torch.Tensor | None, ...], list[MutableMapping[str, Any]]]:
    """Runs the input half: returns the inputs' gradients and adds them to their ``.grad``; no weight's ``.grad``
    changes.

    `output_grads` None: ones. The gradients have their inputs' places: None for what is no tensor or requires no gradient,
    and for one that came before. The second result is for `stage_backward_weight`, which adds to the ``.grad`` of
    these `weights` and of no other leaf. The outputs leave autograd's graph, so that what only this half needed is freed.
    """
    outputs = _as_list(stage_outputs_or_loss)
    grads = [torch.ones_like(t) for t in outputs] if output_grads is None else _as_list(output_grads)
    inputs = list(input_values)
    tensors = [t if isinstance(t, torch.Tensor) and t.requires_grad else None for t in inputs]
    input_grads, deferred = _C.stage_backward_input(outputs, grads, tensors)
    with torch.no_grad():
        for tensor, grad in zip(tensors, input_grads):
            if tensor is not None and grad is not None:
                tensor.grad = grad if tensor.grad is None else tensor.grad.add_(grad)
    for output in outputs:
        if output.grad_fn is not None and not output._is_view():  # a view cannot leave the graph in place
            output.detach_()
    wanted = [w for w in weights if w.requires_grad]
    return tuple(input_grads), [_WeightHalf(deferred, wanted)] if deferred.pending and wanted else []


def stage_backward_weight(
    weights: Iterator[torch.nn.Parameter], param_groups: Sequence[MutableMapping[str, Any]], retain_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Runs the weight half: adds to the ``.grad`` of the weights that the input half was given what a whole backward
    would have; returns the ``.grad`` of `weights` in order."""
    weights = list(weights)
    for group in param_groups:
        if isinstance(group, _WeightHalf) and not group.replaced:
            _C.stage_backward_weight(group.deferred, group.weights, retain_graph)
        else:
            _group_backward(weights, group, retain_graph)
    return tuple(weight.grad for weight in weights)


def _group_backward(weights: list[torch.nn.Parameter], group: MutableMapping[str, Any], retain_graph: bool) -> None:
    """A group made by hand: nodes ("intermediates") with the gradients that came into each ("grads"), and weights."""
    accumulators = {_get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    params = [accumulators[node] for node in group["params"]]
    nodes = list(group["intermediates"])
    if len(group["grads"]) > len(nodes):
        raise Error(f"a group of {len(nodes)} intermediates has gradients for {len(group['grads'])}")
    for node, grads in zip(nodes, group["grads"]):
        if len(grads) > _num_inputs(node):
            raise Error(f"{node.name()} has {_num_inputs(node)} outputs, and gradients for {len(grads)} were given")
    starts = [
        (GradientEdge(node, index), grad)
        for node, grads in zip(nodes, group["grads"])
        for index, grad in enumerate(grads)
        if grad is not None
    ]
    if not starts or not params:
        return
    edges, grads = zip(*starts)
    found = torch.autograd.grad(edges, params, grads, retain_graph=retain_graph, allow_unused=True)
    with torch.no_grad():
        for param, grad in zip(params, found):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad.add_(grad)


def _parts(value: Any) -> dict | None:
    """Returns the items of a dict, tuple or list by key."""
    return value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, (tuple, list)) else None


def _collect(output, grad, outputs: list, grads: list) -> None:
    """Tensors of a nested output beside their gradients; where a whole part has no gradient it takes no part."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            if grad is not None and not isinstance(grad, torch.Tensor):
                raise Error(f"an output of the stage is a tensor and its gradient a {type(grad).__name__}")
            outputs.append(output)
            grads.append(grad)
    elif grad is not None and (parts := _parts(output)) is not None:
        given = _parts(grad)
        if given is None or given.keys() != parts.keys():
            raise Error(f"an output of the stage is a {type(output).__name__} with {list(parts)}, its gradient {map_debug_info(grad)}")
        for key, part in parts.items():
            _collect(part, given[key], outputs, grads)


def stage_backward(
    stage_output, output_grads, input_values: Iterable[Any], outputs_with_grads_idxs: list[int] | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Accumulates gradients into all leaves. Returns the inputs' gradients and resets their ``.grad`` to None. An
    input's earlier ``.grad`` is added to its returned gradient. A tensor that comes twice has its gradient at the first
    place and None at the second.

    Outputs and their gradients may be nested tuples, lists and dicts; a gradient may be None for a number, which then
    counts once. Raises `plumb.Error` whose ``where`` describes outputs, gradients and inputs.
    """
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[i] for i in outputs_with_grads_idxs]
        output_grads = [output_grads[i] for i in outputs_with_grads_idxs]
    inputs = list(input_values)
    try:
        return _whole_backward(stage_output, output_grads, inputs)
    except Exception as error:
        raise Error(
            f"Failed to run stage backward: {getattr(error, 'message', None) or error}",
            kind=getattr(error, "kind", ErrorKind.ExecutionFailed),
            where=f"Stage output: {map_debug_info(stage_output)}; Output gradient: {map_debug_info(output_grads)}; "
            f"Input: {map_debug_info(inputs)}",
            remedy=getattr(error, "remedy", ""),
        ) from error


def _whole_backward(stage_output, output_grads, inputs: list) -> tuple[torch.Tensor | None, ...]:
    outputs: list[torch.Tensor] = []
    grads: list[torch.Tensor | None] = []
    _collect(stage_output, output_grads, outputs, grads)
    wanted = [isinstance(t, torch.Tensor) and t.requires_grad for t in inputs]
    # Parts of a batch that retain their gradients are no leaves; autograd hands them theirs by itself.
    leaves = [t if want and t.is_leaf else None for t, want in zip(inputs, wanted)]
    kept = [want and not t.is_leaf for t, want in zip(inputs, wanted)]
    for tensor, keep in zip(inputs, kept):
        if keep and not tensor.retains_grad:
            raise Error(
                "an input of the stage is no leaf: detach it before the stage's forward, or retain its gradient"
            )
    result = _C.stage_backward(outputs, grads, leaves)
    for i, keep in enumerate(kept):
        if keep:
            result[i], inputs[i].grad = inputs[i].grad, None
    return tuple(result)


def _null_coalesce_accumulate(lhs, rhs):
    """Returns the sum of two values, of which each may be None."""
    if lhs is None:
        return rhs
    return lhs if rhs is None else torch.add(lhs, rhs)
