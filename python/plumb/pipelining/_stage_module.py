"""One stage of a cut model as a ``torch.nn.Module``, also for other sizes than the model was cut for."""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import _C
from .._capture.guards import Guards
from .._errors import Error, ErrorKind
from .._graph_module import GraphModule
from .._state import CONSTANT, own_parameters, sync_state
from ._split_graph import top_graph
from ._utils import PipeInfo, leaves_of_argument
from ._variants import Variant

_SENT = (
    "give batches of the sizes it was cut for. Only stages of a live model follow others, in the process that cut it: this "
    "one came without its model (pickled, or as bytes)"
)

logger = logging.getLogger("plumb.pipelining")


Sizes = dict[int, Sequence[int]]  # known sizes of the whole model's flat inputs, by their number

MARK = "_plumb_model_sizes"  # attribute of a tensor that a stage returned: the sizes of the model's inputs it comes from


def sizes_of(values: Any) -> Sizes:
    """Returns the sizes of the model's inputs, as values that a stage called by hand returned carry them."""
    known: Sizes = {}
    for value in values:
        known.update(getattr(value, MARK, {}))
    return known


def mark(outputs: list, sizes: Sizes) -> None:
    """For stages called by hand: lets the next one know."""
    for output in outputs if sizes else []:
        if isinstance(output, Tensor):
            setattr(output, MARK, sizes)


# In a schedule: the sizes of the microbatch that runs; none: as they were cut. By hand it is None, and tensors are marked.
_running: ContextVar[Sizes | None] = ContextVar("_running", default=None)


@contextlib.contextmanager
def at_sizes(sizes: Sizes) -> Iterator[None]:
    """Tells every `StageModule` that runs on this thread the sizes of its microbatch."""
    before = _running.set(sizes)
    try:
        # torch.compile's result for a stage holds for the sizes it was cut for, and does not ask for these.
        with torch.compiler.set_stance("force_eager") if sizes else contextlib.nullcontext():
            yield
    finally:
        _running.reset(before)


