"""What can be cut: a live module, a captured one, a ``.pt2`` file, an exported program. All become a `Source`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._capture import GraphModule, capture_engine
from .._errors import Error, ErrorKind
from .._exported import load_pt2
from .._state import state_of, sync_state
from .._trees import check_plain_inputs, structure_error
from .._unit_scaled import is_marked
from ..transforms._apply import forward_of
from ._errors import InvalidType
from ._marks import annotate_split_points, check_split_spec

logger = logging.getLogger("plumb.pipelining")

_EXPORT = "export the program with dynamic shapes (torch.export.export(..., dynamic_shapes=...)), or cut the live module"
_CUT_THE_MODULE = "cut the module itself instead of its graph, which holds the sizes it was captured with"


@dataclass
class Source:
    """A graph to be cut, with what Python knows of the model's call."""

    engine: Any
    in_spec: Any
    out_spec: Any
    plain_inputs: list  # per flat input: the value a capture was made for, None for tensors
    plain_outputs: list
    arguments: list[tuple[str, int]]  # per flat input: the argument it belongs to, and which leaf of it
    parameters: list[str]  # names of the forward's positional parameters
    training: bool
    notes: list[str] = field(default_factory=list)
    example: list | None = None
    program: Any = None  # of a .pt2: what only the file knows
    takes_plain: bool = False  # whether the graph itself takes values that are no tensors (and checks them)
    again: Any = None  # of a live module: captures it for other inputs; answers None once the module is gone
    other_sizes: str | None = None  # of what holds one graph alone: what to do for other sizes
    unit_scaled: bool = False  # state dicts of the whole bear the mark of unit-scaled weights

    @functools.cached_property
    def takes_tensor(self) -> list[bool]:
        return [node.results[0].is_tensor for node in self.engine.graph.nodes if node.op == "placeholder"]

    def flatten(self, args: tuple, kwargs: dict) -> list:
        """Flat inputs of a call that may pass by position what the example passed by name, and the other way round."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            leaves, spec = pytree.tree_flatten(self._as_captured(args, kwargs))
        if spec != self.in_spec:
            raise structure_error(
                args, kwargs, self.in_spec, [name for name, _ in self.arguments],
                "call it as it was cut, or cut it with inputs like these",
            )  # fmt: skip
        if not self.takes_plain:
            check_plain_inputs(
                leaves, self.plain_inputs, self.takes_tensor, "the model was cut", "cut it with inputs like these"
            )
        return [x if isinstance(x, Tensor) or self.takes_plain else None for x in leaves]

    def _as_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        num_args, keywords = _call_shape(self.in_spec)
        if len(self.parameters) < num_args:
            return args, kwargs
        names = [*self.parameters[:num_args], *keywords]
        for name in kwargs:
            if name in self.parameters[: len(args)]:
                raise InvalidType(f"the model got multiple values for argument '{name}'")
            if name not in names and name not in self.parameters:
                raise InvalidType(
                    f"the model got an unexpected keyword argument '{name}'",
                    kind=ErrorKind.UnknownName,
                    remedy=", ".join(names),
                )
        given = dict(zip(self.parameters, args), **kwargs)
        if len(given) != len(args) + len(kwargs) or set(names) != set(given):
            return args, kwargs
        return tuple(given[n] for n in names[:num_args]), {n: given[n] for n in keywords}

    def sizes(self, flat: list | None) -> tuple:
        return tuple(x.shape if isinstance(x, Tensor) else None for x in flat or [])

    def unflatten(self, outputs: list) -> Any:
        return pytree.tree_unflatten(outputs, self.out_spec)


def _parts(spec: Any) -> list:
    return spec.children() if hasattr(spec, "children") else spec.children_specs  # older torch has the list alone


def _call_shape(spec: Any) -> tuple[int, list[str]]:
    args, kwargs = _parts(spec)
    return len(_parts(args)), list(kwargs.context or [])


def _argument_names(in_spec: Any, parameters: list[str]) -> list[tuple[str, int]]:
    args, kwargs = _parts(in_spec)
    names = []
    for i, part in enumerate(_parts(args)):
        name = parameters[i] if i < len(parameters) else f"arg{i}"
        names += [(name, leaf) for leaf in range(part.num_leaves)]
    for name, part in zip(kwargs.context or [], _parts(kwargs)):
        names += [(str(name), leaf) for leaf in range(part.num_leaves)]
    return names


def _parameters(module: nn.Module) -> list[str]:
    try:
        forward = module.__dict__.get("_orig_forward", module.forward)
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


class _AsCut:
    """A live model as it was when it was cut, for captures later: modes, and the dtypes and devices of its tensors."""

    def __init__(self, module: nn.Module, state: list):
        self._modes = [sub.training for sub in module.modules()]
        self._kinds = {name: (tensor.dtype, tensor.device) for name, _, tensor, _ in state}

    def run(self, module: nn.Module, capture: Callable[[], Source]) -> Source:
        modules = list(module.modules())
        if len(modules) != len(self._modes):
            raise Error(
                f"the model has {len(modules)} modules, and had {len(self._modes)} when it was cut",
                kind=ErrorKind.InvalidState,
                remedy="cut the model again after changing it",
            )
        # A stage that was moved has taken its part of the model along; a capture asks for no values of parameters.
        stand_ins: dict[str, Tensor] = {}
        made: dict[int, Tensor] = {}
        for name, _, tensor, _ in state_of(module):
            kind = self._kinds.get(name, (tensor.dtype, tensor.device))
            if kind != (tensor.dtype, tensor.device):
                made[id(tensor)] = made[id(tensor)] if id(tensor) in made else _stand_in(tensor, *kind)
                stand_ins[f"model.{name}"] = made[id(tensor)]
        around = nn.Module()
        around.model, around.forward = module, capture
        before = [sub.training for sub in modules]
        try:
            for sub, mode in zip(modules, self._modes):
                sub.training = mode
            return torch.func.functional_call(around, stand_ins, ())
        finally:
            for sub, mode in zip(modules, before):
                sub.training = mode


def _stand_in(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
        return tensor.to(dtype=dtype, device=device)
    # Memory that is never written is never really there.
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty.zero_()


def from_module(module: nn.Module, args: tuple, kwargs: dict, spec: Any = None) -> Source:
    """Captures one forward, with marks around the modules of `spec`; the module is as before afterwards."""
    logger.info("Tracing model ...")
    parameters = _parameters(module)
    with annotate_split_points(module, spec) if spec else contextlib.nullcontext() as marks:
        engine, in_spec, (out_spec, plain), notes = capture_engine(module, args, kwargs)
        if marks is not None:
            marks.check_called()
    leaves = pytree.tree_leaves((args, kwargs))
    plain_inputs = [None if isinstance(x, Tensor) else x for x in leaves]
    arguments = _argument_names(in_spec, parameters)
    alive, as_cut = weakref.ref(module), _AsCut(module, engine.state())

    def again(args: tuple, kwargs: dict) -> Source | None:
        model = alive()
        if model is None:
            return None
        return as_cut.run(model, lambda: from_module(model, args, kwargs, spec))

    return Source(
        engine, in_spec, out_spec, plain_inputs, plain, arguments, parameters, module.training, notes, leaves, again=again,
        unit_scaled=is_marked(module),
    )  # fmt: skip


def from_graph_module(module: GraphModule, args: tuple, kwargs: dict) -> Source:
    """A captured module, or one from a file, whose graph takes and checks every input itself."""
    sync_state(module._engine, module._slots)
    program, from_file = module._program, module._plain_inputs is None
    parameters = list(program.argument_names) if program is not None else []
    example = pytree.tree_leaves((args, kwargs)) or (_sample(program.sample_inputs) if program is not None else None)
    return Source(
        module._engine, module._in_spec, module._out_spec,
        [None] * module._in_spec.num_leaves if from_file else module._plain_inputs, module._plain_outputs,
        _argument_names(module._in_spec, parameters), parameters, module.training, list(module.notes), example, program,
        from_file, other_sizes=_EXPORT if from_file else _CUT_THE_MODULE, unit_scaled=is_marked(module),
    )  # fmt: skip


def from_pt2(path: str | os.PathLike, args: tuple, kwargs: dict) -> Source:
    with contextlib.suppress(ImportError):
        import torch.distributed.pipelining  # noqa: F401  (torch's marks are an operator that only this registers)
    return from_graph_module(load_pt2(path), args, kwargs)


def _sample(data: bytes) -> list | None:
    if not data:
        return None
    try:
        return pytree.tree_leaves(torch.load(io.BytesIO(data), weights_only=True))
    except Exception:  # classes that may not be unpickled: cut without an example
        return None


def from_exported(program: torch.export.ExportedProgram, args: tuple, kwargs: dict) -> Source:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.pt2")
        torch.export.save(program, path)
        return from_pt2(path, args, kwargs)


def make_source(module: Any, args: Any, kwargs: dict | None, spec: Any = None) -> tuple[Source, Any]:
    """The source, and the part of `spec` that is still to be cut at (by module names in the graph)."""
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    kwargs = dict(kwargs or {})
    if spec is not None:
        check_split_spec(None, spec)
    if isinstance(module, GraphModule):
        return from_graph_module(module, args, kwargs), spec
    if isinstance(module, nn.Module):
        # A part that runs a graph of its own has names for its modules there, and does not call them.
        if spec and any(forward_of(sub) is not None for sub in module.modules()):
            check_split_spec(module, spec)
            return from_module(module, args, kwargs), spec
        return from_module(module, args, kwargs, spec), None
    if isinstance(module, (str, os.PathLike)):
        return from_pt2(module, args, kwargs), spec
    if isinstance(module, torch.export.ExportedProgram):
        return from_exported(module, args, kwargs), spec
    raise InvalidType(
        f"a {type(module).__name__} cannot be cut: give a torch.nn.Module, a plumb.GraphModule, a torch.export program or "
        "the path of a .pt2 file"
    )
