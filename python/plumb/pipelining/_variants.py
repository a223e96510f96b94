"""The cuts of a live model for what its forward reads besides the sizes of its inputs: training modes, autocast, dtypes, attributes and
hooks (see _capture/guards.py). The model is captured and cut again for each, at the same places."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .._capture.forward import capture_lock
from .._capture.guards import GraphStore, Guards, enabled_autocast
from .._errors import Error, ErrorKind
from .._state import CONSTANT
from ._sources import Source

MAX_VARIANTS = 16  # variants of one pipe; the one unused for longest goes first

Dtypes = dict[torch.dtype, torch.dtype]  # what floating-point tensors of the model were converted to since the cut


class Facts(NamedTuple):
    autocast: tuple
    modes: tuple[bool, ...] | None  # modes of the model's modules; None if the forward does not depend on them
    dtypes: tuple


@dataclass(eq=False)
class Variant:
    """A model as it was captured under some facts."""

    facts: Facts
    source: Source
    arguments: dict  # keyword arguments of its _C.cut()
    engine: Any  # its cut, whose stages nobody runs
    specializer: Any

    @property
    def guards(self) -> Guards:
        return self.source.guards


@contextlib.contextmanager
def _as_if_called(autocast: tuple) -> Iterator[None]:
    """Captures for a variant are made in this, wherever it is needed first."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_C.PausedCapture())  # a transform of the stage may be capturing
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


def _make_specializer(engine: Any, source: Source, arguments: dict, facts: Facts, ready: bool) -> Any:
    """Returns the engine's `StageSpecializer`: the model is captured for other flat inputs and cut at the same places.
    `ready`: the first request for the sizes of `source` takes `engine`."""
    waiting = [engine] if ready else []

    def cut(flat: list) -> Any:
        if waiting and all(x is None or x.shape == y.shape for x, y in zip(flat, source.example)):
            return waiting.pop()
        with _as_if_called(facts.autocast):
            other = source.again(*source.inputs(flat))
        if other is None:
            raise Error(
                "the model it was cut from no longer exists",
                kind=ErrorKind.InvalidState,
                remedy="keep the model as long as its stages are to take other sizes than they were cut for; "
                'model.to("meta") lets go of its memory and not of the stages\'',
            )
        return _C.cut(other.engine, **arguments)

    by_place = any(arguments.get(how) for how in ("before_ops", "before_values", "policy"))
    return _C.StageSpecializer(engine, [x if isinstance(x, Tensor) else None for x in source.example], cut, by_place)


class _Begin(NamedTuple):
    """The place where a stage begins, in words that hold for other captures of the model, too: directly before the
    first of its calls that there is, or at one of the casts before it."""

    calls: list[tuple]  # keys of `_Calls`
    before: int  # casts between the beginning of the stage and its first call
    casts: int  # all casts directly before this call


class _Calls:
    """The operator calls of a graph that have results, each with a key: operator, module, line and which one of these it is."""

    def __init__(self, graph: Any):
        self.nodes = [n for n in graph.nodes if n.op == "call_function" and n.results]
        counts: dict[tuple, int] = {}
        self.places: dict[tuple, int] = {}
        for i, node in enumerate(self.nodes):
            kind = (node.target, node.module_path, node.source)
            counts[kind] = counts.get(kind, 0) + 1
            self.places[(*kind, counts[kind])] = i

    def is_cast(self, i: int) -> bool:
        return self.nodes[i].target.startswith("aten::to.")

    def casts_before(self, i: int) -> int:
        begin = i
        while begin > 0 and self.is_cast(begin - 1):
            begin -= 1
        return i - begin

    def begins(self, engine: Any) -> list[_Begin]:
        """Returns the places where the stages of this graph's cut begin, except the first one."""
        by_name = {node.name: i for i, node in enumerate(self.nodes)}
        ends = [max([by_name.get(node.name, -1) for node in engine.stage(s).graph.nodes]) + 1 for s in range(engine.num_stages)]
        keys, found = list(self.places), []
        for begin, end in zip(ends, ends[1:]):
            calls = [i for i in range(begin, end) if not self.is_cast(i)] or [begin]
            found.append(_Begin([keys[i] for i in calls], calls[0] - begin, self.casts_before(calls[0])))
        return found

    def value_at(self, begin: _Begin) -> str | None:
        """Returns the name of the value before which a stage begins; None if the graph has none of its calls."""
        key = next((key for key in begin.calls if key in self.places), None)
        if key is None:
            return None
        call = self.places[key]
        casts = self.casts_before(call)
        as_cut = key == begin.calls[0] and casts == begin.casts
        return self.nodes[call - (begin.before if as_cut else casts)].name


def _flow(table: Any) -> list:
    """Returns the values between the stages of a cut, without names and sizes."""
    return [
        ([(p["stage"], p["index"]) for p in table.inputs(s)], [(p["consumers"], p["pipeline_output"]) for p in table.outputs(s)])
        for s in range(table.num_stages)
    ]


