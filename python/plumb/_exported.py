"""``.pt2`` files: :func:`load_pt2` and :func:`save_pt2`."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _C
from ._errors import Error, ErrorKind
from ._graph_module import GraphModule
from ._state import own_parameters, state_of, sync_state
from ._trees import in_utf8, load_spec
from ._unit_scaled import is_marked, mark_state_dict
from .parameter import has_parameter_data, tell_engine

_IN_A_FILE = (int, float, bool, str, type(None))


def _spec(text: str, module: str) -> Any:
    try:
        return load_spec(text)
    except Error as error:
        raise Error(f"{module}: {error.message}", kind=error.kind, where=error.where, remedy=error.remedy) from None
    except Exception as error:
        raise Error(
            f"{module}: its inputs or outputs are of a type that this process does not know: {error}",
            kind=ErrorKind.Unsupported,
            remedy="import what registers the type (torch.utils._pytree.register_pytree_node) first",
        ) from error


def load_pt2(path: str | os.PathLike, device: torch.device | str | None = None, model: str = "") -> GraphModule:
    """The program of a ``.pt2`` file (``torch.export.save``, ``plumb.save_pt2``, C++ or the command) as a module.

    It is called like the exported model, has its parameters and buffers under their names, and trains. Dynamic sizes are
    checked against the file's ranges, constant inputs against their value. `device`: where its tensors go, if not where
    they were. `model`: which program, of a file with several. The state dict of a program that a transform unit-scaled bears a
    mark, so that a plain model says so.

    Raises :class:`plumb.Error` naming the file, the place in it and the remedy.
    """
    module = _load(path, device, {}, model)
    if not module._program.unit_scaled_layers and any(map(has_parameter_data, module.parameters())):
        mark_state_dict(module)
    return module


def _load(path: str | os.PathLike, device: torch.device | str | None, own: dict[str, Tensor], model: str = "") -> GraphModule:
    """`own`: tensors by name that take the place of the file's."""
    engine, program = _C.load_pt2(os.fsencode(path), None if device is None else torch.device(device), model)
    engine.set_state([(name, own[name]) for name, *_ in engine.state() if name in own])
    own_parameters(engine)
    in_spec, out_spec = (_spec(text, os.fsdecode(path)) for text in engine.specs())
    return GraphModule(engine, in_spec, out_spec, None, [None] * out_spec.num_leaves, [], program, engine.training)


def capture_dynamic(module: nn.Module, args: tuple, kwargs: dict, dynamic_shapes: Any) -> GraphModule:
    """torch.export's program of `module`, with its size symbols, on the module's own tensors."""
    try:
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise Error(
            f"torch.export, which captures what has dynamic shapes, refuses the module: {str(error).strip()}",
            kind=ErrorKind.Capture,
            remedy="other dynamic_shapes, or a capture without them for each size",
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "program.pt2")
        torch.export.save(program, path)
        return _load(path, None, {name: tensor for name, _, tensor, _ in state_of(module)})


def save_pt2(module: GraphModule, path: str | os.PathLike) -> None:
    """Writes a captured or loaded module to a ``.pt2`` file, whole or not at all.

    ``torch.export.load`` opens it (after ``import plumb`` if the graph has plumb's operators), as do :func:`load_pt2`, C++
    and the command. Inputs that are no tensors are written with the value they were captured with.

    Raises :class:`plumb.Error` naming the node that a file cannot hold, or the reason why it cannot be written.
    """
    if not isinstance(module, GraphModule):
        raise TypeError(
            f"plumb.save_pt2 takes a plumb.GraphModule, got {type(module).__name__}\n"
            "  try: plumb.save_pt2(plumb.capture(module, *inputs), path)"
        )
    module.require_its_graph("plumb.save_pt2")
    inputs = module._plain_inputs or []
    for what, values in (("input", inputs), ("output", module._plain_outputs)):
        for i, value in enumerate(values):
            large = isinstance(value, int) and not -(2**63) <= value < 2**63
            if large or not isinstance(value, _IN_A_FILE):
                raise Error(
                    f"{what} {i} is a {type(value).__name__}{' of more than 64 bits' * large}, which a .pt2 file cannot hold",
                    kind=ErrorKind.Unsupported,
                    remedy=f"a tensor, a number, a string or None as {what}",
                )
            if isinstance(value, str) and not in_utf8(value):
                raise Error(
                    f"{what} {i} is {value!r}, no text in UTF-8, which a .pt2 file cannot hold",
                    kind=ErrorKind.Unsupported,
                    remedy=f"another text as {what}",
                )
    for what, spec in (("inputs", module._in_spec), ("outputs", module._out_spec)):
        try:
            pytree.treespec_dumps(spec)
        except Exception as error:
            warnings.warn(
                f"the {what} hold a class that a file cannot name, and are saved as a flat tuple: {error}", stacklevel=2
            )
    sync_state(module._engine, module._slots)
    for parameter in module.parameters():
        tell_engine(parameter)
    _C.save_pt2(module._engine, module._program, inputs, module._plain_outputs, not is_marked(module), os.fsencode(path))
