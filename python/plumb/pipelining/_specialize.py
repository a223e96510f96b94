"""Other sizes than a model was cut for: which ones a microbatch has, and the stages' graphs for them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _C
from .._C import Error
from ._sources import Source

Sizes = dict[int, tuple[int, ...]]  # of the whole model's flat inputs, by their number; those that are known

_KEPT = 64  # graphs of a stage: many sizes come again in every epoch, some never
_MARK = "_plumb_model_sizes"  # of a tensor that a stage returned: the sizes of the model's inputs it comes from


def _differs(shape: tuple[int, ...], meta: dict) -> bool:
    """A size that is a symbol may be any: the graph itself follows it."""
    cut, symbols = meta["shape"], meta["symbols"]
    if not symbols or len(shape) != len(cut):
        return shape != cut
    return any(new != old and not symbol for new, old, symbol in zip(shape, cut, symbols))


class CutSizes:
    """The sizes that a model was cut for."""

    def __init__(self, table: Any):
        self._metas: dict[int, dict] = {}
        self._names: dict[int, str] = {}
        for stage in range(table.num_stages):
            for port in table.inputs(stage):
                if port["stage"] < 0 and port["meta"] is not None:
                    self._metas[port["index"]], self._names[port["index"]] = port["meta"], port["name"]

    def other(self, known: Sizes) -> Sizes:
        """`known`, if one of them is not as it was cut; else none."""
        metas = self._metas
        return known if any(i in metas and _differs(shape, metas[i]) for i, shape in known.items()) else {}

    def describe(self, known: Sizes) -> str:
        return ", ".join(
            f"'{self._names[i]}' was {list(meta['shape'])} and is {list(known[i])}"
            for i, meta in sorted(self._metas.items())
            if i in known and _differs(known[i], meta)
        )


@contextlib.contextmanager
def at_sizes(stages: list[StageGraphs], sizes: Sizes) -> Iterator[None]:
    """Tells stages the sizes of the model's inputs that a microbatch comes from; none: as they were cut."""
    for stage in stages:
        stage.given = sizes
    try:
        # What torch.compile made of a stage is of the sizes it was cut for, and does not ask for these.
        with torch.compiler.set_stance("force_eager") if sizes else contextlib.nullcontext():
            yield
    finally:
        for stage in stages:
            stage.given = None