class Variants:
    """The variants of one cut; its pipe, its stages and their copies share them."""

    def __init__(self, engine: Any, source: Source, arguments: dict):
        self._arguments, self._source = arguments, source
        self._training = source.module._made_in_training
        self.depends_on_mode = bool(source.guards.mode_line) or _C.depends_on_mode(source.module.graph, False)
        facts = Facts(enabled_autocast(), source.modes() if self.depends_on_mode else None, ())
        self.base = Variant(facts, source, arguments, engine, _make_specializer(engine, source, arguments, facts, ready=False))
        self._known = GraphStore(MAX_VARIANTS, MAX_VARIANTS)  # Variant objects, by their facts
        self._known.add(facts, self.base)
        self._lock = threading.RLock()
        self.dtypes = {dtype for dtype, _ in source.kinds.values() if dtype.is_floating_point}  # the model's dtypes at the cut

    # Copying returns the same object. A pickled one comes without its model.
    def __deepcopy__(self, memo: dict) -> Variants:
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()

    def is_gone(self) -> bool:
        return self._source.model() is None

    def _facts(self, training: bool, dtypes: Dtypes) -> Facts:
        modes = self.base.facts.modes
        if self.depends_on_mode and not self.is_gone():  # else the stages know by themselves
            modes = self._source.modes()
            if training != self._training:
                modes = (training,) * len(modes)
        return Facts(enabled_autocast() or self.base.facts.autocast, modes, tuple(sorted(dtypes.items(), key=str)))

    def last_used(self, training: bool, dtypes: Dtypes) -> Variant | None:
        """Returns the variant that was last `current` for this. What its forward had read may have changed since."""
        return next(iter(self._known.get(self._facts(training, dtypes), ())), None)

    def current(self, training: bool, dtypes: Dtypes) -> Variant:
        """Returns the variant for what holds now. `training`: the mode of the stages. Autocast is that of the cut where
        none is on. Modules have the modes that the model gives them, unless the stages were set to another mode than
        they were cut in: that is all modules' then. Raises `plumb.Error` if the model cannot be captured or cut so."""
        facts, base = self._facts(training, dtypes), self.base
        with self._lock:
            variant = self._known.find(facts)
        if variant is None:
            with capture_lock, self._lock:
                variant = self._known.find(facts)
                if variant is None:  # no other thread has made it meanwhile
                    variant = base if base.facts == facts and base.guards.hold() else self._make(facts)
                    self._known.add(facts, variant)
        return variant

    def _make(self, facts: Facts) -> Variant:
        dtypes = dict(facts.dtypes)
        inputs = self._source.inputs([_converted(x, dtypes) for x in self._source.example])
        with _as_if_called(facts.autocast):
            source = self._source.again(*inputs, modes=facts.modes, dtypes=dtypes)
        if source is None:
            raise Error(
                f"{self._news(facts)}, and the model it was cut from no longer exists",
                kind=ErrorKind.InvalidState,
                remedy="keep the model as long as its stages are to follow it, or cut it as it is to run",
            )
        arguments = self._arguments_for(source, facts)
        engine = self._cut(source, facts, arguments)
        with _as_if_called(facts.autocast):
            specializer = _make_specializer(engine, source, arguments, facts, ready=True)
        return Variant(facts, source, arguments, engine, specializer)

    def _arguments_for(self, source: Source, facts: Facts) -> dict:
        """The arguments that cut this capture at the places of the first one. Another capture may have more calls than the first, such as
        casts of autocast, so a place among all calls or a value's name may be elsewhere in it."""
        if not (self._arguments.get("before_ops") or self._arguments.get("before_values")):
            return self._arguments
        calls, names = _Calls(source.module.graph), []
        for s, begin in enumerate(_Calls(self._source.module.graph).begins(self.base.engine), 1):
            names.append(calls.value_at(begin))
            if names[-1] is None:
                raise Error(
                    f"{self._news(facts)}, and none of the operators of stage {s} are called now",
                    kind=ErrorKind.InvalidState,
                    remedy="cut the model again as it is now",
                )
        return {**self._arguments, "before_ops": [], "before_values": names}

    def _cut(self, source: Source, facts: Facts, arguments: dict) -> Any:
        """Returns a cut of this capture with the flow and the parameters of the first one."""
        engine, base = _C.cut(source.engine, **arguments), self.base
        if _flow(engine.table) != _flow(base.engine.table) or source.module._out_spec != base.source.module._out_spec:
            raise Error(
                f"{self._news(facts)}, and other values cross between the stages now than when the model was cut",
                kind=ErrorKind.InvalidState,
                remedy="cut the model again as it is now",
            )
        for s in range(engine.num_stages):
            known = {name for name, *_ in base.engine.stage(s).state()}
            missing = [name for name, kind, *_ in engine.stage(s).state() if kind != CONSTANT and name not in known]
            if missing:
                raise Error(
                    f"{self._news(facts)}, and stage {s} uses '{missing[0]}' now, which it did not use then",
                    kind=ErrorKind.Partition,
                    remedy="cut the model again as it is now",
                )
        return engine

    def _news(self, facts: Facts) -> str:
        base = self.base
        if facts.autocast != base.facts.autocast:
            return "autocast is not as it was when the model was cut"
        if facts.modes != base.facts.modes:
            modes = ("evaluation", "training")
            return f"the model was cut in {modes[self._training]} mode and modules of it are to run in {modes[not self._training]} mode"
        if facts.dtypes != base.facts.dtypes:
            return "the stages were converted to " + ", ".join(sorted({str(new) for _, new in facts.dtypes}))
        return f"'{base.source.guards.broken}', which the forward reads, is not as it was when the model was cut"


def _converted(x: Any, dtypes: Dtypes) -> Any:
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        return x
    return x.detach().to(dtypes[x.dtype]).requires_grad_(x.requires_grad)


def make_variants(engine: Any, source: Source, arguments: dict | None) -> Variants | None:
    """None for what holds one graph alone."""
    if source.again is None or arguments is None or source.example is None:
        return None
    return Variants(engine, source, arguments)
