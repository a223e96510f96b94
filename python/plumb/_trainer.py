"""Trains a model by options: :class:`Trainer`, the engine of `plumb train`."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

import torch

from . import _C
from ._capture.guards import enabled_autocast
from ._errors import Error, ErrorKind
from ._graph_module import GraphModule
from ._plain_state import from_plain, to_plain
from ._progress import Progress, progress
from ._state import sync_state
from ._unit_scaled import is_marked

_METHODS = {
    "options": "on_start",
    "resumed": "on_resume",
    "step": "on_step",
    "eval": "on_eval",
    "checkpoint": "on_checkpoint",
    "checkpoint_problem": "on_problem",
    "problem": "on_problem",
    "dumped": "on_problem",
    "saved": "on_save",
    "interrupted": "on_stop",
}


class TrainResult(NamedTuple):
    """The result of :meth:`Trainer.run`."""

    steps: int
    """The last step that was done."""
    loss: float
    """The loss of that step, over all its rows; NaN if all steps were done before."""
    eval_loss: float | None
    """The loss of the last evaluation."""
    stopped: bool
    """:meth:`Trainer.stop` was called."""


class Trainer:
    """Trains a model as options say, in this process or as one rank of a launcher's (torchrun).

    ::

        trainer = plumb.Trainer("gpt.pt2", "text.bin", steps=200, lr=3e-4, rate="cosine", warmup=20, clip=1.0,
                                eval_data="held.bin", checkpoints="run", checkpoint_every=50)
        print(trainer.run().eval_loss)

    `model`: a ``.pt2`` file, or a graph of :func:`plumb.capture` or :func:`plumb.load_pt2`, whose parameters are trained in
    place. `data`: what ``--data`` takes, or any iterable of batches, ``inputs`` or ``(inputs, targets)``, each a tensor or
    a tuple of tensors: a DataLoader, for example. With ``loss="output"`` all of them are the model's inputs. The data is gone
    through again when it ends. If it has ``state_dict()`` and ``load_state_dict()``, checkpoints keep its state, as JSON (of
    numbers, texts, bytes, tensors, arrays, lists, tuples and dicts); else a resumed run goes through all batches that were
    taken, those of earlier epochs too unless the data is a list. Every rank must have equal batches: all rows of a step. A step
    whose batches differ ends the training.

    The other options are those of `plumb train --help`, with ``_`` for ``-``; ``config`` is a TOML file of them. The same
    options give the same bits as the command. `hooks`: an object with any of the methods ``on_start``, ``on_resume``,
    ``on_step``, ``on_eval``, ``on_checkpoint``, ``on_problem``, ``on_save``, ``on_stop``; each gets a dict, as ``--json``
    prints it, and ``on_event`` gets those of all other kinds. A problem that no ``on_problem`` takes is a warning: that nothing
    will keep the trained weights of a file, among them. An exception of a hook ends the training; one of the data does, too, as the
    ``__cause__`` of the error. `progress`: whether :meth:`run` draws a bar; None: in a terminal (on standard error) and in a notebook.

    Errors (:class:`plumb.Error`) name the option and say what to give instead.
    """

    def __init__(
        self,
        model: str | os.PathLike | GraphModule | None = None,
        data: str | os.PathLike | Iterable | None = None,
        *,
        hooks: Any = None,
        config: str | os.PathLike | None = None,
        progress: bool | None = None,
        **options: Any,
    ):
        methods = {*_METHODS.values(), "on_event"}
        if hooks is not None and not any(hasattr(hooks, name) for name in methods):
            what = f"hooks is a {type(hooks).__name__} with none of the methods that are called"
            raise Error(what, remedy=f"an object with any of {', '.join(sorted(methods))}")
        self._hooks, self._wants_progress = hooks, progress
        self._progress: Progress | None = None
        self._done: Mapping[str, Any] | None = None  # the last step's event
        self._what = os.fspath(model) if isinstance(model, (str, os.PathLike)) else "a config's file" if model is None else "a graph"
        engine = record = None
        has_layers = False  # tagged parameters belong to a model of unit-scaled layers
        self._graph = model if isinstance(model, GraphModule) else None
        if isinstance(model, GraphModule):
            model.require_its_graph("plumb.Trainer")
            engine, record, has_layers = model._engine, model._program, not is_marked(model)
            sync_state(engine, model._slots)
        elif isinstance(model, (str, os.PathLike)):
            options["file"] = os.fspath(model)
        elif model is not None:
            raise Error(
                f"a {type(model).__name__} is neither a .pt2 file nor a graph", remedy="plumb.capture(model, *example_inputs)"
            )
        refused = {"file": "a model in a file, and the model is a graph"} if engine is not None else {}
        if data is not None and not isinstance(data, (str, os.PathLike)):
            why = "data in files, and these are batches"
            refused.update(dict.fromkeys(("targets", "mask", "token_type", "data_pattern"), why))
        for name, why in refused.items():
            if options.get(name) is not None:
                raise Error(f"{name} is for {why}", remedy="leave it out; batches are inputs, or (inputs, targets)")
        batches = None
        if isinstance(data, (str, os.PathLike)):
            options["data"] = os.fspath(data)
        elif data is not None:
            batches = _Batches(data)
        path = "" if config is None else os.fspath(config)
        texts = {name.replace("_", "-"): _texts(value) for name, value in options.items() if value is not None}
        self.options = _C.train_toml(path, texts)
        """Every option, as a TOML document."""
        self._trainer = _C.Trainer(path, texts, engine, record, has_layers, batches, self._tell)
        first = os.environ.get("RANK", "0") == "0"
        if engine is None and first and not _C.train_saves_weights(path, texts):
            problem = "what is learned will be lost: no save, save_hf or checkpoints, and the model is a file"
            self._tell("problem", {"problem": problem})

    def run(self) -> TrainResult:
        """Trains to the last step, once. An error of the training is a :class:`plumb.Error`."""
        if self._trainer is None:
            raise Error("this training has run", kind=ErrorKind.InvalidState, remedy="make another Trainer")
        if now := enabled_autocast():
            raise Error(
                f"the training is run under torch.autocast to {', '.join(str(dtype) for dtype, _ in now)}, which is no option of its",
                kind=ErrorKind.InvalidState,
                remedy='autocast="bf16", outside of torch.autocast',
            )
        self._progress = progress() if self._wants_progress is None else Progress() if self._wants_progress else None
        try:
            return TrainResult(*self._trainer.run())
        finally:
            self._trainer = None  # its folder of checkpoints is free for the next
            if self._graph is not None and any(p.is_meta for p in self._graph.parameters()):
                self._graph.take_state()  # values that came from the folder of an import
            if self._progress is not None:
                self._progress.close()

    def stop(self) -> None:
        """Ends the training with the step that runs (called by a hook, or from another thread)."""
        if self._trainer is not None:
            self._trainer.stop()

    def __repr__(self) -> str:
        return f"<Trainer of {self._what}: {self._state()}>"

    def _repr_html_(self) -> str:
        return f"<b>Trainer</b> of <code>{escape(self._what)}</code>: {escape(self._state())}<pre>{escape(self.options)}</pre>"

    def _state(self) -> str:
        if self._done is None:
            return "not run yet" if self._trainer is not None else "ended before its first step"
        loss = self._done.get("loss")
        at = f"step {self._done['step']} of {self._done['steps']}" + (f", loss {loss:.4g}" if loss is not None else "")
        return at if self._trainer is not None else f"ended at {at}"

    def _tell(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "step":
            self._done = event
            if self._progress is not None:
                self._progress.step(event)
        method = getattr(self._hooks, _METHODS.get(kind, "on_event"), None)
        if method is not None:
            method(event)
        elif problem := event.get("problem", event.get("checkpoint_problem")):
            warnings.warn(problem, stacklevel=3)  # at the line that makes or runs the trainer


def _texts(value: Any) -> list[str]:
    return [_text(each) for each in (value if isinstance(value, (list, tuple)) else [value])]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


class _Batches:
    """An iterable as the engine wants it."""

    def __init__(self, source: Iterable):
        self._source = source
        self._iterator: Iterator | None = None
        self._taken = 0  # number of batches taken from the current iterator
        self._begun = 0  # number of iterators: a loader that shuffles draws anew for each

    def next(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        for _ in range(2):
            if self._iterator is None:
                self._begin()
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._taken == 0:
                    raise Error("the data has no batch", remedy="an iterable that can be gone through again") from None
                self._iterator = None
                continue
            self._taken += 1
            pair = isinstance(batch, (tuple, list)) and len(batch) == 2
            inputs, targets = batch if pair else (batch, ())
            return _tensors(inputs), _tensors(targets)
        raise Error("the data has no batch when it is gone through again", remedy="no generator: a DataLoader or a list")

    def _begin(self) -> None:
        self._iterator, self._taken, self._begun = iter(self._source), 0, self._begun + 1

    def state(self) -> str:
        kept = getattr(self._source, "state_dict", None)
        how = {"begun": self._begun} if kept is None else {"state": to_plain(kept(), "the data's state")}
        return json.dumps({"batches": self._taken, **how})

    def load_state(self, text: str) -> None:
        state = json.loads(text)
        if not isinstance(state, Mapping) or not isinstance(state.get("batches"), int):
            raise Error("the checkpoint's position in the data is not one of an iterable", remedy="the data it was written with")
        restored = "state" in state and hasattr(self._source, "load_state_dict")
        if restored:
            self._source.load_state_dict(from_plain(state["state"], "state of the data"))
        begun = state.get("begun", 1)
        if not isinstance(begun, int):
            raise Error("the checkpoint's position in the data is not one of an iterable", remedy="the data it was written with")
        if restored:
            self._begin()
            self._taken = state["batches"]
            return
        # A loader that shuffles draws when it begins, as it goes and when it ends. A list is the same each time.
        for _ in range(0 if isinstance(self._source, (list, tuple)) else begun - 1):
            self._begin()
            for _ in self._iterator or ():
                pass
        self._begin()
        self._begun = begun
        for taken in range(state["batches"]):
            if next(self._iterator, None) is None:
                raise Error(
                    f"the data ends after {taken} batches, and the checkpoint was written after {state['batches']} of them",
                    remedy="the data it was written with",
                )
            self._taken += 1

    def identity(self) -> str:
        return type(self._source).__qualname__


def _tensors(values: Any) -> list[torch.Tensor]:
    flat = list(values) if isinstance(values, (tuple, list)) else [values]
    for value in flat:
        if not isinstance(value, torch.Tensor):
            raise Error(f"a batch holds a {type(value).__name__}", remedy="tensors, or (inputs, targets) of tensors")
    return flat