class StageModule(GraphModule):
    """Replays a stage's graph in C++, with the stage's parameters and buffers under the whole model's names.

    Called with the values of its input ports in order (``input_names``), or, for values that are inputs of the whole
    model, with the whole model's keyword arguments. Returns its one output, or a tuple. Numbers that cross between
    stages leave as 0-dim tensors. Stages of a live model take other sizes than they were cut for, in a schedule and when
    one is called with what the one before returned: the model, which has to live, is captured and cut again for each. So it is for
    another mode (``eval()``), under autocast, after ``to(dtype)``, and when what its forward reads was changed.
    ``to(device)`` moves the graph's device arguments too; copies, pickles and
    state_dicts are as of any module.
    """

    moved_to: torch.device | None = None

    def __init__(
        self, engine: Any, stage_index: int, table: Any, arguments: list, training: bool, variants=None, remedy=None,
        autocast: tuple | None = None, structures: dict[str, Any] | None = None,
    ):  # fmt: skip
        inputs, outputs = table.inputs(stage_index), table.outputs(stage_index)
        in_spec = pytree.tree_structure(((0,) * len(inputs), {}))
        out_spec = pytree.tree_structure(0 if len(outputs) == 1 else (0,) * len(outputs))
        metas = [p["meta"] for p in inputs]
        self.__dict__.update(
            stage_index=stage_index,
            num_stages=table.num_stages,
            input_names=[p["name"] for p in inputs],
            output_names=[p["name"] for p in outputs],
            _arguments=[arguments[p["index"]] if p["stage"] < 0 else None for p in inputs],
            _structures=structures or {},  # tree specs of the whole model's arguments
            _cut_shapes=[None if m is None or m["symbols"] else tuple(m["shape"]) for m in metas],
            _cut=(table, variants, remedy or _SENT),
            _converted={},
        )
        own_parameters(engine)
        super().__init__(engine, in_spec, out_spec, None, [None] * len(outputs), [], training=training, autocast=autocast)

    def _register(self) -> None:
        super()._register()
        self.__dict__["_calls_python"] = any(node.target == "plumb::python_function" for node in self.graph.nodes)
        self._forget()

    def _forget(self) -> None:
        """Lets go of the graphs for other sizes and variants, which say where tensors are made."""
        table, variants, remedy = self._cut
        specializer = None if variants is None else variants.base.specializer
        self.__dict__["_stage"] = _C.GraphStage(self._engine, table, self.stage_index, specializer, remedy)
        self.__dict__.update(_others=weakref.WeakKeyDictionary(), _kinds=None)  # `_others`: by variant

    def __getstate__(self) -> dict:
        dropped = ("_stage", "_calls_python", "_others", "_kinds")
        return {key: value for key, value in super().__getstate__().items() if key not in dropped}

    def graph_key(self) -> tuple:
        """A graph of it depends on this beside its inputs: the sizes of the whole model's inputs, and the variant of the model."""
        return self.variant(), str(sorted((_running.get() or {}).items()))

    # --- the model that it is a part of, for other modes, dtypes, ... ---
    def variant(self) -> Variant | None:
        """Returns the variant of the model that it runs now; None if it holds one graph alone."""
        variants = self._cut[1]
        if variants is None:
            return None
        last = self._kinds and variants.last_used(self.training, self._kinds[1])
        if last and _C.unchanged(self._kinds[0].entries, last.guards.entries):
            return last
        return variants.current(self.training, self.dtypes())

    def dtypes(self) -> dict[torch.dtype, torch.dtype]:
        """Returns the dtypes that the stage's tensors were converted to since it was cut."""
        if self._kinds is None or not self._kinds[0].hold():
            guards, cut, found = Guards(), self._cut[1].base.source.kinds, {}
            guards.add_state(self._slots)
            for table, leaf, name, _ in self._slots:
                old, now = cut[name][0] if name in cut else None, table[leaf].dtype
                if old is not None and old.is_floating_point and found.setdefault(old, now) != now:
                    raise Error(
                        f"'{name}' of stage {self.stage_index} is {now}, and other tensors that were {old} with it are {found[old]}",
                        kind=ErrorKind.InvalidState,
                        remedy="convert the whole stage: stage.to(dtype)",
                    )
            known = {old: found.get(old, self._converted.get(old, old)) for old in self._cut[1].dtypes}
            self.__dict__["_kinds"] = guards, {old: now for old, now in known.items() if now != old}
        return self._kinds[1]

    def _stage_now(self) -> Any:
        sync_state(self._engine, self._slots)
        variant = self.variant()
        if variant is None or variant is self._cut[1].base:
            return self._stage
        if variant not in self._others:
            table, specializer = variant.engine.table, variant.specializer
            self._others[variant] = _C.GraphStage(self._engine, table, self.stage_index, specializer, self._cut[2], True)
        return self._others[variant]

    def graph_for(self, sizes: Sizes) -> Any:
        """Returns the engine's graph that a call runs now, for these sizes of the model's inputs; none: as they were cut."""
        return self._stage_now().graph_for(sizes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self.input_names) or any(isinstance(a, (tuple, list, dict)) for a in args):
            args = self._take(args, kwargs)
        self.check_call()
        if torch.compiler.is_compiling():
            return self._fx_forward(*args) if self._as_cut(args) else self._run_uncompiled(args)
        return self._run(args)

    def graph_alone(self) -> Any:
        """Returns the `_C.GraphStage` that a call runs now. None if Python has a part in the call: hooks, a compiled or
        another forward, custom autograd functions."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        if self._calls_python or any(hooks) or nn.modules.module._has_any_global_hook():
            return None
        if "forward" in self.__dict__ or self._compiled_call_impl is not None:
            return None
        self.check_call()
        return self._stage_now()

    def check_call(self) -> None:
        variants = self._cut[1]
        if variants is None:  # others follow the model
            super().check_call()
        elif variants.is_gone():
            self.check_mode()

    def _as_cut(self, args: Any) -> bool:
        """Returns whether nothing says otherwise; torch.compile guards on it."""
        return self.training == self._made_in_training and not any(
            isinstance(value, Tensor) and (hasattr(value, MARK) or tuple(value.shape) != shape)
            for value, shape in zip(args, self._cut_shapes)
            if shape is not None
        )

    @torch._disable_dynamo  # torch.compiler.disable would load it
    def _run_uncompiled(self, args: Any) -> Any:
        return self._run(args)

    def _run(self, args: Any) -> Any:
        stage, sizes = self._stage_now(), _running.get()
        if sizes is None:
            out, sizes = stage.run_by_hand(list(args), sizes_of(args))
        else:
            out = stage.run(list(args), sizes)
        mark(out, sizes)
        return out[0] if len(out) == 1 else tuple(out)

    def _take(self, args: tuple, kwargs: dict) -> list:
        """Positional leaves fill the ports in order, keyword arguments those of that argument of the whole model."""
        left = dict(enumerate(self._arguments))
        values: dict[int, Any] = {}
        for name, value in kwargs.items():
            leaves = leaves_of_argument(name, value, self._structures.get(name))
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
        for old in self._cut[1].dtypes if self._cut[1] is not None else ():
            self._converted[old] = fn(torch.empty(0, dtype=self._converted.get(old, old))).dtype
        device = fn(torch.empty(0)).device
        for name, kind, tensor, _ in self._engine.state():
            if kind == CONSTANT and tensor.device != device:
                # No checkpoint brings a constant's data back from the meta device.
                kept = self.__dict__.setdefault("_constants", {})
                kept[name] = kept[name] if tensor.is_meta else tensor
                self._engine.set_state([(name, kept[name].to(device))])
        for name in _C.rewrite_devices(self._engine, device):
            logger.debug("Changing device of Node %s to %s", name, device)
        self._forget()
        self.__dict__.update(_fx=None, moved_to=device)
        return self

    @property
    def device(self) -> torch.device | None:
        """The device of the stage's state, or the one it was moved to; None if it has no state and was never moved."""
        return self.moved_to or next((t.device for _, _, t, _ in self._engine.state()), None)


