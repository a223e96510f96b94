"""What can be cut: a live module, a captured one, a ``.pt2`` file, an exported program. All become a `Source`."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._C import Error
from .._capture import GraphModule, capture_engine, sync_state
from ._errors import InvalidType
from ._marks import annotate_split_points


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

    def flatten(self, args: tuple, kwargs: dict) -> list:
        """Flat inputs of a call that may pass by position what the example passed by name, and the other way round."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            leaves, spec = pytree.tree_flatten(self._as_captured(args, kwargs))
        if spec != self.in_spec:
            raise Error(
                f"the inputs' structure differs from the example's: {spec} instead of {self.in_spec}\n"
                "  try: call it as it was cut, or cut it with inputs like these"
            )
        for given, known in zip(leaves, self.plain_inputs):
            if known is not None and given is not known and given != known:
                raise Error(f"the model was cut with {known!r} where {given!r} is given\n  try: cut it with that value")
        return [x if isinstance(x, Tensor) or self.takes_plain else None for x in leaves]

    def _as_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = dict(zip(self.parameters, args), **kwargs)
        if len(given) != len(args) + len(kwargs):
            return args, kwargs
        num_args, keywords = _call_shape(self.in_spec)
        names = [*self.parameters[:num_args], *keywords]
        if len(self.parameters) < num_args or set(names) != set(given):
            return args, kwargs
        return tuple(given[n] for n in names[:num_args]), {n: given[n] for n in keywords}

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


def from_module(module: nn.Module, args: tuple, kwargs: dict, spec: Any = None) -> Source:
    """Captures one forward, with marks around the modules of `spec`; the module is as before afterwards."""
    parameters = _parameters(module)
    with annotate_split_points(module, spec) if spec else contextlib.nullcontext():
        engine, in_spec, (out_spec, plain), notes = capture_engine(module, args, kwargs, shapes_only=True)
    leaves = pytree.tree_leaves((args, kwargs))
    plain_inputs = [None if isinstance(x, Tensor) else x for x in leaves]
    arguments = _argument_names(in_spec, parameters)
    return Source(engine, in_spec, out_spec, plain_inputs, plain, arguments, parameters, module.training, notes, leaves)


def from_graph_module(module: GraphModule, args: tuple, kwargs: dict) -> Source:
    sync_state(module._engine, module._slots)
    leaves = pytree.tree_leaves((args, kwargs))
    names = _argument_names(module._in_spec, [])
    return Source(
        module._engine, module._in_spec, module._out_spec, module._plain_inputs, module._plain_outputs, names, [],
        module.training, list(module.notes), leaves or None,
    )  # fmt: skip


def _load_spec(text: str, leaves: int, call: bool) -> Any:
    try:
        return pytree.treespec_loads(text)
    except Exception:  # a structure of classes that this process does not know
        flat = (0,) * leaves
        return pytree.tree_structure((flat, {}) if call else flat)


def from_pt2(path: str | os.PathLike, args: tuple, kwargs: dict) -> Source:
    with contextlib.suppress(ImportError):
        import torch.distributed.pipelining  # noqa: F401  (torch's marks are an operator that only this registers)
    program = _C.SourceFile(os.fspath(path))
    engine = program.engine
    nodes = engine.graph.nodes
    inputs = sum(n.op == "placeholder" for n in nodes)
    outputs = len(nodes[-1].args)
    in_text, out_text = engine.specs()
    in_spec, out_spec = _load_spec(in_text, inputs, True), _load_spec(out_text, outputs, False)
    parameters = list(program.argument_names)
    example = pytree.tree_leaves((args, kwargs)) or _sample(program.sample_inputs)
    return Source(
        engine, in_spec, out_spec, [None] * inputs, [None] * outputs, _argument_names(in_spec, parameters), parameters,
        True, [], example, program, True,
    )  # fmt: skip


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
    if isinstance(module, GraphModule):
        return from_graph_module(module, args, kwargs), spec
    if isinstance(module, nn.Module):
        return from_module(module, args, kwargs, spec), None
    if isinstance(module, (str, os.PathLike)):
        return from_pt2(module, args, kwargs), spec
    if isinstance(module, torch.export.ExportedProgram):
        return from_exported(module, args, kwargs), spec
    raise InvalidType(
        f"a {type(module).__name__} cannot be cut: give a torch.nn.Module, a plumb.GraphModule, a torch.export program or "
        "the path of a .pt2 file"
    )
