"""One stage of a cut model as a ``torch.nn.Module``."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._capture import GraphModule
from .._errors import Error, ErrorKind
from .._state import CONSTANT, PARAMETER, sync_state
from ._specialize import CutSizes, StageGraphs

logger = logging.getLogger("plumb.pipelining")


class StageModule(GraphModule):
    """Replays a stage's graph in C++, with the stage's parameters and buffers under the whole model's names.

    Called with the values of its input ports in order (``input_names``), or, for values that are inputs of the whole
    model, with the whole model's keyword arguments. Returns its one output, or a tuple. Numbers that cross between
    stages leave as 0-dim tensors. Stages of a live model take other sizes than they were cut for, in a schedule and when
    one is called with what the one before returned: the model, which has to live, is captured and cut again for each.
    ``to(device)`` moves the graph's device arguments too; copies, pickles and
    state_dicts are as of any module.
    """

    def __init__(
        self,
        engine: Any,
        stage_index: int,
        table: Any,
        arguments: list[tuple[str, int]],
        training: bool,
        graphs: StageGraphs | None = None,
    ):
        inputs, outputs = table.inputs(stage_index), table.outputs(stage_index)
        in_spec = pytree.tree_structure(((0,) * len(inputs), {}))
        out_spec = pytree.tree_structure(0 if len(outputs) == 1 else (0,) * len(outputs))
        self.__dict__.update(
            stage_index=stage_index,
            num_stages=table.num_stages,
            input_names=[p["name"] for p in inputs],
            output_names=[p["name"] for p in outputs],
            _ports=[(p["is_tensor"], p["written"]) for p in inputs],
            _arguments=[arguments[p["index"]] if p["stage"] < 0 else None for p in inputs],
            _graphs=graphs or StageGraphs(stage_index, table, CutSizes(table)),
            _special=any(p["written"] or not p["is_tensor"] for p in inputs) or any(not p["is_tensor"] for p in outputs),
        )
        own_parameters(engine)
        super().__init__(engine, in_spec, out_spec, None, [None] * len(outputs), [], training=training)

    def graph_key(self) -> tuple:
        """What a graph made of it depends on beside its inputs: the sizes of the whole model's."""
        return tuple(sorted((self._graphs.given or {}).items()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.input_names) or any(isinstance(a, (tuple, list, dict)) for a in args):
            args = self._take(args, kwargs)
        self.check_mode()
        if torch.compiler.is_compiling():
            return self._fx_forward(*args) if self._graphs.as_cut(args) else self._run_uncompiled(args)
        return self._run(args)

    @torch.compiler.disable
    def _run_uncompiled(self, args: Any) -> Any:
        return self._run(args)

    def _run(self, args: Any) -> Any:
        sync_state(self._engine, self._slots)
        sizes = self._graphs.sizes(args)
        if self._special:
            args = [_enter(a, *port) for a, port in zip(args, self._ports)]
        out = self._graphs.engine(sizes, self._engine).run(list(args))
        if self._special:
            out = [o if o is None or isinstance(o, Tensor) else torch.tensor(o) for o in out]
        self._graphs.mark(out, sizes)
        return out[0] if len(out) == 1 else tuple(out)

    def _take(self, args: tuple, kwargs: dict) -> list:
        """Positional leaves fill the ports in order, keyword arguments those of that argument of the whole model."""
        left = dict(enumerate(self._arguments))
        values: dict[int, Any] = {}
        for name, value in kwargs.items():
            leaves = pytree.tree_leaves(value)
            ports = [i for i, a in left.items() if a is not None and a[0] == name and a[1] < len(leaves)]
            if not ports and not any(a is not None and a[0] == name for a in self._arguments):
                known = sorted({a[0] for a in self._arguments if a is not None})
                raise Error(
                    f"stage {self.stage_index} takes no argument '{name}'",
                    kind=ErrorKind.UnknownName,
                    remedy=", ".join(known) or "positional values",
                )
            for i in ports:
                values[i] = leaves[left.pop(i)[1]]
        leaves = pytree.tree_leaves(args)
        if len(leaves) != len(left):
            raise Error(
                f"stage {self.stage_index} takes {len(self.input_names)} values ({', '.join(self.input_names)}), "
                f"got {len(values) + len(leaves)}"
            )
        values.update(zip(left, leaves))
        return [values[i] for i in range(len(self.input_names))]

    @property
    def _made_how(self) -> str:
        return f"stage {self.stage_index} was cut"

    def _apply(self, fn: Any, recurse: bool = True) -> StageModule:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0)).device
        for name, kind, tensor, _ in self._engine.state():
            if kind == CONSTANT and tensor.device != device:
                # No checkpoint brings a constant's data back from the meta device.
                kept = self.__dict__.setdefault("_constants", {})
                kept[name] = kept[name] if tensor.is_meta else tensor
                self._engine.set_state(name, kept[name].to(device))
        for name in _C.rewrite_devices(self._engine, device):
            logger.debug("Changing device of Node %s to %s", name, device)
        self._graphs.forget()
        self.__dict__.update(_fx=None, _moved_to=device)
        return self

    @property
    def device(self) -> torch.device | None:
        """Where the stage's state is, or where it was moved to; None if it has no state and never was."""
        return self.__dict__.get("_moved_to") or next((t.device for _, _, t, _ in self._engine.state()), None)


def _enter(value: Any, is_tensor: bool, written: bool) -> Any:
    if not is_tensor and isinstance(value, Tensor):
        return value.item()
    # What the stage writes must be its own: a batch is cut into views, and a value may go to several stages.
    return value.clone() if written and isinstance(value, Tensor) else value


def own_parameters(engine: Any) -> None:
    """Parameters that were made in C++ (copies, those of files) become ``nn.Parameter``; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    changed = []
    for name, kind, tensor, _ in engine.state():
        if kind == PARAMETER and not isinstance(tensor, nn.Parameter):
            if id(tensor) not in made:
                made[id(tensor)] = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
            changed.append((name, made[id(tensor)]))
    if changed:
        _C.set_states(engine, changed)


def stage_state(stage: nn.Module) -> None:
    """Gives the engine the tensors that the Python module has got meanwhile."""
    sync_state(stage._engine, stage._slots)