def put_parameter(stage: StageModule, name: str, new: nn.Parameter | None = None) -> None:
    """Puts a parameter into a stage, under all names that the old one has there. None: a copy of the old one."""
    old = stage.get_parameter(name)
    new = copy.deepcopy(old) if new is None else new
    for table, leaf, *_ in stage._slots:
        if table.get(leaf) is old:
            table[leaf] = new


def share_copies(stages: list[StageModule], replicated: list[dict[int, str]]) -> None:
    """Makes the copies of a parameter that several stages use one tensor: the first one's, which is the model's."""
    for copies in replicated:
        (first, name), *others = sorted(copies.items())
        shared = stages[first].get_parameter(name)
        for s, own in others:
            if stages[s].get_parameter(own).device == shared.device:
                put_parameter(stages[s], own, shared)


def deserialize_stage(data: bytes) -> tuple[StageModule, PipeInfo]:
    """Returns a stage from `Pipe.serialize_stage`, on the CPU, and the picture of its pipe. The bytes may come from
    anywhere: damaged ones raise `plumb.Error`."""
    parts = _C.deserialize_stage(data)
    table = parts["table"]
    names = [(name, 0) for name in parts["input_names"]]
    stage = StageModule(parts["engine"], parts["index"], table, names, parts["training"])
    top = top_graph(parts["input_names"], table, False)
    info = PipeInfo(top, table.num_stages, table.loss_output is not None, table, names, parts["input_names"])
    return stage, info


def scatter_stages(
    pipe: Any, group: Any = None, src: int = 0, rank_of: Callable[[int], int] | None = None
) -> tuple[dict[int, StageModule], PipeInfo]:
    """Sends every stage of rank `src`'s pipe to its rank: a collective call, `pipe` is None on the others.

    `rank_of` says which rank of the group runs a stage (default: stage % group size, as schedules place loops). Returns
    this rank's stages by number, and the picture of the pipe.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parcels: list[Any] | None = None
    if rank == dist.get_group_rank(group or dist.group.WORLD, src):
        if pipe is None:
            raise Error(f"rank {src} has no pipe to send the stages of")
        parcels = [(pipe.info(), {}) for _ in range(size)]
        for s in range(pipe.num_stages):
            autocast = pipe.get_stage_module(s)._autocast  # which bytes do not say
            parcels[rank_of(s) if rank_of else s % size][1][s] = pipe.serialize_stage(s), autocast
        pipe._stages_here.add(-1)  # none of its own stages runs
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, parcels, src=src, group=group)
    info, stages = mine[0]
    received = {}
    for s, (data, autocast) in stages.items():
        received[s] = deserialize_stage(data)[0]
        received[s]._autocast = autocast
    return received, info
