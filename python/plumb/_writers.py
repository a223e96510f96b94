"""Writers of a :class:`plumb.Recorder` beside its history: TensorBoard and Weights & Biases."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _C
from ._errors import Error, ErrorKind

if TYPE_CHECKING:
    from ._recorder import History

STATISTICS = ("std", "abs_max")


def _numbers(scalars: Mapping[str, float], rows: History | None, statistics: Iterable[str]) -> dict[str, float]:
    """Scalars by their names, and "values.std/layers.0.weight", "gradients.std/layers.0.weight" for what was recorded."""
    numbers = dict(scalars)
    for statistic in statistics if rows is not None else ():
        for row, value in enumerate(rows.statistic(statistic)):
            if not math.isnan(value):
                numbers[f"{_kind(rows, row)}.{statistic}/{_name(rows, row)}"] = float(value)
    return numbers


def _magnitudes(rows: History | None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Counts of elements by log2 of their magnitude, and the edges between them, of rows with a histogram; without zeros,
    NaN and infinities."""
    found = {}
    for row, bins in enumerate(rows.histograms() if rows is not None else ()):
        finite = np.nonzero(bins[1:255] > 0)[0]
        if bins[0] >= 0 and len(finite):
            low, high = int(finite[0]), int(finite[-1]) + 1
            edges = np.arange(low - 126, high - 125, dtype=np.float64)
            found[f"{_kind(rows, row)}.log2/{_name(rows, row)}"] = (bins[1 + low : 1 + high], edges)
    return found


def _kind(rows: History, row: int) -> str:
    return "gradients" if rows.columns["backward"][row] else "values"


def _name(rows: History, row: int) -> str:
    tensor = rows.tensors[rows.columns["tensor"][row]]
    return tensor["name"] if tensor["stage"] is None else f"stage {tensor['stage']}/{tensor['name']}"


class WandbWriter:
    """Logs every step to a run of Weights & Biases: what :class:`TensorBoardWriter` writes.

    ::

        recorder = plumb.Recorder(model, 10, "run.history", writers=[plumb.WandbWriter(wandb.init(project="fp8"))])
    """

    def __init__(self, run: Any, statistics: Iterable[str] = STATISTICS, histograms: bool = False) -> None:
        if not callable(getattr(run, "log", None)):
            raise Error(f"a run of wandb has log(), {type(run).__name__} has none", remedy="wandb.init(project=...)")
        self._run, self._statistics, self._histograms = run, tuple(statistics), histograms

    def write(self, step: int, scalars: Mapping[str, float], rows: History | None) -> None:
        numbers: dict[str, Any] = _numbers(scalars, rows, self._statistics)
        if self._histograms:
            from wandb import Histogram

            numbers |= {tag: Histogram(np_histogram=pair) for tag, pair in _magnitudes(rows).items()}
        if numbers:
            self._run.log(numbers, step=step)

    def close(self) -> None:
        """Does nothing: the run is its owner's."""


class TensorBoardWriter:
    """Writes every step to a file of events in `folder`, for TensorBoard; needs neither TensorBoard nor TensorFlow.

    ::

        recorder = plumb.Recorder(model, 10, "run.history", writers=[plumb.TensorBoardWriter("runs/fp8")])

    Scalars keep their names; a tensor's statistics are ``values.std/NAME`` and ``gradients.std/NAME``, its magnitudes as a
    histogram over powers of two ``values.log2/NAME`` (with `histograms`, where rules record them). Each step reaches the
    system when it is written.
    """

    def __init__(self, folder: str | os.PathLike, statistics: Iterable[str] = STATISTICS, histograms: bool = True) -> None:
        self._statistics, self._histograms = tuple(statistics), histograms
        self._file: _C.EventFile | None = _C.EventFile(os.fspath(folder))

    def write(self, step: int, scalars: Mapping[str, float], rows: History | None) -> None:
        if self._file is None:
            raise Error("this writer is closed", kind=ErrorKind.InvalidState, remedy="make another TensorBoardWriter")
        numbers = _numbers(scalars, rows, self._statistics)
        self._file.add(step, list(numbers.items()), _magnitudes(rows) if self._histograms else {})

    def close(self) -> None:
        self._file = None