class StageGraphs:
    """A stage's graphs by the sizes of the model's inputs. Copies of the stage share where they come from; a pickled one
    has none."""

    def __init__(
        self, stage_index: int, table: Any, cut: CutSizes, specializer: Specializer | None = None, remedy: str | None = None
    ):
        self._index, self._cut, self._specializer, self._remedy = stage_index, cut, specializer, remedy
        self._ports = [(p["index"] if p["stage"] < 0 else None, p["meta"], p["name"]) for p in table.inputs(stage_index)]
        self._shapes = [None if m is None or m["symbols"] else tuple(m["shape"]) for _, m, _ in self._ports]
        self._made: OrderedDict[tuple, Any] = OrderedDict()
        self.given: Sizes | None = None  # in a schedule: of the microbatch that runs

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_made": OrderedDict(), "given": None}

    def sizes(self, values: list) -> Sizes:
        """Of the microbatch whose values these are; empty if they are as they were cut."""
        if self.given is not None:
            return self.given
        for value, (index, meta, _) in zip(values, self._ports):
            if isinstance(value, Tensor) and meta is not None:
                if value.shape != meta["shape"] or (index is None and hasattr(value, _MARK)):
                    return self._other_sizes(values)
        return {}

    def as_cut(self, values: list) -> bool:
        """Whether nothing says otherwise; for torch.compile, which guards on it."""
        return not any(
            isinstance(value, Tensor) and (hasattr(value, _MARK) or tuple(value.shape) != shape)
            for value, shape in zip(values, self._shapes)
            if shape is not None
        )

    def _other_sizes(self, values: list) -> Sizes:
        known: Sizes = {}
        unlike = None
        for value, (index, meta, name) in zip(values, self._ports):
            if meta is None or not isinstance(value, Tensor):
                continue
            if index is not None:
                known[index] = tuple(value.shape)
            else:
                known.update(getattr(value, _MARK, {}))
                if _differs(tuple(value.shape), meta):
                    unlike = f"'{name}' came as {list(value.shape)} where {list(meta['shape'])} was cut"
        other = self._cut.other(known)
        if unlike and not other:
            raise Error(
                f"stage {self._index}: {unlike}, and the sizes of the model's inputs cannot be told from that\n  try: hand "
                "on what the stage before returned as it is (a detached tensor or a copy does not say where it comes "
                "from), or run the stages in a schedule"
            )
        if other and _C.is_capturing():
            raise Error(
                f"stage {self._index} is captured or transformed, and called by hand with other sizes than it was cut for: "
                "the next stage would not know them\n  try: run the stages in a schedule, or cut the model for these sizes"
            )
        return other

    def engine(self, sizes: Sizes, cut: Any) -> Any:
        """The graph for these sizes, with the tensors of `cut`, the stage's own graph."""
        if not sizes:
            return cut
        key = tuple(sorted(sizes.items()))
        made = self._made.get(key)
        if made is not None:
            self._made.move_to_end(key)
            _C.share_state(cut, made)
            return made
        if self._specializer is None:
            raise Error(
                f"stage {self._index} was cut for other sizes: {self._cut.describe(sizes)}\n"
                f"  try: {self._remedy or _SENT}"
            )
        made = self._made[key] = self._specializer.stage(self._index, sizes, cut)
        if len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return made

    def forget(self) -> None:
        """The stage was moved: graphs say where they make tensors."""
        self._made.clear()

    def mark(self, outputs: list, sizes: Sizes) -> None:
        """For stages called by hand: lets the next one know."""
        for output in outputs if sizes else []:
            if isinstance(output, Tensor):
                setattr(output, _MARK, sizes)


_SENT = (
    "give batches of the sizes it was cut for. Only stages of a live model follow others, in the process that cut it: this "
    "one came without its model (pickled, or as bytes)"
)


def sizes_of(values: Any) -> Sizes:
    """What a stage called by hand said of the values it returned."""
    known: Sizes = {}
    for value in values:
        known.update(getattr(value, _MARK, {}))
    return known


class Specializer:
    """Captures and cuts a live model again. The engine's, but for copies: a copy is the same, a pickle is None."""

    def __init__(self, engine: Any, source: Source, arguments: dict):
        again, plain, spec = source.again, source.plain_inputs, source.in_spec

        def cut(flat: list) -> Any:
            leaves = [value if known is None else known for value, known in zip(flat, plain)]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            with _C.PausedCapture():  # of a transform of the stage
                other = again(args, kwargs)
            if other is None:
                raise Error(
                    "the model it was cut from no longer exists\n  try: keep the model as long as its stages are to take other "
                    'sizes than they were cut for; model.to("meta") lets go of its memory and not of the stages\''
                )
            return _C.cut(other.engine, **arguments)

        by_place = any(arguments.get(how) for how in ("before_ops", "before_values", "policy"))
        example = [x if isinstance(x, Tensor) else None for x in source.example]
        self._engine = _C.StageSpecializer(engine, example, cut, by_place)
        self.stage = self._engine.stage

    @property
    def captures(self) -> int:
        return self._engine.captures

    def __copy__(self) -> Specializer:
        return self

    def __deepcopy__(self, memo: dict) -> Specializer:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def make_specializer(engine: Any, source: Source, arguments: dict | None) -> Specializer | None:
    if source.again is None or arguments is None or not any(isinstance(x, Tensor) for x in source.example or []):
        return None
    return Specializer(engine, source, arguments)
