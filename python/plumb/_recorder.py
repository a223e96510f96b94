"""Records what a model's tensors and gradients do while it trains: :class:`Recorder`, :func:`read_history`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np
import torch
from torch import nn

from . import _C
from ._arguments import checked
from ._errors import Error, InvalidType
from ._state import refuse_sharded
from ._transformed import KEPT, keep_forward, replaceable_forward
from .transforms._apply import CapturedGraph, Pass, TransformedForward, attach_passes, own_forward
from .transforms._own_copies import forget_transforms, keep_transforms


class _RecordedForward(TransformedForward):
    """Measures forwards that train: those with gradients on."""

    __slots__ = ("_recorder", "forwards")

    def __init__(self, module: nn.Module, passes: list[Pass], recorder: _C.Recorder):
        super().__init__(module, passes, own_forward(module))
        self._recorder = recorder
        self.forwards = 0  # in this step, whichever graph ran them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        train = torch.is_grad_enabled()
        if self._recorder.enabled() != train:
            self._recorder.set_enabled(train)
        if not train or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        number, self.forwards = self.forwards, self.forwards + 1
        return _C.run_microbatch(number, functools.partial(super().__call__, *args, **kwargs))

    def _unmeasured(self) -> contextlib.ExitStack | None:
        if not self._recorder.enabled():
            return None
        self._recorder.set_enabled(False)
        stack = contextlib.ExitStack()
        stack.callback(self._recorder.set_enabled, True)
        return stack

    # A copy of the module is another model: nobody records it.
    def passes_to_copy(self) -> list[Pass]:
        return super().passes_to_copy()[:-1]

    def __reduce__(self) -> tuple:
        return TransformedForward, (self.module, self.passes_to_copy(), self.own)


@checked
class Recorder:
    """Records a module while it trains, as rules say, into a history on disk.

    ::

        recorder = plumb.Recorder(model, "rules.toml", "run.history")
        for x, y in data:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss)

    The module stays the same object with the same parameters; its forward runs a captured graph from now on. `rules` is a
    TOML file (``docs/history.md``), or a number N: everything, every N steps. Only forwards with gradients on are
    measured; where a step has several (microbatches, accumulated gradients), a tensor's elements of all of them are
    measured as one tensor. `append` goes on with a history that is there.

    Each of several processes that train one model gives its `rank` and writes a file of its own, ``PATH.rankN``;
    ``plumb.read_history(PATH)`` reads them as one. `stage`: the module is that stage of a pipeline; a rank that holds
    several gives a dict of them instead, ``{stage: module}``, and one ``step()`` is for all. With any of these, rules may
    fit nothing in the modules.

    `writers` get every step too: :class:`plumb.TensorBoardWriter`, :class:`plumb.WandbWriter`, or anything with
    ``write(step, scalars, rows)`` and ``close()``; `rows` is a :class:`History` of this one step, None where no rule asked.

    Errors (:class:`plumb.Error`): rules that cannot be read or fit no tensor (when the module first runs), a file that
    exists (without `append`) or cannot be written.
    """

    def __init__(
        self,
        module: nn.Module | Mapping[int, nn.Module],
        rules: str | os.PathLike | int,
        path: str | os.PathLike,
        *,
        append: bool = False,
        rank: int | None = None,
        stage: int | None = None,
        writers: Iterable[Any] = (),
    ) -> None:
        self._writers = tuple(writers)
        for writer in self._writers:
            if not callable(getattr(writer, "write", None)):
                raise TypeError(f"a writer has write(step, scalars, rows), {type(writer).__name__} has none")
        modules = dict(module) if isinstance(module, Mapping) else {-1 if stage is None else stage: module}
        for each in modules.values():
            if not isinstance(each, nn.Module):
                raise TypeError(
                    f"a Recorder takes a torch.nn.Module, or a dict of them by stage, got {type(each).__name__}"
                )
        if len({id(m) for m in modules.values()}) != len(modules) or not modules:
            raise Error(
                "a Recorder takes at least one module, and each once", remedy="{stage: module} for every stage here"
            )
        part = rank is not None or stage is not None or isinstance(module, Mapping)
        if isinstance(rules, int):
            if rules < 1:
                raise Error(f"every {rules} steps is no number of steps", remedy="10, or a file of rules")
            loaded = _C.RecordRules.everything(rules)
        elif isinstance(rules, (str, bytes, os.PathLike)):
            loaded = _C.RecordRules.load(os.fsencode(rules))
        else:
            raise InvalidType(f"a {type(rules).__name__} is no rules", remedy="the path of a TOML file, or a number of steps")
        stages = list(modules) if isinstance(module, Mapping) else [stage]
        for what, number in (("rank", rank), *(("stage", n) for n in stages)):
            if number is not None and (not isinstance(number, int) or number < 0):
                raise Error(f"there is no {what} {number}", remedy=f"a {what} from 0")
        if isinstance(module, Mapping) and stage is not None:
            raise Error("the modules come with their stages already", remedy="leave out stage=")
        file = os.fsencode(path) + (b"" if rank is None else b".rank%d" % rank)
        self._engine = _C.Recorder(loaded, file, append, part)
        self._places = [(n, *self._take_over(m, n)) for n, m in modules.items()]

    def _take_over(self, module: nn.Module, stage: int) -> tuple[nn.Module, Any, _RecordedForward]:
        """Returns the module, its forward as it was, and the one that it has now."""
        engine = self._engine

        def attach(_: nn.Module, captured: CapturedGraph) -> dict:
            engine.attach(captured.engine, stage)
            return {"pass": "record", "entries": []}

        known = replaceable_forward(module)
        before = module.__dict__.get("forward") if known is None else known
        forward = _RecordedForward(module, [*(known.passes if known else []), Pass("record", attach)], engine)
        keep_forward(module, forward)
        keep_transforms(module, attach_passes)
        return module, before, forward

    def step(self, **scalars: float) -> int:
        """Ends the step: writes what its rules ask for, and numbers of your own (``loss=...``). Returns how
        many tensors and gradients were recorded."""
        engine = self._engine
        numbers = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in scalars.items()}
        told = {name: float(value) for name, value in numbers.items()}
        step = engine.current_step()
        count = engine.step(list(told.items()))
        for *_, forward in self._places:
            forward.forwards = 0
        for writer in self._writers:
            writer.write(step, told, History(engine.written()) if count else None)
        return count

    def hash_state(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Adds hashes of the modules' parameters and buffers, and of the optimizer's state, to the running step: between
        ``optimizer.step()`` and ``step()``, for :func:`plumb.diff`."""
        names = {}
        for stage, module, _, _ in self._places:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                refuse_sharded(name, tensor, "hash_state() hashes", "record rank by rank without hash_state()")
                names[tensor] = name, stage
                self._engine.add_hash(name, "state", tensor.detach(), stage)
        for parameter, state in optimizer.state.items() if optimizer else ():
            for key, value in state.items():
                if parameter in names and isinstance(value, torch.Tensor):
                    name, stage = names[parameter]
                    self._engine.add_hash(f"{key}/{name}", "optimizer", value, stage)

    @property
    def current_step(self) -> int:
        """The number of the step that runs now; the first is 1."""
        return self._engine.current_step()

    def close(self) -> None:
        """Gives the modules their own forwards back and closes the file."""
        for _, module, before, forward in self._places:
            own = module.__dict__
            if own.get(KEPT) is not forward:
                continue
            if isinstance(before, TransformedForward):
                keep_forward(module, before)
            elif own["forward"] is forward:  # else something has been wrapped around it since, which calls it
                forget_transforms(module)
                del own[KEPT], own["forward"]
                if before is not None:
                    own["forward"] = before
        self._engine.close()
        for writer in self._writers:
            writer.close()
        self._places, self._writers = [], ()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class History:
    """A recorder's measurements (:func:`read_history`). A row is a tensor, or its gradient, in one step.

    - ``tensors``: a list of dicts: name, module, operator, dtype, sizes, and stage and rank, None if unknown.
    - ``columns``: numpy arrays by name, one entry a row: step, tensor (index into `tensors`), backward, by_condition,
      mean_abs, abs_mean, std, abs_max, abs_min, numel, nan_count, inf_count, zero_count. Statistics are float64, NaN where no rule asked.
    - ``events``: where a rule's condition held: step, rule, condition, count, first.
    - ``rules``: the rules of each run that wrote to the file. ``torn_bytes``: of a last record not written whole.
    """

    def __init__(self, engine: Any):
        self._engine = engine
        self.tensors: list[dict] = engine.tensors()
        self.columns: dict[str, np.ndarray] = engine.columns()
        self.events: list[dict] = engine.events()
        self.rules: list[str] = engine.rules
        self.torn_bytes: int = engine.torn_bytes

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __repr__(self) -> str:
        steps = self.columns["step"]
        span = f"steps {steps.min()} to {steps.max()}" if len(steps) else "no steps"
        more = [f"scalars {', '.join(self.scalars())}"] if self.scalars() else []
        more += [f"{len(self.events)} events"] if self.events else []
        return f"<{'; '.join([f'History: {len(self)} rows of {len(self.tensors)} tensors, {span}', *more])}>"

    def _repr_html_(self) -> str:
        rows = [["scalar", "steps", "first", "last"]]
        rows += [[name, str(len(v)), f"{v[0]:.6g}", f"{v[-1]:.6g}"] for name, (_, v) in self.scalars().items()]
        table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        listed = ""
        for event in self.events:
            where = ", ".join(f"{tensor['tensor']} ({tensor['direction']})" for tensor in event["first"])
            told = f"step {event['step']}: {event['condition']} in {event['count']} tensors, first {where}"
            listed += f"<li>{escape(told)}</li>"
        return f"<b>{escape(repr(self)[1:-1])}</b><table>{table}</table><ul>{listed}</ul>"

    def statistic(self, name: str) -> np.ndarray:
        """A statistic of every row, as in rule files: ``"std"``, ``"underflow(e5m2)"``; NaN where it was not recorded."""
        return self._engine.statistic(name)

    def histograms(self) -> np.ndarray:
        """int64 [rows, 256]: elements by exponent. Bin b counts 2^(b-127) <= \\|x\\| < 2^(b-126), bin 0 zeros, bin 255
        NaN and infinities; -1 throughout in rows without one."""
        return self._engine.histograms()

    def scalars(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns the numbers given to ``step()``: steps and values by name."""
        found: dict[str, tuple[list, list]] = {}
        for step, name, value in self._engine.scalars():
            steps, values = found.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
        return {name: (np.array(s, dtype=np.int64), np.array(v)) for name, (s, v) in found.items()}

    def to_dataframe(self, *statistics: str) -> Any:
        """Returns a pandas DataFrame, a row a tensor and step, with names instead of numbers. `statistics` are added as
        columns. Counts are whole numbers, missing (``pandas.NA``) where no rule asked for them."""
        import pandas as pd

        columns = dict(self.columns)
        place = columns.pop("tensor")
        named = {"step": columns.pop("step")}
        for key in ("name", "module", "operator"):
            named[key] = np.array([t[key] for t in self.tensors], dtype=object)[place] if len(place) else []
        for key in ("stage", "rank"):
            if any(t[key] is not None for t in self.tensors):
                named[key] = pd.array([t[key] for t in self.tensors], dtype="Int64")[place]
        for key in ("numel", "nan_count", "inf_count", "zero_count"):
            columns[key] = pd.array(columns[key], dtype="Int64")
        named["direction"] = np.where(columns.pop("backward"), "backward", "forward")
        return pd.DataFrame({**named, **columns, **{s: self.statistic(s) for s in statistics}})


def read_history(path: str | os.PathLike) -> History:
    """Reads what a :class:`Recorder` wrote, also while it still writes. Where there is no such file but ``PATH.rank0``,
    ``PATH.rank1``, ..., these are read as one history, in which every tensor knows its rank. :class:`plumb.Error` for
    anything else, and for a set in which a rank is missing."""
    return History(_C.read_history(os.fsencode(path)))
